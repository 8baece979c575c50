"""Keys and values of one layer in blocks: the record that every implementation over torch tensors reads and fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUANTISED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each format that keys and values are quantised to; a vector's largest becomes this one."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Blocks of one layer. Slot s is place s % block_size of block s // block_size.

    Quantised, a vector is its numbers times its scale. Kernels of a card may also know blocks that lie in pinned host
    memory: block b >= host_from is `host_jump` bytes behind where it would lie in the tensors.
    """

    k: Tensor
    """[num_kv_heads, num_blocks, block_size, head_dim]; a block's part of a head is contiguous."""
    v: Tensor
    """As k, with k's strides."""
    k_scales: Tensor | None = None
    """[num_kv_heads, num_blocks, block_size] float32, a block's part of a head contiguous; None: not quantised."""
    v_scales: Tensor | None = None
    """As k_scales, with its strides."""
    host_from: int = 2**31 - 1
    host_jump: int = 0

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.k.shape[2]
