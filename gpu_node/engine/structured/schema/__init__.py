"""Rewriting of JSON schemas into schemas that llguidance enforces.

llguidance lacks some keywords. `rewriting.py` drops those without effect, expresses others by keywords that it has, and
refuses the rest by name. The result allows no value that the given schema forbids. The rewriting runs in the grammar
workers, under their limits of time and memory.
"""
