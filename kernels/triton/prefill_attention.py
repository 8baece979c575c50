"""Prefill attention: chunks of queries over their paged contexts, in tiles of one list per step (FlashAttention-2)."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.arguments import PagedCache
from penstock.kernels.triton.decode_attention import (
    LOG2_E,
    as_float16,
    begin_softmax,
    block_offset,
    capped,
    kinds_of,
    scales_and_strides,
    weigh_values,
)
from penstock.kernels.triton.launches import Launch, attention_launch, dependent_launch, padded, wait_for_kernel_ahead

QUERY_TILE = 64
"""Queries of a tile, where a caller chooses no other number."""


@triton.jit
def _attend_tile(
    state,
    at,
    queries,
    positions,
    context,
    biases,
    bias_at,
    row_scale,
    table,
    k,
    v,
    k_scales,
    v_scales,
    head,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    host_from,
    host_jump,
    host_scale_jump,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NARROW: tl.constexpr,
    BIASED: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the TILE keys from `at` on to the running maximum, total and sum. MASKED: some rows do not see all."""
    best, total, acc, unit = state
    d, tokens = tl.arange(0, HEAD_PAD), at + tl.arange(0, TILE)
    held = tokens < context
    blocks = tl.load(table + tokens // BLOCK, mask=held, other=0)
    places = block_offset(blocks, block_stride, host_from, host_jump) + head * head_stride + tokens % BLOCK * HEAD
    keys = tl.load(k + places[None, :] + d[:, None], mask=held[None, :] & (d < HEAD)[:, None], other=0.0)
    scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * row_scale[:, None]
    if QUANTIZED:
        scale_at = block_offset(blocks, scale_block_stride, host_from, host_scale_jump) + head * scale_head_stride
        scores *= tl.load(k_scales + scale_at + tokens % BLOCK, mask=held, other=0.0)[None, :]
    scores = capped(scores, CAP)
    if BIASED:
        scores += tl.load(biases + bias_at + tokens, mask=held, other=0.0)[None, :] * LOG2_E
    if MASKED:
        seen = (tokens[None, :] <= positions[:, None]) & held[None, :]
        if WINDOW > 0:
            seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
    better = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen no key yet has no maximum to subtract.
    origin = tl.where(better == -float("inf"), 0.0, better) if MASKED else better
    p, shrink = tl.exp2(scores - origin[:, None]), tl.exp2(best - origin)
    total = total * shrink + tl.sum(p, 1)
    values = tl.load(v + places[:, None] + d[None, :], mask=held[:, None] & (d < HEAD)[None, :], other=0.0)
    if QUANTIZED:
        value_scales = tl.load(v_scales + scale_at + tokens % BLOCK, mask=held, other=0.0)
        if NARROW:
            p, shrink, unit = weigh_values(p, shrink, unit, value_scales)
        else:
            p *= value_scales[None, :]
    p = p.to(queries.dtype)
    acc = acc * shrink[:, None] + tl.dot(p, values.to(queries.dtype), input_precision="ieee")
    return better, total, acc, unit


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    out,
    q,
    k,
    v,
    k_scales,
    v_scales,
    tables,
    contexts,
    starts,
    tiles,
    biases,
    sinks,
    scale,
    bias_stride,
    table_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    host_from,
    host_jump,
    host_scale_jump,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NARROW: tl.constexpr,
    BIASED: tl.constexpr,
    SUNK: tl.constexpr,
    CAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tiles of queries, heads]. `tiles` holds the sequence, -1 for padding, and the first query of each tile."""
    wait_for_kernel_ahead(DEPENDENT)
    tile, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    seq, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if seq < 0:
        return
    start, context = tl.load(starts + seq), tl.load(contexts + seq)
    count = tl.load(starts + seq + 1) - start
    r, d = offset + tl.arange(0, ROWS), tl.arange(0, HEAD_PAD)
    prefix = context - count
    positions = prefix + r
    at = ((start + r).to(tl.int64) * num_heads + head) * HEAD
    is_value = (r < count)[:, None] & (d < HEAD)[None, :]
    queries = tl.load(q + at[:, None] + d[None, :], mask=is_value, other=0.0)
    table = tables + seq.to(tl.int64) * table_stride
    row_scale = tl.full([ROWS], 1.0, tl.float32) * scale
    if NARROW:
        queries, largest = as_float16(queries)
        row_scale *= largest
    best, total = begin_softmax(sinks, head + r * 0, r >= 0, r >= 0, SUNK)
    state = (best, total, tl.zeros([ROWS, HEAD_PAD], tl.float32), tl.full([], 1e-30, tl.float32))
    begin = tl.maximum(prefix + offset - WINDOW + 1, 0) // TILE * TILE if WINDOW > 0 else 0
    # Every row sees all keys of the tiles below the diagonal. A window's lower edge is another diagonal.
    whole_end = begin if WINDOW > 0 else (prefix + offset + 1) // TILE * TILE
    for part in tl.static_range(2):
        first, last = (begin, whole_end) if part == 0 else (whole_end, tl.minimum(prefix + offset + ROWS, context))
        for j in range(first, last, TILE):
            state = _attend_tile(
                *(state, j, queries, positions, context, biases, head * bias_stride, row_scale, table),
                *(k, v, k_scales, v_scales, head // GROUP, block_stride, head_stride),
                *(scale_block_stride, scale_head_stride, host_from, host_jump, host_scale_jump),
                *(HEAD, HEAD_PAD, BLOCK, TILE, WINDOW, QUANTIZED, NARROW, BIASED, CAP, part == 1),
            )
    _best, total, acc, unit = state
    # Rows after the last query may have seen no key.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if NARROW:
        result *= unit
    tl.store(out + at[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=is_value)


def prefill_tiles(
    query_starts: NDArray[np.int32], seqs: NDArray[np.int32], rows: int = QUERY_TILE
) -> NDArray[np.int32]:
    """Return the tiles of `rows` queries, [num_tiles, 2]: sequence, first query. Tiles of late queries come first."""
    if not len(seqs):
        return np.zeros((0, 2), np.int32)
    counts = query_starts[seqs + 1] - query_starts[seqs]
    tiles = -(-counts // rows)
    first = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    found = np.stack((np.repeat(seqs, tiles), first * rows), axis=1).astype(np.int32)
    return found[np.argsort(-first, kind="stable")]


def prefill_attention(
    out: Tensor,
    q: Tensor,
    cache: PagedCache,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    window: int = 0,
    biases: Tensor | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    rows: int = QUERY_TILE,
    launch: Launch | None = None,
) -> None:
    """Write the attention of the queries of `tiles`, made by `prefill_tiles` with `rows`, to their rows of `out`.

    Other arguments: see `kernels.reference.layers.paged_attention`.
    """
    num_heads, head_dim = q.shape[1:]
    group = num_heads // cache.k.shape[0]
    launch = launch or attention_launch("prefill_attention", head_dim, group, q.dtype, q.device, rows)
    _prefill[(len(tiles), num_heads)](
        *(out, q, cache.k, cache.v, cache.k_scales, cache.v_scales),
        *(block_tables, context_lens, query_starts, tiles),
        *scales_and_strides(cache, block_tables, scale, biases, sinks),
        HEAD=head_dim,
        HEAD_PAD=padded(head_dim, 16),
        ROWS=rows,
        TILE=launch.tile,
        WINDOW=window,
        **kinds_of(cache, group, biases, cap, q.dtype, sinks),
        **launch.options,
        **dependent_launch(q.device),
    )
