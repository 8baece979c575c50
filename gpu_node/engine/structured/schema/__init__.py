"""Rewriting of JSON schemas into schemas that llguidance enforces, without any change of what is valid.

llguidance lacks some keywords. `rewriting.py` drops those that have no effect, expresses others by keywords that it has,
and refuses the rest by name. It runs in the grammar workers, under their limits of time and memory.
"""
