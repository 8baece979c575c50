"""A file that is mapped into memory, read-only; its pages can be mapped before they are needed, beside other work."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.usable_file import require_usable
from penstock.kernels.cpu.probe import available_bytes

_PART_BYTES = 64 << 20
_STRIDE = 64 << 10
"""With a page that is read, Linux maps its neighbors in memory: this many aligned bytes (fault_around_bytes)."""


class PageFaults:
    """Maps the pages of one file's mapping, each page once.

    Several threads may do so at once: each maps other parts of the file. Other threads run meanwhile. Nothing is mapped
    if the file is larger than the available memory, because its pages would evict each other.

    Pages are mapped by reading a byte. MADV_POPULATE_READ would hold a lock that other threads need to allocate memory:
    parsing a vocabulary beside it takes 1.5 times as long.
    """

    def __init__(self, mapped: NDArray[np.uint8]) -> None:
        self._mapped = mapped
        # Threads may share it: an iterator over a range advances in one step of the interpreter.
        self._starts = iter(range(0, mapped.nbytes, _PART_BYTES))
        self._is_stopped = Event()

    def take(self, is_enough: Callable[[], bool]) -> None:
        """Map pages on this thread, until all are mapped or `is_enough`."""
        if self._mapped.nbytes > available_bytes():
            return
        while not is_enough() and (start := next(self._starts, None)) is not None:
            part = self._mapped[start : start + _PART_BYTES]
            # numpy releases the GIL. The last byte is read too, because the mapping may begin inside aligned bytes.
            max(part[::_STRIDE].max(), part[-1])

    def take_ahead(self) -> None:
        """Map pages on a thread of their own, until `stop`."""
        Thread(target=self.take, args=(self._is_stopped.is_set,), name="penstock-map", daemon=True).start()

    def stop(self) -> None:
        """End that thread soon."""
        self._is_stopped.set()


class MappedFile:
    """A mapped file. Its pages are read when they are first used."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for an empty file, a link to nothing, or a pointer of Git LFS."""
        require_usable(path)
        with path.open("rb") as file:
            self.stamp = stamp_of(os.fstat(file.fileno()))
            """Device, inode, size and mtime: they change when the file is written or replaced."""
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise ConfigError(f"cannot read {path}: it is empty") from error
        self.content: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.page_faults = PageFaults(self.content)

    def release(self) -> None:
        """Release the pages that were read; a later access reads them from the file again."""
        self.page_faults.stop()
        self._map.madvise(mmap.MADV_DONTNEED)


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return device, inode, size and mtime, which change when the file is written or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
