"""Simulated loads under each scheduling policy: `python -m bench.policies`."""
