"""Observes a node: its metrics, the spans of its jobs, and profiles."""
