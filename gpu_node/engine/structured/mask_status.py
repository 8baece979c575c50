"""The status of a mask, as workers report it to the node."""

from __future__ import annotations

WRITTEN, MISFIT, PAST_LIMITS, UNKNOWN, EMPTY = range(5)
"""The mask is there; the tokens do not fit the grammar; the matcher hit a limit; the worker does not have the grammar;
no token can follow."""
