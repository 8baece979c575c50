"""Memory that the node and a grammar worker share: the number of the running task, and slots for masks.

A mask crosses without a copy through a socket. The node gives each request a slot, and reads it once the worker's reply
has come, so only one side uses a slot at a time.
"""

from __future__ import annotations

import ctypes
import mmap

NUM_SLOTS = 64
"""Masks that a worker may have ready at once. Further ones come in the replies."""
NO_SLOT = -1


class SharedPage:
    """The shared memory of one worker."""

    def __init__(self, fd: int, mask_bytes: int) -> None:
        """`mask_bytes`: the size of a mask, a multiple of 4. `fd`: memory of `size_of(mask_bytes)`; -1 for private one.

        Raises OSError.
        """
        self.mask_bytes = mask_bytes
        self._memory = mmap.mmap(fd, size_of(mask_bytes))

    @property
    def current(self) -> int:
        """The number of the task that the worker is running, or was when it died; 0 for none."""
        return int.from_bytes(self._memory[:8], "little")

    def note_current(self, number: int) -> None:
        """Note which task the worker runs now; 0 for none."""
        self._memory[:8] = number.to_bytes(8, "little")

    def read(self, slot: int) -> bytes:
        """Return the mask in a slot."""
        start = self._start(slot)
        return self._memory[start : start + self.mask_bytes]

    def write(self, slot: int, mask: bytes) -> None:
        """Replace the mask in a slot."""
        start = self._start(slot)
        self._memory[start : start + self.mask_bytes] = mask

    def addresses(self) -> list[int]:
        """Return the address of each slot. The memory stays mapped until the process ends."""
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory, mmap.PAGESIZE))
        return [first + slot * self.mask_bytes for slot in range(NUM_SLOTS)]

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    def _start(self, slot: int) -> int:
        return mmap.PAGESIZE + slot * self.mask_bytes


def size_of(mask_bytes: int) -> int:
    """Return the bytes of the memory that a worker and its node share."""
    return mmap.PAGESIZE + NUM_SLOTS * mask_bytes
