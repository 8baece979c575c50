"""Calls of a client: those that run many jobs and wait while the pool is busy, and what gateways ask."""
