"""Garbage collection: a block without it, and a serving process that seldom stops for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MIDDLE_PER_FULL = 200
"""Collections of the middle generation before a full one: 1.4 million objects more than at the last one. Circular
garbage therefore takes some 100 MB at most. Python's default is 10."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection in a block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze_gc() -> None:
    """Exclude all objects that exist now from garbage collection: after loading, before the first request.

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
