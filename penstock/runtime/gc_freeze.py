"""Garbage-collector set-up of a serving process, after loading and before the first request."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Exclude all objects that exist now from garbage collection.

    They will never be garbage. A collection that scans them stops all Python threads for tens of milliseconds, which
    would delay tokens.
    """
    gc.collect()
    gc.freeze()
