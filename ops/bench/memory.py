"""RSS of this process and of those it started, as Linux counts it. Pages that two share count twice."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """The processes that `pid` started, and those that they started."""
    parents: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            # The command's name stands in brackets and may hold anything.
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def resident_mib(*, with_own: bool) -> float:
    """Now, over the descendants, and over this process too if it is the one that runs the engine."""
    return _total_mib("VmRSS", with_own=with_own)


def peak_mib(*, with_own: bool) -> float:
    """The sum of each living process's highest."""
    return _total_mib("VmHWM", with_own=with_own)


def _total_mib(field: str, *, with_own: bool) -> float:
    pids = descendants(os.getpid()) + ([os.getpid()] if with_own else [])
    return sum(_kib_of(pid, field) for pid in pids) / 1024


def _kib_of(pid: int, field: str) -> int:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", (PROC / str(pid) / "status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
