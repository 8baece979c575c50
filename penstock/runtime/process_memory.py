"""The memory of this process: what it takes, what the system could still give, and how seldom garbage is collected."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
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
    """Return the memory that the system, and the limits of this process's control groups, still allow; 0 if unknown.

    Pages of files that are cached count as available, as the system itself counts them.
    """
    return min([_number(_PROC / "meminfo", "MemAvailable:") << 10, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield what each control group of this process that has a limit still allows.

    Often a container has its own group mounted as the root. Then its path leads nowhere, and the root has the limit.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, (limit, used), cached = _GROUPS, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            root, (limit, used) = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cached = "total_"  # With the groups below it, as in its usage.
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            if most := _number(folder / limit):
                files = sum(_number(folder / "memory.stat", f"{cached}{kind}_file ") for kind in ("active", "inactive"))
                yield max(0, most - _number(folder / used) + files)


def _number(path: Path, name: str = "") -> int:
    """Return the number after a name in a file, or the file's only number; 0 if there is none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = next((line.removeprefix(name).split()[:1] for line in lines if line.startswith(name)), [])
    return int(found[0]) if found and found[0].isdecimal() else 0


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
