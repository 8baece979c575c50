"""Observes a node: health checks, metrics, counters and the watchdog."""
