"""The picture of a trace in ops/TRACING.md: it is recorded from real processes, of which one is killed."""
