"""A file that is mapped into memory, read-only."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.page_faults import PageFaults


class MappedFile:
    """A mapped file. Its pages are read when they are first used."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for an empty file."""
        with path.open("rb") as file:
            self.stamp = stamp_of(os.fstat(file.fileno()))
            """Stamp (inode, size, mtime) of this file; a file that takes its path later has another one."""
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
    """Return what changes when the file is written or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
