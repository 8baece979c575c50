"""The memory of this process, and what the system could still give it."""

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


def available_bytes() -> int:
    """Return the memory that the system, and the limit of this process's control group, still allow; 0 if unknown."""
    available = _read_number("/proc/meminfo", "MemAvailable:") << 10
    limit, used = (_read_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    return min(available, max(0, limit - used)) if limit else available


def _read_number(path: str, name: str = "") -> int:
    """Return the number after a name in a file, or the file's only number; 0 if there is none."""
    try:
        with open(path, encoding="ascii") as file:
            found = next((line.removeprefix(name).split()[0] for line in file if line.startswith(name)), "")
    except (OSError, IndexError):
        return 0
    return int(found) if found.isdecimal() else 0


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
