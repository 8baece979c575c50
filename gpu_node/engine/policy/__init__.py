"""Policies inside an engine: which sequence starts next, which is preempted, and which adapters are loaded."""
