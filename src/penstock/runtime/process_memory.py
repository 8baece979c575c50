"""The memory of this process: what it takes, and how seldom garbage is collected."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

LARGE_BLOCK_BYTES = 256 << 10
_M_MMAP_THRESHOLD = -3
"""The parameter's number in glibc's malloc.h."""


def resident_bytes() -> int:
    """Return the physical memory that this process occupies, or 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def keep_large_blocks_apart() -> None:
    """Let the C library take each block of LARGE_BLOCK_BYTES from the system, and return it once it is freed.

    glibc does so at first. After it has freed a block of megabytes, it takes blocks of that size from its heap, which
    small blocks at its end keep from shrinking. Only for processes that compute little, because new memory costs
    time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def limit_growth(num_bytes: int) -> None:
    """Limit this process's data memory to its present size plus so many bytes."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        num_pages = int(statm.read().split()[5])
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


YOUNG_PER_COLLECTION = 10_000
"""New objects before a collection of the youngest generation. Python's default is 700."""
YOUNG_PER_MIDDLE = 10
"""Collections of the youngest generation before one of the middle one: Python's default."""
MIDDLE_PER_FULL = 14
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


def make_collections_rare() -> None:
    """Delay garbage collections until far more objects were created than a process usually holds.

    A gateway with 5,000 streams holds a million objects. A full collection visits all of them, for 0.3 s and more, and
    by default comes whenever their number has grown by a quarter. Collections of young objects take 4 % of its CPU time
    by default. They would find nothing, because ended streams leave no circular garbage.
    """
    gc.set_threshold(YOUNG_PER_COLLECTION, YOUNG_PER_MIDDLE, MIDDLE_PER_FULL)
