"""What kernels are checked and measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.arguments import QUANTIZED_MAX, PagedCache

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """Heads and widths of a model, and how much of it a step computes."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inter: int
    vocab: int
    rows: int
    context: int
    prompt: int
    dtype: torch.dtype = torch.bfloat16


FULL = Sizes(32, 8, 128, 4096, 14_336, 128_256, 64, 2048, 8192)
CHECKED = Sizes(32, 8, 128, 4096, 14_336, 128_256, 16, 1500, 600)
"""The same widths, but as few tokens as still need several tiles: references in float64 are slow."""
DRY = Sizes(4, 2, 16, 64, 96, 65, 2, 20, 18)


def normal(*shape: int, sizes: Sizes, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(sizes.dtype)


def ints(values: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(values), dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Pages:
    """A cache of random numbers whose blocks are dealt at random."""

    cache: PagedCache
    tables: Tensor
    """[num_seqs, blocks of one context]"""

    @classmethod
    def of(cls, sizes: Sizes, num_seqs: int, context: int, device: torch.device, kept: torch.dtype) -> Pages:
        """kept: the type of keys and values; quantized ones have a scale per vector."""
        width = -(-context // BLOCK_SIZE)
        shape = num_seqs * width + 1, sizes.kv_heads, BLOCK_SIZE, sizes.head_dim
        k_scales = v_scales = None
        values = [torch.randn(shape, device=device) for _ in "kv"]
        if kept in QUANTIZED_MAX:
            k_scales, v_scales = (torch.rand(shape[:-1], device=device).transpose(0, 1) / 40 + 0.01 for _ in "kv")
            values = [x.clamp(-3, 3) * 40 for x in values]
        k, v = (x.to(kept).transpose(0, 1) for x in values)
        order = torch.randperm(num_seqs * width, device=device) + 1
        return cls(PagedCache(k, v, k_scales, v_scales), order.view(num_seqs, width).to(torch.int32))
