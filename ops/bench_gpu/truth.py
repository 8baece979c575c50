"""Every kernel against float64 at realistic sizes in bfloat16, each with its bound; the first wrong result raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fixtures.sampling import SamplingCase, rows_of
from torch import Tensor
from torch.nn import functional

from bench_gpu import truth_experts, truth_layers
from bench_gpu.shapes import BLOCK_SIZE, Pages, Sizes, ints, normal
from bench_gpu.verdict import SHORT, Bound, WrongResultError, judge, judge_equal, stored_bound
from penstock.gpu_node.model.gpu.decoder import AttentionRows, TritonAttention
from penstock.gpu_node.model.gpu.inputs import RowMarks, mark_rows_of
from penstock.kernels.arguments import PagedCache
from penstock.kernels.reference import layers as reference_layers
from penstock.kernels.triton import layers, products
from penstock.kernels.triton.copies import copy_blocks
from penstock.kernels.triton.decode_attention import num_splits
from penstock.kernels.triton.few_rows import MOST_ROWS, multiply_few
from penstock.kernels.triton.int4 import multiply_int4, pack_int4, pair_scales
from penstock.kernels.triton.invariant import multiply_invariant
from penstock.kernels.triton.launches import prefill_rows
from penstock.kernels.triton.lora import add_lora, lora_tiles
from penstock.kernels.triton.prefill_attention import prefill_tiles
from penstock.kernels.triton.sampler import pack_rules, sample

Row = dict[str, float | str]
ATTENTION = Bound(0.006, 0.03)
"""Shares are rounded to bfloat16 before they multiply values, and the result once more."""
PRODUCT = Bound(0.005, 0.02)
HOPPER_FLOAT8 = Bound(0.005, 0.03)
"""Hopper's float8 products keep 14 bits of partial sums."""


def check_kernels(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield the errors of each kernel. Raises WrongResultError at the first one beyond its bound."""
    torch.manual_seed(0)
    formats = [sizes.dtype, torch.int8]
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        formats.append(torch.float8_e4m3fn)
    checks: list[Callable[..., Iterator[Row]]] = [*(truth_layers.check, _copies, _lora, _plain_products, _sampler)]
    checks.append(truth_experts.check)
    if torch.float8_e4m3fn in formats:
        checks.append(truth_experts.check_blocks)
    with poisoned():
        for check in checks:
            yield from check(sizes, device)
        for kept in formats:
            yield from _rope_and_store(sizes, device, kept)
            yield from _attention(sizes, device, kept)
        for kept in formats[1:]:
            yield from truth_layers.check_quantized(sizes, device, kept)
            yield from _scaled_products(sizes, device, kept)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill all new memory with NaN and -1, so that an output that a kernel does not write shows."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            if tensor.numel() and not tensor.is_meta and tensor.is_contiguous():
                tensor.view(torch.uint8 if tensor.dim() else tensor.dtype).fill_(255)
            return tensor

        return made

    with patch.object(torch, "empty", filled(torch.empty)), patch.object(torch, "empty_like", filled(torch.empty_like)):
        yield


def _rope_and_store(sizes: Sizes, device: torch.device, kept: torch.dtype) -> Iterator[Row]:
    heads, kv_heads, dim, count = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.rows
    qkv = normal(count, (heads + 2 * kv_heads) * dim, sizes=sizes, device=device)
    q_norm, k_norm = (normal(dim, sizes=sizes, device=device) for _ in "qk")
    angles = torch.randn(sizes.context, dim // 2, device=device)
    positions = torch.randint(sizes.context, (count,), device=device)
    slots = torch.randperm(count * BLOCK_SIZE, device=device)[:count] + BLOCK_SIZE
    slots[0] = -1
    cache = Pages.of(sizes, 1, count * BLOCK_SIZE, device, kept).cache
    given = qkv, cache, positions.int(), slots.int(), angles.cos(), angles.sin()
    queries = layers.rotate_and_store(*given, q_norm=q_norm, k_norm=k_norm, eps=1e-6)
    q, k, v = torch.split(qkv.double().view(count, -1, dim), [heads, kv_heads, kv_heads], dim=1)
    turn = angles.double()[positions].unsqueeze(1)
    q, k = (_rotated(_normed(x, norm), turn) for x, norm in ((q, q_norm), (k, k_norm)))
    name = f"rotate_and_store {kept}".replace("torch.", "")
    yield judge(f"{name}, queries", queries, q, SHORT)
    for part, mine, scales, want in (("keys", cache.k, cache.k_scales, k), ("values", cache.v, cache.v_scales, v)):
        yield judge(f"{name}, {part}", _gathered(mine, scales, slots[1:]), want[1:], stored_bound(kept, want[1:]))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight.double(), 1e-6)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def _gathered(values: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """Return the vectors of slots, [len(slots), num_kv_heads, head_dim] in float64."""
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    found = values.float()[:, block, offset] if values.dtype.itemsize == 1 else values[:, block, offset]
    wide = found.double() if scales is None else found.double() * scales[:, block, offset, None].double()
    return wide.transpose(0, 1)


def _attention(sizes: Sizes, device: torch.device, kept: torch.dtype) -> Iterator[Row]:
    """Decode rows of all lengths up to the context beside chunks, with and without a window."""
    contexts = np.linspace(1, sizes.context, sizes.rows).astype(np.int32)
    counts = np.ones(sizes.rows, np.int32)
    counts[-2:] = np.minimum(contexts[-2:], sizes.prompt)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    pages = Pages.of(sizes, sizes.rows, sizes.context, device, kept)
    q = normal(int(starts[-1]), sizes.heads, sizes.head_dim, sizes=sizes, device=device)
    tables = ints(starts, device), ints(contexts, device), pages.tables
    chunks, decoding = (np.flatnonzero(which).astype(np.int32) for which in (counts > 1, counts == 1))
    splits = num_splits(len(decoding), sizes.kv_heads, device)
    runners = prefill_rows(sizes.head_dim, sizes.dtype, device)
    for count in sorted({1, splits, 8}):
        # Tiles of as many queries as the runner's have, and once of the fewest.
        query_rows = 64 if count == 1 else runners
        tiles = ints(prefill_tiles(starts, chunks, query_rows), device)
        rows = AttentionRows(ints(decoding, device), tiles, count, query_rows)
        sinks = torch.randn(sizes.heads, device=device)
        for window, cap, sunk in ((None, None, None), (sizes.context // 3, None, sinks), (None, 2.0, None)):
            out = torch.empty_like(q)
            given: dict[str, Any] = {"scale": sizes.head_dim**-0.5, "window": window, "cap": cap, "sinks": sunk}
            TritonAttention().attend(out, q, pages.cache, *tables, rows, biases=None, **given)
            want = _attended(q, pages, starts, contexts, window, cap, sunk)
            name = f"attention {kept}, {count} splits, window {window}, cap {cap}".replace("torch.", "")
            name += "" if sunk is None else ", sinks"
            yield judge(f"{name}, decode", out[starts[decoding]], want[starts[decoding]], ATTENTION)
            first = int(starts[chunks[0]])
            yield judge(f"{name}, prefill", out[first:], want[first:], ATTENTION)


def _attended(
    q: Tensor,
    pages: Pages,
    starts: np.ndarray[Any, Any],
    contexts: np.ndarray[Any, Any],
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    cache: PagedCache = pages.cache
    group, parts = q.shape[1] // cache.k.shape[0], []
    for seq, context in enumerate(contexts.tolist()):
        at = torch.arange(context, device=q.device)
        slots = pages.tables[seq].long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        stored = (cache.k, cache.k_scales), (cache.v, cache.v_scales)
        k, v = (_gathered(x, scales, slots).repeat_interleave(group, dim=1) for x, scales in stored)
        queries = q[starts[seq] : starts[seq + 1]].double()
        positions = at[context - len(queries) :]
        hidden = at[None, :] > positions[:, None]
        if window is not None:
            hidden |= at[None, :] <= positions[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", queries, k) * q.shape[2] ** -0.5
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.double().view(-1, 1, 1).expand(-1, len(queries), 1)
            scores = torch.cat((scores, column), dim=-1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :context], v))
    return torch.cat(parts)


def _plain_products(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    weight = normal(sizes.inter, sizes.hidden, sizes=sizes, device=device)
    bytes_of, scales, minima = pack_int4(weight)
    pairs = pair_scales(scales, minima)
    nibbles = torch.stack((bytes_of & 15, bytes_of >> 4)).view(2, len(weight), -1, 16).permute(1, 2, 0, 3)
    meant = nibbles.flatten(2).double() * scales.double().unsqueeze(-1) + minima.double().unsqueeze(-1)
    for rows in (1, 2, 17, 64, sizes.prompt):
        x = normal(rows, sizes.hidden, sizes=sizes, device=device)
        want = x.double() @ weight.double().T
        yield judge(f"multiply_invariant, {rows} rows", multiply_invariant(x, weight, None), want, PRODUCT)
        if rows <= MOST_ROWS:
            for part in (weight, weight[: len(weight) // 4]):
                name = f"multiply_few, {rows} rows, {len(part)} outputs"
                yield judge(name, multiply_few(x, part, None), want[:, : len(part)], PRODUCT)
        want = x.double() @ meant.flatten(1).T
        yield judge(f"multiply_int4, {rows} rows", multiply_int4(x, bytes_of, pairs), want, PRODUCT)


def _scaled_products(sizes: Sizes, device: torch.device, kept: torch.dtype) -> Iterator[Row]:
    weight = products.quantize_vectors(normal(sizes.inter, sizes.hidden, sizes=sizes, device=device), kept)
    wide = truth_layers.widened(weight)
    for rows in (1, 17, sizes.prompt):
        x = normal(rows, sizes.hidden, sizes=sizes, device=device)
        quantized = products.quantize_vectors(x, kept)
        given = truth_layers.widened(quantized)
        name = f"{kept}, {rows} rows".replace("torch.", "")
        yield judge(f"quantize_vectors {name}", given, x, stored_bound(kept, x))
        got = products.multiply_scaled(*quantized, *weight, sizes.dtype)
        want = given @ wide.T
        yield judge(f"multiply_scaled {name}", got, want, HOPPER_FLOAT8)
        if products.library_multiplies(quantized.q, weight.q, sizes.dtype):
            got = products.multiply_by_library(*quantized, *weight, sizes.dtype)
            yield judge(f"multiply_by_library {name}", got, want, HOPPER_FLOAT8)


def _lora(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    rank, slots = 16, np.repeat(np.array([2, -1, 0, 1], np.int32), max(1, sizes.rows // 4))
    x, out = (normal(len(slots), n, sizes=sizes, device=device) for n in (sizes.hidden, sizes.inter))
    down = normal(3, rank, sizes.hidden, sizes=sizes, device=device) / sizes.hidden**0.5
    up = normal(3, sizes.inter, rank, sizes=sizes, device=device) / rank**0.5
    want = out.double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[row] += up[slot].double() @ (down[slot].double() @ x[row].double())
    add_lora(out, x, down, up, ints(lora_tiles(slots), device))
    yield judge("add_lora", out, want, PRODUCT)


def _copies(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """In order, chains included."""
    pool = torch.randint(0, 256, (40, 4096 * sizes.kv_heads), dtype=torch.uint8, device=device)
    copies = np.random.default_rng(0).integers(0, 40, (64, 2), dtype=np.int32)
    want = pool.cpu()
    reference_layers.copy_blocks(want, torch.from_numpy(copies))
    copy_blocks(pool, copies)
    yield judge_equal("copy_blocks", pool.cpu(), want)


_RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}


def _sampler(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Tokens are those of the reference in float64; a draw within rounding of a boundary may fall on either side."""
    rng, count = np.random.default_rng(0), 4
    logits = torch.from_numpy(3 * rng.standard_normal((count, sizes.vocab)).astype(np.float32)).to(sizes.dtype)
    for name, rules in _RULES.items():
        seen = [rng.integers(0, sizes.vocab, 200).astype(np.int32) for _ in range(count)]
        extra: dict[str, Any] = {"seen": seen, "num_seen_prompt": 50} if name == "penalties" else {}
        rows = rows_of(count, seed=np.arange(count), **rules, **extra)
        marks, mark_rows = RowMarks(sizes.vocab, device), mark_rows_of(rows)
        packed = marks.write(rows, mark_rows) if extra else ints(pack_rules(rows, mark_rows), device)
        tokens = sample(logits.to(device), packed, marks.marks)
        wrong = SamplingCase(logits.float().numpy(), rows).disagreements(tokens.cpu().numpy())
        if wrong:
            raise WrongResultError(f"sample {name}: rows {wrong} chose other tokens than the reference")
        yield {"check": f"sample {name}", "rms": 0.0, "rms_bound": 0.0, "max": 0.0, "max_bound": 0.0}
