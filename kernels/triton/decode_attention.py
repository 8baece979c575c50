"""Decode attention: one query token per sequence over its paged context, cut into splits (Flash-Decoding)."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.arguments import PagedCache
from penstock.kernels.triton.launches import (
    Launch,
    attention_launch,
    dependent_launch,
    num_multiprocessors,
    padded,
    wait_for_kernel_ahead,
)

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_SPLITS = 64
MIN_SPAN = 64
"""Shortest split, in tokens: a shorter one is not worth a program."""
_PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def block_offset(block, stride, host_from, host_jump):
    """Return the offset of a block in elements. Blocks in host memory are elsewhere in the same address space."""
    block = block.to(tl.int64)
    return block * stride + tl.where(block >= host_from, host_jump, 0)


@triton.jit
def split_of(context, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, MIN_SPAN: tl.constexpr):
    """Return the first token that is seen, where splits begin and their length; depends only on the row's context."""
    first = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    base = first // TILE * TILE
    span = tl.maximum(tl.cdiv(tl.cdiv(context - base, SPLITS), TILE) * TILE, MIN_SPAN)
    return first, base, span


@triton.jit
def as_float16(queries):
    """Return queries [rows, head] as fractions of each row's largest number in float16, and these numbers.

    GPUs convert float8 to float16 with one instruction, to bfloat16 with several. Fractions do not overflow, and
    float16 has more bits than bfloat16.
    """
    largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    return (queries.to(tl.float32) / largest[:, None]).to(tl.float16), largest


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """Return CAP * tanh(score / CAP) of scores in units of log2(e), in the same units; as given if CAP is 0.

    tanh(y) is 1 - 2 / (exp(2 * y) + 1), also where the exponential is 0 or infinite.
    """
    if CAP > 0:
        scores = CAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / CAP)) + 1.0))
    return scores


@triton.jit
def begin_softmax(sinks, heads, is_head, is_first, SUNK: tl.constexpr):
    """Return the running maximum, in units of log2(e), and the total of rows that have seen no key, [rows] each.

    SUNK: of the first split, each row has seen the sink of its head, a key without a value.
    """
    best, total = tl.where(is_head, -float("inf"), -float("inf")), tl.where(is_head, 0.0, 0.0)
    if SUNK:
        seen = tl.load(sinks + heads, mask=is_head, other=0.0) * LOG2_E
        best, total = tl.where(is_first, seen, best), tl.where(is_first, 1.0, total)
    return best, total


@triton.jit
def weigh_values(p, shrink, unit, scales):
    """Return p times the values' scales, and the shrinkage, in the unit of the largest scale so far; and this unit.

    So p stays below 1, and float16 can hold it. unit: the former unit, positive.
    """
    larger = tl.maximum(unit, tl.max(scales, 0))
    return p * (scales / larger)[None, :], shrink * (unit / larger), larger


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    out,
    partial,
    weight,
    q,
    k,
    v,
    k_scales,
    v_scales,
    tables,
    contexts,
    starts,
    seqs,
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
    GROUP_PAD: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NARROW: tl.constexpr,
    BIASED: tl.constexpr,
    SUNK: tl.constexpr,
    CAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [sequences, key heads, splits]. Query heads that share a key head are the rows of one product."""
    wait_for_kernel_ahead(DEPENDENT)
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tl.load(seqs + row)
    # A padding row has no context, so it ends below.
    context = tl.load(contexts + seq, mask=seq >= 0, other=0)
    first, base, span = split_of(context, TILE, SPLITS, WINDOW, MIN_SPAN)
    begin = base + split * span
    if begin >= context:
        return
    end = tl.minimum(begin + span, context)
    g, d, t = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD), tl.arange(0, TILE)
    heads = head * GROUP + g
    num_heads = tl.num_programs(1) * GROUP
    rows = (tl.load(starts + seq).to(tl.int64) * num_heads + heads) * HEAD
    is_value = (g < GROUP)[:, None] & (d < HEAD)[None, :]
    queries = tl.load(q + rows[:, None] + d[None, :], mask=is_value, other=0.0)
    row_scale = tl.full([GROUP_PAD], 1.0, tl.float32) * scale
    unit = tl.full([], 1e-30, tl.float32)
    if NARROW:
        queries, largest = as_float16(queries)
        row_scale *= largest
    best, total = begin_softmax(sinks, heads, g < GROUP, split == 0, SUNK)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for at in range(begin, end, TILE):
        tokens = at + t
        seen = (tokens < end) & (tokens >= first)
        blocks = tl.load(tables + seq.to(tl.int64) * table_stride + tokens // BLOCK, mask=seen, other=0)
        places = block_offset(blocks, block_stride, host_from, host_jump) + head * head_stride + tokens % BLOCK * HEAD
        keys = tl.load(k + places[None, :] + d[:, None], mask=seen[None, :] & (d < HEAD)[:, None], other=0.0)
        scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * row_scale[:, None]
        if QUANTIZED:
            scale_at = block_offset(blocks, scale_block_stride, host_from, host_scale_jump) + head * scale_head_stride
            scores *= tl.load(k_scales + scale_at + tokens % BLOCK, mask=seen, other=0.0)[None, :]
        scores = capped(scores, CAP)
        if BIASED:
            bias_at = heads[:, None] * bias_stride + tokens[None, :]
            scores += tl.load(biases + bias_at, mask=(g < GROUP)[:, None] & seen[None, :], other=0.0) * LOG2_E
        scores = tl.where(seen[None, :], scores, -float("inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        p, shrink = tl.exp2(scores - better[:, None]), tl.exp2(best - better)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v + places[:, None] + d[None, :], mask=seen[:, None] & (d < HEAD)[None, :], other=0.0)
        if QUANTIZED:
            value_scales = tl.load(v_scales + scale_at + tokens % BLOCK, mask=seen, other=0.0)
            if NARROW:
                p, shrink, unit = weigh_values(p, shrink, unit, value_scales)
            else:
                p *= value_scales[None, :]
        p = p.to(queries.dtype)
        acc = acc * shrink[:, None] + tl.dot(p, values.to(queries.dtype), input_precision="ieee")
        best = better
    acc = acc / total[:, None]
    if NARROW:
        acc *= unit
    if SPLITS == 1:
        tl.store(out + rows[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=is_value)
    else:
        at = (row.to(tl.int64) * num_heads + heads) * SPLITS + split
        tl.store(partial + at[:, None] * HEAD + d[None, :], acc, mask=is_value)
        tl.store(weight + at, best + tl.log2(total), mask=g < GROUP)


@triton.jit
def _merge(
    out,
    partial,
    weight,
    contexts,
    starts,
    seqs,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [sequences, heads]: merge the results of the splits by their weights."""
    wait_for_kernel_ahead(DEPENDENT)
    row, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    seq = tl.load(seqs + row)
    if seq < 0:
        return
    context = tl.load(contexts + seq)
    _, base, span = split_of(context, TILE, SPLITS, WINDOW, MIN_SPAN)
    s, d = tl.arange(0, SPLITS), tl.arange(0, HEAD_PAD)
    is_used = base + s * span < context
    at = (row.to(tl.int64) * num_heads + head) * SPLITS + s
    logs = tl.load(weight + at, mask=is_used, other=-float("inf"))
    shares = tl.where(is_used, tl.exp2(logs - tl.maximum(tl.max(logs, 0), -1e30)), 0.0)
    parts = tl.load(partial + at[:, None] * HEAD + d[None, :], mask=is_used[:, None] & (d < HEAD)[None, :], other=0.0)
    total = tl.sum(shares, 0)
    merged = tl.sum(parts * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    to = (tl.load(starts + seq).to(tl.int64) * num_heads + head) * HEAD
    tl.store(out + to + d, merged.to(out.dtype.element_ty), mask=d < HEAD)


def num_splits(num_rows: int, num_kv_heads: int, device: torch.device) -> int:
    """Return the number of splits that gives each multiprocessor about four programs: a power of two <= MAX_SPLITS."""
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // (num_rows * num_kv_heads)
    return min(MAX_SPLITS, padded(wanted + 1) // 2) if wanted > 1 else 1


def longest_first(seqs: NDArray[np.int32], context_lens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return sequences in the order in which their programs should start: the longest one must not start last."""
    return seqs[np.argsort(-context_lens[seqs], kind="stable")]


def decode_attention(
    out: Tensor,
    q: Tensor,
    cache: PagedCache,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    seqs: Tensor,
    splits: int,
    *,
    scale: float,
    window: int = 0,
    biases: Tensor | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Write the attention of the only query of each of `seqs`, [num_rows] in int32, to its row of `out`.

    Other arguments: see `kernels.reference.layers.paged_attention`. A row's result depends only on that row,
    `splits` and the tile. A sequence of -1 marks a padding row, whose output is not written.
    """
    num_rows, num_heads, head_dim = len(seqs), q.shape[1], q.shape[2]
    num_kv_heads, group = cache.k.shape[0], num_heads // cache.k.shape[0]
    if launch is None:
        launch = attention_launch("decode_attention", head_dim, group, q.dtype, q.device)
        if cache.k.dtype.itemsize == 1:
            # Converted numbers take registers: of 64 tokens at once, only two programs fit on a multiprocessor.
            launch = launch._replace(tile=min(launch.tile, 32))
    shape = (num_rows, num_heads, splits) if splits > 1 else (0,)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    weight = torch.empty(shape, dtype=torch.float32, device=q.device)
    cut = {"TILE": launch.tile, "SPLITS": splits, "WINDOW": window, "MIN_SPAN": max(MIN_SPAN, launch.tile)}
    cut |= {"HEAD": head_dim, "HEAD_PAD": padded(head_dim, 16), **dependent_launch(q.device)}
    _decode[(num_rows, num_kv_heads, splits)](
        *(out, partial, weight, q, cache.k, cache.v, cache.k_scales, cache.v_scales),
        *(block_tables, context_lens, query_starts, seqs),
        *scales_and_strides(cache, block_tables, scale, biases, sinks),
        GROUP_PAD=padded(group, 16),
        **kinds_of(cache, group, biases, cap, q.dtype, sinks),
        **cut,
        **launch.options,
    )
    if splits > 1:
        _merge[(num_rows, num_heads)](
            out, partial, weight, context_lens, query_starts, seqs, **cut, num_warps=max(2, splits // 8)
        )


def scales_and_strides(
    cache: PagedCache, block_tables: Tensor, scale: float, biases: Tensor | None, sinks: Tensor | None = None
) -> tuple[Tensor | float | None, ...]:
    """Return the arguments that attention kernels take after their tables, from `biases` to `host_scale_jump`."""
    by_bias = biases, sinks, scale * LOG2_E.value, 0 if biases is None else biases.stride(0)
    return *by_bias, block_tables.stride(0), *cache_strides(cache)


def kinds_of(
    cache: PagedCache,
    group: int,
    biases: Tensor | None,
    cap: float | None,
    dtype: torch.dtype,
    sinks: Tensor | None = None,
) -> dict[str, int | float | bool]:
    """Return the constants that attention kernels are compiled for. group: query heads per key head; dtype: of queries.

    CAP: the limit of scores, 0 without one. NARROW: products are computed in float16, because keys are float8 and
    queries bfloat16.
    """
    has_scales, has_biases = cache.k_scales is not None, biases is not None
    is_narrow = cache.k.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16
    sizes = {"GROUP": group, "BLOCK": cache.block_size, "CAP": cap or 0.0}
    kinds = {"QUANTIZED": has_scales, "NARROW": is_narrow, "BIASED": has_biases, "SUNK": sinks is not None}
    return {**sizes, **kinds}


def cache_strides(cache: PagedCache) -> tuple[int, ...]:
    """Return the strides of block and head, for values and for scales, then the first host block and its offsets."""
    scales = cache.k_scales
    by_scale = (0, 0) if scales is None else (scales.stride(1), scales.stride(0))
    jumps = cache.host_from, cache.host_jump // cache.k.element_size(), cache.host_jump // 4
    return cache.k.stride(1), cache.k.stride(0), *by_scale, *jumps
