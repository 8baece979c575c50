"""Paged caches with random contents, randomly assigned blocks, and NaN wherever a kernel must not read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.arguments import PagedCache
from penstock.kernels.reference.layers import store_kv


@dataclass(frozen=True, eq=False)
class Scene:
    """Sequences and their contexts in a cache. All indices are int32."""

    cache: PagedCache
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of attention after the cache."""
        return self.query_starts, self.context_lens, self.block_tables


def empty_cache(
    num_blocks: int, block_size: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> PagedCache:
    """Return a cache of NaN, block-major as a runner's is."""
    shape = num_blocks, num_heads, block_size, head_dim
    is_float = dtype in (torch.float32, torch.float16, torch.bfloat16)
    if is_float:
        return PagedCache(*(torch.full(shape, torch.nan, dtype=dtype, device=device).transpose(0, 1) for _ in "kv"))
    values = [torch.full(shape, 77, dtype=torch.uint8, device=device).view(dtype).transpose(0, 1) for _ in "kv"]
    scales = [torch.full(shape[:3], torch.nan, device=device).transpose(0, 1) for _ in "kv"]
    return PagedCache(*values, *scales)


def make_scene(
    counts: list[int],
    contexts: list[int],
    *,
    block_size: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Scene:
    """Return sequences with that many queries at the end of contexts of that length. All keys and values are stored."""
    needed = [-(-context // block_size) for context in contexts]
    deck = iter((torch.randperm(sum(needed)) + 1).tolist())
    tables = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
    for table, num in zip(tables, needed, strict=True):
        table[:num] = torch.tensor([next(deck) for _ in range(num)])
    cache = empty_cache(sum(needed) + 1, block_size, num_heads, head_dim, dtype, device)
    for table, context in zip(tables, contexts, strict=True):
        at = torch.arange(context)
        slots = table[at // block_size] * block_size + at % block_size
        k, v = torch.randn(2, context, num_heads, head_dim, device=device).unbind(0)
        store_kv(k, v, cache, slots)
    starts = torch.tensor([0, *counts]).cumsum(0)
    return Scene(cache, *(x.to(device, torch.int32) for x in (starts, torch.tensor(contexts), tables)))
