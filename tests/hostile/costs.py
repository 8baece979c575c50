"""What processes hold in memory while something is done to them, their children included."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

SAMPLE_S = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """The largest resident size of each process, and what it was when it was first seen."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._first: dict[tuple[str, int], int] = {}
        self._most: dict[tuple[str, int], int] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_S)

    def look(self) -> None:
        """Takes one sample."""
        for name, pid in self._pids().items():
            self._note(name, pid)
            for child in _descendants(pid):
                self._note(f"{name}'s child", child)

    def start_anew(self) -> None:
        """What processes hold now is what they had before."""
        self._first.clear()
        self._most.clear()
        self.look()

    def growth(self) -> dict[str, int]:
        """Bytes by which processes grew at most; of several children of one process, the one that grew the most."""
        grown: dict[str, int] = {}
        for (name, pid), most in self._most.items():
            grown[name] = max(grown.get(name, 0), most - self._first[name, pid])
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


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except OSError:
        return []
    return [one for child in children for one in (child, *_descendants(child))]
