"""Memory that the ranks of a group share: without a name, passed by descriptor, gone with the last process."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Number = TypeVar("_Number", bound=np.generic)

_GROWTH = 1 << 20
"""Bytes that memory grows by at least: each growth makes all ranks map it anew."""
_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)


class SharedMemory:
    """A mapping of memory that grows and never shrinks. The rank that made it grows it; the others map it again."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of memory that `create` made; it is closed with this mapping."""
        self.descriptor = descriptor
        self.num_written = 0
        """Bytes of the last message that this process wrote; for memory that holds one."""
        self._map: mmap.mmap | None = None
        self._content: NDArray[np.uint8] = np.empty(0, np.uint8)

    @classmethod
    def create(cls, name: str, num_bytes: int) -> SharedMemory:
        """Make memory of zeros. `name`: what /proc shows for it. Raises MemoryError, OSError without descriptors."""
        memory = cls(os.memfd_create(name, os.MFD_CLOEXEC))
        memory.grow(num_bytes)
        return memory

    @property
    def num_bytes(self) -> int:
        """The size of this mapping."""
        return len(self._content)

    @property
    def address(self) -> int:
        """Where the mapping begins, until it grows."""
        return int(self._content.ctypes.data)

    def grow(self, num_bytes: int) -> None:
        """Make it at least so large, and reserve the pages. Raises MemoryError if there are none."""
        if num_bytes <= self.num_bytes:
            return
        wanted = -(-max(num_bytes, self.num_bytes + _GROWTH) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            os.posix_fallocate(self.descriptor, 0, wanted)
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                raise
            raise MemoryError(f"no {wanted} bytes of memory for ranks to share") from error
        self.map(wanted)

    def map(self, num_bytes: int) -> None:
        """Map as much as the rank that made it has. Arrays of the mapping before stay valid."""
        if num_bytes <= self.num_bytes:
            return
        try:
            self._map = mmap.mmap(self.descriptor, num_bytes)
        except OSError as error:
            raise MemoryError(f"no address space for {num_bytes} bytes of shared memory") from error
        self._content = np.frombuffer(self._map, np.uint8)

    def view(self, kind: type[_Number], start: int, *shape: int) -> NDArray[_Number]:
        """Return an array in the mapping, which begins at byte `start`."""
        count = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        view: NDArray[Any] = self._content[start : start + count].view(kind).reshape(shape)
        return view

    def close(self) -> None:
        """Close the descriptor. The mapping goes with this object and the last array in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
