"""Write buffers to a file on another thread, while the next ones are filled.

The buffers are used again and again. Fresh memory costs more than packing into it, because the system clears each page.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_MAX_PAIR_BYTES = 128 << 20
"""Two buffers have at most this many bytes together. A larger matrix has one buffer, written before the next fill."""


@dataclass
class _Buffer:
    memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    written: Future[None] | None = None

    def wait(self) -> None:
        """Wait until the buffer is written. Raises OSError."""
        if self.written is not None:
            self.written.result()


class BackgroundWriter:
    """Writes two buffers by turns: one is written while the other is filled."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.end = 0
        """All bytes before this offset are written, if they were given in order."""
        self._filling, self._other = _Buffer(), _Buffer()
        self._thread = ThreadPoolExecutor(1, "penstock-write")

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a page-aligned buffer of arbitrary bytes. It is valid until the next call. Raises OSError."""
        if 2 * num_bytes <= _MAX_PAIR_BYTES:
            self._filling, self._other = self._other, self._filling
        else:
            self._other.wait()
            self._other.memory = np.empty(0, np.uint8)
        self._filling.wait()
        if len(self._filling.memory) < num_bytes:
            # Free the old memory first.
            self._filling.memory = np.empty(0, np.uint8)
            self._filling.memory = _pages(num_bytes)
        return self._filling.memory[:num_bytes]

    def write(self, content: NDArray[np.uint8], start: int) -> None:
        """Begin to write the last buffer, or a part of it, at an offset of the file."""
        self._filling.written = self._thread.submit(self._write, content.data, start)

    def _write(self, content: memoryview, start: int) -> None:
        write_at(self._file, content, start)
        self.end = start + len(content)

    def wait(self) -> None:
        """Wait until all buffers are written. Raises OSError."""
        self._filling.wait()
        self._other.wait()

    def close(self) -> None:
        """End the thread, and free the buffers."""
        self._thread.shutdown()
        self._filling, self._other = _Buffer(), _Buffer()


def write_at(file: int, content: bytes | memoryview, start: int) -> None:
    """Write all of `content` at an offset of a file. Raises OSError."""
    left = memoryview(content)
    while left:
        # Large writes, so that the system can allocate huge pages for the page cache.
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


def _pages(num_bytes: int) -> NDArray[np.uint8]:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Some Linux kernels have no huge pages.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
