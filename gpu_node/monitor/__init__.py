"""What watches a node: health checks, metrics, counters and the watchdog."""
