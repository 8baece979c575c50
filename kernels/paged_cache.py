"""The keys and values of one layer in blocks: the record that every backend over torch tensors reads and fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUANTIZED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each quantized format. Quantization maps the largest number of a vector to it."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """The KV cache blocks of one layer. Slot s is position s % block_size of block s // block_size.

    In a quantized cache, a vector is its stored numbers times its scale. GPU kernels can also read blocks in pinned
    host memory: block b >= host_from is `host_jump` bytes after the address that it would have in the tensors.
    """

    k: Tensor
    """[num_kv_heads, num_blocks, block_size, head_dim]; one head's part of a block is contiguous."""
    v: Tensor
    """Same shape and strides as k."""
    k_scales: Tensor | None = None
    """[num_kv_heads, num_blocks, block_size] float32; one head's part of a block is contiguous. None: not quantized."""
    v_scales: Tensor | None = None
    """Same shape and strides as k_scales."""
    host_from: int = 2**31 - 1
    host_jump: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k.shape[2]
