"""Texts that a process keeps on its disk while it runs a flow: the rows that wait, and the answers they wait for."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spooled:
    """Where a text lies."""

    at: int
    num_bytes: int


class Spool:
    """A file without a name, which goes with the process. It only grows. Any thread may use it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="penstock-flow-")  # noqa: SIM115
        self._end = 0
        self._adding = threading.Lock()

    def add(self, data: bytes) -> Spooled:
        """Append a text."""
        with self._adding:
            place, rest = Spooled(self._end, len(data)), memoryview(data)
            while rest:
                num_bytes = os.pwrite(self._file.fileno(), rest, self._end)
                self._end, rest = self._end + num_bytes, rest[num_bytes:]
            return place

    def read(self, place: Spooled) -> bytes:
        """Return a text."""
        return os.pread(self._file.fileno(), place.num_bytes, place.at)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()
