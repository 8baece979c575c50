"""The memory of this process."""

from __future__ import annotations

import ctypes
import os
import resource

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
