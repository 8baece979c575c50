"""What a process that serves does when all is loaded and before the first request."""

from __future__ import annotations

import gc


def settle() -> None:
    """Takes what is loaded out of the garbage collector's sight.

    None of it will ever be garbage, and a look through all of it stops every thread of Python's for tens of
    milliseconds, in the middle of somebody's tokens.
    """
    gc.collect()
    gc.freeze()
