"""Packed matrices, and writing them to a file on another thread while the next ones are packed.

Buffers are used again and again. Fresh memory costs more than packing into it, because the system clears each page.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.library import NativeModel, Slot, Vector
from penstock.kernels.cpu.structs import RowLayout, Run

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


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A whole matrix, with the arguments of `NativeModel.use`."""

    slot: Slot
    layer: int
    runs: Sequence[Run]
    columns: int
    packed: NDArray[np.uint8]
    biases: list[tuple[NDArray[np.float32], int, RowLayout]] = field(default_factory=list)
    """Values, first row and layout for each part. None are needed for a matrix that replaces rows of a checkpoint."""

    def give_to(self, model: NativeModel) -> None:
        """Let a model read the matrix in place. No step may be running."""
        model.use(self.slot, self.layer, self.runs, self.columns, self.packed)
        for values, first, layout in self.biases:
            model.set_bias(self.slot, self.layer, values, first=first, layout=layout)


OnMatrix: TypeAlias = Callable[[PackedMatrix], None]
"""Called with each matrix as soon as it is whole, on any thread."""


class WeightWriter(Protocol):
    """Receives packed weights part by part."""

    def add_matrix(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int, num_bytes: int) -> None:
        """Reserve space for a matrix in the kernels' packed layout. `write` then adds its bytes."""

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an aligned buffer to pack into, with arbitrary bytes. Give it to `write` before the next one."""

    def write(self, packed: NDArray[np.uint8]) -> None:
        """Take a `buffer` with the next bytes of the last matrix."""

    def add_vector(self, vector: Vector, layer: int, values: NDArray[np.float32]) -> None:
        """Add a vector, with the arguments of `NativeModel.set_vector`."""

    def add_bias(self, slot: Slot, layer: int, values: NDArray[np.float32], first: int, layout: RowLayout) -> None:
        """Add a bias of the last matrix before its last bytes, with the arguments of `NativeModel.set_bias`."""


class PrivateWriter:
    """Keeps packed matrices in this process's memory. The model that gets them has its vectors already."""

    def __init__(self, on_matrix: OnMatrix) -> None:
        self._on_matrix = on_matrix
        self._matrices: list[PackedMatrix] = []
        self._num_written = 0

    def add_matrix(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int, num_bytes: int) -> None:
        """Allocate a matrix. Raises OSError if there is no memory."""
        self._matrices.append(PackedMatrix(slot, layer, runs, columns, pages(num_bytes)))
        self._num_written = 0

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return the next part of the last matrix."""
        return self._matrices[-1].packed[self._num_written :][:num_bytes]

    def write(self, packed: NDArray[np.uint8]) -> None:
        """Hand the last matrix over once it is whole."""
        self._num_written += packed.nbytes
        if self._num_written == self._matrices[-1].packed.nbytes:
            self._on_matrix(self._matrices[-1])

    def add_vector(self, vector: Vector, layer: int, values: NDArray[np.float32]) -> None:
        """Do nothing."""

    def add_bias(self, _slot: Slot, _layer: int, values: NDArray[np.float32], first: int, layout: RowLayout) -> None:
        """Keep a bias with the last matrix."""
        self._matrices[-1].biases.append((values, first, layout))
