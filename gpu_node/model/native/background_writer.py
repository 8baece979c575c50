"""Write buffers to a file on another thread, while the next ones are filled.

The buffers are used again and again. Fresh memory costs more than packing into it, because the system clears each page.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAX_PAIR_BYTES = 128 << 20
"""Two buffers have at most this many bytes together. A larger matrix has one buffer, written before the next fill."""


@dataclass
class _Buffer:
    memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    is_free: Event = field(default_factory=Event)


class _Write(NamedTuple):
    buffer: _Buffer
    content: memoryview
    start: int
    then: Callable[[], None] | None


class BackgroundWriter:
    """Writes two buffers by turns: one is written while the other is filled."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._filling, self._other = _Buffer(), _Buffer()
        for buffer in (self._filling, self._other):
            buffer.is_free.set()
        self._error: Exception | None = None
        self._writes = SimpleQueue[_Write | None]()
        # Not an executor: those refuse work at the end of the interpreter, while a thread may still pack.
        self._thread = Thread(target=self._run, name="penstock-write", daemon=True)
        self._thread.start()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a page-aligned buffer of arbitrary bytes. It is valid until the next call.

        Raises the error of an earlier write, usually an OSError.
        """
        if 2 * num_bytes <= _MAX_PAIR_BYTES:
            self._filling, self._other = self._other, self._filling
        else:
            self._wait_for(self._other)
            self._other.memory = np.empty(0, np.uint8)
        self._wait_for(self._filling)
        if len(self._filling.memory) < num_bytes:
            # Free the old memory first.
            self._filling.memory = np.empty(0, np.uint8)
            self._filling.memory = pages(num_bytes)
        return self._filling.memory[:num_bytes]

    def write(self, content: NDArray[np.uint8], start: int, then: Callable[[], None] | None = None) -> None:
        """Begin to write the last buffer, or a part of it, at an offset of the file.

        then: called on another thread once this and all earlier writes have succeeded.
        """
        self._filling.is_free.clear()
        self._writes.put(_Write(self._filling, content.data, start, then))

    def wait(self) -> None:
        """Wait until all buffers are written. Raises the error of a write."""
        self._wait_for(self._filling)
        self._wait_for(self._other)

    def close(self) -> None:
        """Write what was begun, end the thread, and free the buffers."""
        self._writes.put(None)
        self._thread.join()
        self._filling, self._other = _Buffer(), _Buffer()

    def _wait_for(self, buffer: _Buffer) -> None:
        buffer.is_free.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (write := self._writes.get()) is not None:
            if self._error is None:
                try:
                    write_at(self._file, write.content, write.start)
                    if write.then is not None:
                        write.then()
                except Exception as error:
                    self._error = error
            write.buffer.is_free.set()


def write_at(file: int, content: bytes | memoryview, start: int) -> None:
    """Write all of `content` at an offset of a file. Raises OSError."""
    left = memoryview(content)
    while left:
        # Large writes, so that the system can allocate huge pages for the page cache.
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


def pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory that starts at a page, as huge pages where the system has them. Raises OSError."""
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Some Linux kernels have no huge pages.
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)
