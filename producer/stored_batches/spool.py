"""Texts that a process keeps on its disk while it runs a flow: the rows that wait, and the answers they wait for."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass

_BLOCK_BYTES = 1 << 20


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
            place = Spooled(self._end, len(data))
            self._write(data)
            return place

    def add_all(self, texts: Iterable[bytes]) -> list[Spooled]:
        """Append texts, many in a write."""
        places, block, num_bytes = list[Spooled](), list[bytes](), 0
        with self._adding:
            for data in texts:
                places.append(Spooled(self._end + num_bytes, len(data)))
                block.append(data)
                num_bytes += len(data)
                if num_bytes >= _BLOCK_BYTES:
                    self._write(b"".join(block))
                    block, num_bytes = [], 0
            self._write(b"".join(block))
        return places

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            num_bytes = os.pwrite(self._file.fileno(), rest, self._end)
            self._end, rest = self._end + num_bytes, rest[num_bytes:]

    def read(self, place: Spooled) -> bytes:
        """Return a text."""
        return os.pread(self._file.fileno(), place.num_bytes, place.at)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()
