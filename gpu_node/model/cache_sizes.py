"""How many blocks and states a runner has memory for, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass


def blocks_of_window(window: int, alignment: int, block_size: int) -> int:
    """Return the most blocks that a window covers, if steps read from a multiple of `alignment` tokens on."""
    return -(-(window + max(alignment, block_size) - 1) // block_size)


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """The blocks of layers with windows, where a runner keeps them apart. They have ids from 1 to num_blocks."""

    num_blocks: int = 0
    """Without the null block."""
    block_bytes: int = 0
    """Of one block over all layers with windows."""
    window: int = 0
    """Tokens that a token in these layers sees at most, itself included."""
    alignment: int = 1
    """A step reads from the last multiple of this many tokens before the window on."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, without the null block."""
        return self.num_blocks * self.block_bytes

    def most_held(self, block_size: int) -> int:
        """Return the most blocks that a sequence holds while it computes one token a step."""
        return blocks_of_window(self.window, self.alignment, block_size)


NO_WINDOWS = WindowSizes()
"""Those of a runner that keeps all layers in the same blocks."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The size of a KV cache. Device blocks have ids from 1 to num_device_blocks; host blocks follow.

    The CPU runners keep both kinds in one memory, and their steps read and write either kind.
    """

    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int
    """Bytes of one block over all layers, or over those without windows where `windows` has the others."""
    windows: WindowSizes = NO_WINDOWS

    @property
    def num_blocks(self) -> int:
        """The number of blocks, the null block included."""
        return 1 + self.num_device_blocks + self.num_host_blocks


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The state slots of a runner. A model without recurrent layers has none."""

    num_slots: int = 0
    slot_bytes: int = 0
