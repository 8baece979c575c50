"""Nodes on the same cores: background work of one waits while another one has work for which a caller waits.

Each node of a host has a place in a file of the runtime folder, which all of them map into memory. A place holds the
time at which its node last had foreground work, and the cores that the node may use. The time counts for WORD_S, so a
node that was killed or stopped loses its word by itself.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.runtime.local_redis import check_private, local_folder
from penstock.runtime.settings import RedisSettings

log = logging.getLogger(__package__)

WORD_S = 0.75
"""Seconds for which a node's word counts. A node says it anew before each step. A second less what a busy host adds."""
PAUSE_S = 0.005
"""Longest pause between two looks at the words of other nodes."""
_FILE = "foreground.words"
_NUM_PLACES = 64
_NUM_CORES = 1024
_PLACE = np.dtype([("said_s", "<f8"), ("cores", "u1", _NUM_CORES // 8), ("padding", "u1", 120)])
"""A place has 256 bytes, so that the words of two nodes are in different lines of the processor's cache."""
_LOCK = struct.Struct("hhqqi4x")
"""A lock of a part of a file, as Linux's `struct flock`: kind, whence, start, length, pid."""


class Gate(Protocol):
    """Decides whether an engine's next step must wait."""

    @property
    def is_foreground_beside(self) -> bool:
        """Whether another node on these cores had foreground work at the last look."""

    def pause_s(self, now_s: float, *, has_foreground: bool) -> float:
        """Return for how long the next step should wait before this is asked again; 0: it may begin.

        now_s: the host's monotonic clock. has_foreground: whether the engine has work for which a caller waits.
        """

    def idle(self) -> None:
        """Note that the engine has no work."""


class SharedCores:
    """A node's place among the nodes of its host. The engine's thread alone uses it."""

    def __init__(self, file: int, place: int, share: float, cores: Collection[int]) -> None:
        """file: the open file, whose part for `place` this process has locked. share: what background work gets."""
        self._file = file
        self._share = share
        self._map = mmap.mmap(file, _NUM_PLACES * _PLACE.itemsize)
        self._places = np.frombuffer(self._map, _PLACE)
        self._said_s = self._places["said_s"]
        self._place = place
        own = np.zeros(_NUM_CORES, np.uint8)
        own[[core for core in cores if core < _NUM_CORES]] = 1
        self._own_cores = np.packbits(own)
        self._said_s[place] = 0
        self._places["cores"][place] = self._own_cores
        self._is_said = False
        self.is_foreground_beside = False
        """Whether another node on these cores had foreground work at the last look."""
        self._began_s = 0.0
        """When the last step of background work alone began beside foreground work of another node; 0: none did."""
        self._not_before_s = 0.0

    @classmethod
    def join(cls, share: float, folder: Path | None = None) -> SharedCores | None:
        """Take a place in the runtime folder's file. Return None if that is not possible: then no node waits.

        share: the part of the time that background work gets beside foreground work of another node, up to 1.
        """
        folder = folder or local_folder(RedisSettings.load().runtime_dir)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            check_private(folder)
            file = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ConfigError) as error:
            log.info("nodes of this host cannot see each other's foreground work", extra={"reason": str(error)})
            return None
        size = _NUM_PLACES * _PLACE.itemsize
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        for place in range(_NUM_PLACES):
            wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place * _PLACE.itemsize, _PLACE.itemsize, 0)
            try:
                # A lock of the open file: it ends with the process, and two nodes of one process exclude each other.
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, wanted)
            except OSError:
                continue
            return cls(file, place, share, os.sched_getaffinity(0))
        os.close(file)
        log.info("nodes of this host cannot see each other's foreground work", extra={"reason": "all places are taken"})
        return None

    def pause_s(self, now_s: float, *, has_foreground: bool) -> float:
        """Say whether this engine has foreground work, and return for how long its next step should wait.

        Background work alone waits while another node on these cores has foreground work, until it has waited for so
        long that its last step was `share` of the time.
        """
        if has_foreground:
            self._said_s[self._place], self._is_said = now_s, True
            self._began_s, self.is_foreground_beside = 0.0, False
            return 0.0
        self.idle()
        self.is_foreground_beside = self._look(now_s)
        if not self.is_foreground_beside:
            self._began_s = self._not_before_s = 0.0
            return 0.0
        if self._began_s:
            took_s, self._began_s = now_s - self._began_s, 0.0
            self._not_before_s = now_s + (took_s * (1 / self._share - 1) if self._share else float("inf"))
        elif not self._not_before_s and self._share < 1:
            # Foreground work has just begun. As long as the first pause is, later ones follow from the steps.
            self._not_before_s = now_s + WORD_S if self._share else float("inf")
        if now_s < self._not_before_s:
            return PAUSE_S
        self._began_s = now_s
        return 0.0

    def idle(self) -> None:
        """Take the word back: this engine has no foreground work."""
        if self._is_said:
            self._said_s[self._place], self._is_said = 0, False

    def leave(self) -> None:
        """Give the place back. The object is of no use after that."""
        self._said_s[self._place] = 0
        os.close(self._file)

    def _look(self, now_s: float) -> bool:
        """Return whether another node that may use one of these cores said so lately."""
        oldest_s = now_s - WORD_S
        if float(self._said_s.max()) < oldest_s:
            return False
        # A word from the future is that of an earlier boot, whose file is still there.
        recent = np.flatnonzero((self._said_s >= oldest_s) & (self._said_s <= now_s + WORD_S))
        others = recent[recent != self._place]
        return bool((self._places["cores"][others] & self._own_cores).any())
