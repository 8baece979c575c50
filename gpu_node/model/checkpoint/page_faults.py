"""Map the pages of a file before they are read, which is cheaper than a page fault for each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MADV_POPULATE_READ = 22
"""Since Linux 5.14."""
_PART_BYTES = 64 << 20
_MEMINFO = Path("/proc/meminfo")


def fault_in(mapped: NDArray[np.uint8], is_enough: Callable[[], bool]) -> None:
    """Map the pages of a file's mapping, which starts at a page, until `is_enough` or the kernel refuses.

    Other threads run meanwhile. Does nothing if the file is larger than the available memory: its pages would evict
    each other.
    """
    if mapped.nbytes > _available_bytes():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start in range(0, mapped.nbytes, _PART_BYTES):
        size = min(_PART_BYTES, mapped.nbytes - start)
        if is_enough() or madvise(mapped.ctypes.data + start, size, _MADV_POPULATE_READ) != 0:
            return


def _available_bytes() -> int:
    """Return how many bytes can be used without swapping; 0 if the kernel does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    sizes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] * 1024 if sizes else 0
