"""The memory of this process."""

from __future__ import annotations

import os


def resident_bytes() -> int:
    """Return the physical memory that this process occupies, or 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
