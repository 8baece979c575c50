"""Attention of a mixed step over a paged KV cache: one kernel for decode rows, one for prefill chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.arguments import PagedCache
from penstock.kernels.triton.decode_attention import decode_attention, longest_first, num_splits
from penstock.kernels.triton.launches import prefill_rows
from penstock.kernels.triton.prefill_attention import prefill_attention, prefill_tiles


def paged_attention(
    q: Tensor,
    cache: PagedCache,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    biases: Tensor | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `kernels.reference.layers.paged_attention`, with all integers in int32.

    Waits for the GPU, to read `query_starts` on the host.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    starts = query_starts.cpu().numpy()
    counts = np.diff(starts)
    decoding, chunks = (np.flatnonzero(which).astype(np.int32) for which in (counts == 1, counts > 1))
    out = torch.empty_like(q)
    given = out, q, cache, query_starts, context_lens, block_tables
    rules: dict[str, Any] = {"scale": scale, "window": window or 0, "biases": biases, "cap": cap, "sinks": sinks}
    if len(decoding):
        seqs = torch.from_numpy(longest_first(decoding, context_lens.cpu().numpy())).to(q.device)
        splits = num_splits(len(seqs), cache.k.shape[0], q.device)
        decode_attention(*given, seqs, splits, **rules)
    if len(chunks):
        rows = prefill_rows(q.shape[-1], q.dtype, q.device)
        tiles = torch.from_numpy(prefill_tiles(starts, chunks, rows)).to(q.device)
        prefill_attention(*given, tiles, **rules, rows=rows)
    return out
