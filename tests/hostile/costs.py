"""Memory of processes and their children during an attack.

A node reserves its KV cache when it starts, and the kernel assigns pages on first use. This is not growth, so the KV
cache's mapping is excluded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

SAMPLE_S = 0.05
KV_CACHE_KIB = 900 << 10
"""A mapping without a file that is at least so large is a node's KV cache, of 1 GiB by default."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """The largest RSS of each process, and its RSS when it was first seen."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._first: dict[tuple[str, int], int] = {}
        self._most: dict[tuple[str, int], int] = {}
        self._cached: dict[int, int] = {}
        """Bytes of a process's KV cache that were in use at the start."""

    async def run(self) -> None:
        """Take samples until canceled."""
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_S)

    def look(self) -> None:
        """Take one sample."""
        for name, pid in self._pids().items():
            self._note(name, pid)
            for child in _descendants(pid):
                self._note(f"{name}'s child", child)

    def start_anew(self) -> None:
        """Use the present sizes as the new baselines."""
        self._first.clear()
        self._most.clear()
        self._cached = {pid: _kv_cache(pid) for pid in self._pids().values()}
        self.look()

    def growth(self) -> dict[str, int]:
        """Return each process's largest growth in bytes. Of several children of one process, the largest counts."""
        grown: dict[str, int] = {}
        for (name, pid), most in self._most.items():
            cached = max(0, _kv_cache(pid) - self._cached.get(pid, 0)) if pid in self._cached else 0
            grown[name] = max(grown.get(name, 0), most - self._first[name, pid] - cached)
        return grown

    def _note(self, name: str, pid: int) -> None:
        resident = _resident(pid)
        if resident:
            self._first.setdefault((name, pid), resident)
            self._most[name, pid] = max(self._most.get((name, pid), 0), resident)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _kv_cache(pid: int) -> int:
    """Return the bytes in use of the KV cache's mapping."""
    size, total = 0, 0
    try:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Size":
                size = int(value.split()[0])
            elif name == "Rss" and size >= KV_CACHE_KIB:
                total += int(value.split()[0]) << 10
    except OSError:
        return 0
    return total


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except OSError:
        return []
    return [one for child in children for one in (child, *_descendants(child))]
