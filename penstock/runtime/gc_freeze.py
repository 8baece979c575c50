"""Garbage-collector set-up of a serving process, after loading and before the first request."""

from __future__ import annotations

import gc

MIDDLE_PER_FULL = 200
"""Collections of the middle generation before a full one: 1.4 million objects more than at the last one. Circular
garbage therefore takes some 100 MB at most. Python's default is 10."""


def freeze_gc() -> None:
    """Exclude all objects that exist now from garbage collection.

    They will never be garbage. A collection that scans them stops all Python threads for tens of milliseconds, which
    would delay tokens.
    """
    gc.collect()
    gc.freeze()


def make_full_collections_rare() -> None:
    """Delay full garbage collections until far more objects were created than a process usually holds.

    A gateway with 5,000 streams holds a million objects. A full collection visits all of them, for 0.3 s and more, and
    by default comes whenever their number has grown by a quarter. It would find nothing, because ended streams leave no
    circular garbage.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, MIDDLE_PER_FULL)
