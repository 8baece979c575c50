"""Stored files: their contents in a folder or an object store, shared by gateways and workers, and their service."""
