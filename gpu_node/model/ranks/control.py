"""What all ranks of a group map: the words at which they meet, the messages of rank 0, and the rows of a step."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.gpu_node.model.ranks.memory import SharedMemory
from penstock.gpu_node.model.ranks.messages import Kind
from penstock.kernels.cpu.exchange import Exchange
from penstock.kernels.cpu.structs import MAX_RANKS, ExchangeState

_STATE_BYTES = c.sizeof(ExchangeState)
_KIND, _MESSAGE_BYTES, _ROW_BYTES, _LIFE = range(4)
"""Places in the numbers that follow the `ExchangeState`."""
_NUM_NUMBERS = 8
_DONE = _STATE_BYTES + 8 * _NUM_NUMBERS
_PULSES = _DONE + 8 * MAX_RANKS
_CONTROL_BYTES = _PULSES + 8 * MAX_RANKS
_FIRST_BYTES = 1 << 16


class GroupMemory:
    """One rank's mappings of what the group shares."""

    def __init__(self, control: SharedMemory, messages: SharedMemory, rows: SharedMemory) -> None:
        self._control = control
        self.messages = messages
        self.rows = rows
        """What the ranks compute in a step and read of each other; a runner decides what is where."""
        self._numbers = control.view(np.int64, _STATE_BYTES, _NUM_NUMBERS)
        self.done = control.view(np.int64, _DONE, MAX_RANKS)
        """The last message that each rank has done. Only ranks without the kernel library count here."""
        self.pulses = control.view(np.int64, _PULSES, MAX_RANKS)
        """A number for each rank that increases as long as its process runs. Likewise."""

    @classmethod
    def create(cls) -> GroupMemory:
        """Make the memory of a new group. Raises MemoryError; OSError if the process has no descriptors left."""
        parts: list[SharedMemory] = []
        try:
            for name, size in (("control", _CONTROL_BYTES), ("messages", _FIRST_BYTES), ("rows", _FIRST_BYTES)):
                parts.append(SharedMemory.create(f"penstock-ranks-{name}", size))
        except BaseException:
            for part in parts:
                part.close()
            raise
        return cls(*parts)

    @classmethod
    def of(cls, descriptors: Sequence[int]) -> GroupMemory:
        """Map the memory of a group that another rank made; descriptors: those of its `descriptors`."""
        control, messages, rows = (SharedMemory(descriptor) for descriptor in descriptors)
        control.map(_CONTROL_BYTES)
        memory = cls(control, messages, rows)
        memory.map_message()
        return memory

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """What another rank needs to map the same memory."""
        return self._control.descriptor, self.messages.descriptor, self.rows.descriptor

    @property
    def state(self) -> ExchangeState:
        """The words at which the ranks meet."""
        return ExchangeState.from_address(self._control.address)

    def exchange(self, library: Path, rank: int, size: int) -> Exchange:
        """Return the words of this memory as a rank sees them."""
        return Exchange(library, self._control.address, rank, size, memory=self._control)

    def note_message(self, kind: Kind) -> None:
        """Note the kind of the message that was written, and the sizes to map for it."""
        self._numbers[_KIND] = kind
        self._numbers[_MESSAGE_BYTES] = self.messages.num_bytes
        self._numbers[_ROW_BYTES] = self.rows.num_bytes

    @property
    def kind(self) -> Kind:
        """The kind of the last message."""
        return Kind(int(self._numbers[_KIND]))

    def map_message(self) -> Kind:
        """Map what the last message needs, and return its kind. Raises MemoryError."""
        self.messages.map(int(self._numbers[_MESSAGE_BYTES]) or _FIRST_BYTES)
        self.rows.map(int(self._numbers[_ROW_BYTES]) or _FIRST_BYTES)
        return self.kind

    @property
    def life(self) -> int:
        """A number that rank 0 increases as long as it lives."""
        return int(self._numbers[_LIFE])

    def show_life(self) -> None:
        """Show that rank 0 lives."""
        self._numbers[_LIFE] += 1

    def close(self) -> None:
        """Close the descriptors. What is still in use stays mapped."""
        for part in (self._control, self.messages, self.rows):
            part.close()
