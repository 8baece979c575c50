"""What became of a mask, as workers and the node say it to each other."""

from __future__ import annotations

WRITTEN, MISFIT, PAST_LIMITS, UNKNOWN, EMPTY = range(5)
"""It is there; the tokens do not fit the grammar; the matcher hit a limit; the worker has no such grammar; no token
is left."""
