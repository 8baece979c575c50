"""Each kernel by itself: how far it is from its reference, and what fraction of the GPU's limit it achieves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from bench_gpu.measure import Clock
from penstock.kernels.paged_cache import PagedCache
from penstock.kernels.reference import attention as reference_attention
from penstock.kernels.reference import layers as reference_layers
from penstock.kernels.triton import attention, layers
from penstock.kernels.triton.blocks import copy_blocks
from penstock.kernels.triton.decode_attention import decode_attention, num_splits
from penstock.kernels.triton.launches import Launch, shape_name
from penstock.kernels.triton.prefill_attention import prefill_attention, prefill_tiles
from penstock.kernels.triton.sampler import RULE_COLUMNS, Marks, sample

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """What kernels are measured on: heads and widths of Llama-3.1-8B, or next to nothing."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inter: int
    vocab: int
    rows: int
    context: int
    prompt: int
    dtype: torch.dtype


FULL = Sizes(32, 8, 128, 4096, 14_336, 128_256, 64, 2048, 8192, torch.bfloat16)
DRY = Sizes(2, 1, 16, 32, 32, 64, 2, 16, 16, torch.float32)


def check(sizes: Sizes, device: torch.device) -> dict[str, float]:
    """The largest difference from the reference, by the largest number there; on few rows, since that is slow."""
    torch.manual_seed(0)
    counts, contexts = [1, 3, 1], [33, 20, 7]
    pages = _Pages(sizes, len(counts), 64, device)
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)
    q = _normal(sum(counts), sizes.heads, sizes.head_dim, sizes=sizes, device=device)
    tables = starts, torch.tensor(contexts, dtype=torch.int32, device=device), pages.tables
    x = _normal(3, 2 * sizes.inter, sizes=sizes, device=device)
    weight = _normal(sizes.hidden, sizes=sizes, device=device)
    residual = torch.randn(3, sizes.hidden, device=device)

    def both(call: Callable[[Any], torch.Tensor], fast: Any, naive: Any) -> float:
        got, want = call(fast).float(), call(naive).float()
        return float((got - want).abs().max() / want.abs().max())

    return {
        "paged_attention": both(
            lambda module: module.paged_attention(q, pages.cache, *tables), attention, reference_attention
        ),
        "gate_mul": both(lambda module: module.gate_mul(x, "silu"), layers, reference_layers),
        "add_rms_norm": both(
            lambda module: module.add_rms_norm(residual.clone(), None, weight, 1e-5), layers, reference_layers
        ),
    }


def measure(sizes: Sizes, clock: Clock, limits: dict[str, Any]) -> list[dict[str, float | str]]:
    """GB/s or TFLOP/s of each, and what fraction that is of a copy or of a square product."""
    rows: list[dict[str, float | str]] = []
    for name, work, num_bytes, num_operations in _cases(sizes, clock.device):
        ms = clock.device_ms(work)
        by_bytes, by_operations = num_bytes / ms / 1e6, num_operations / ms / 1e9
        fraction = max(by_bytes / limits["copy_gb_s"], by_operations / limits["product_tflop_s"])
        rows.append({"kernel": name, "ms": ms, "gb_s": by_bytes, "tflop_s": by_operations, "fraction": fraction})
    return rows


def tune(sizes: Sizes, clock: Clock, *, dry: bool) -> dict[str, dict[str, list[int]]]:
    """The fastest launches of the attention kernels on this GPU, as `kernels/triton/launches.py` reads them."""
    tiles, warps, stages = ((16,), (4,), (1,)) if dry else ((32, 64, 128), (4, 8), (2, 3, 4))
    launches = [Launch(*choice) for choice in _product(tiles, warps, stages)]
    found: dict[str, dict[str, list[int]]] = {}
    shape = shape_name(sizes.head_dim, sizes.heads // sizes.kv_heads, sizes.dtype)
    for name, make in (("decode_attention", _decode), ("prefill_attention", _prefill)):
        work = make(sizes, clock.device)[0]
        times = {launch: _time(clock, work, launch) for launch in launches if clock.left_s > 0}
        if times:
            found[name] = {shape: list(min(times, key=times.__getitem__))}
    return found


def _time(clock: Clock, work: Callable[..., object], launch: Launch) -> float:
    try:
        return clock.device_ms(lambda: work(launch), repeats=8)
    except OutOfResources:  # more shared memory than the GPU has
        return float("inf")


def _product(*choices: tuple[int, ...]) -> list[tuple[int, ...]]:
    first, *rest = choices
    return [(one, *others) for one in first for others in (_product(*rest) if rest else [()])]


class _Pages:
    """A cache whose blocks are dealt at random."""

    def __init__(self, sizes: Sizes, num_seqs: int, context: int, device: torch.device) -> None:
        width = -(-context // BLOCK_SIZE)
        shape = num_seqs * width + 1, sizes.kv_heads, BLOCK_SIZE, sizes.head_dim
        k, v = (_normal(*shape, sizes=sizes, device=device).transpose(0, 1) for _ in "kv")
        self.cache = PagedCache(k, v)
        order = torch.randperm(num_seqs * width, device=device) + 1
        self.tables = order.view(num_seqs, width).to(torch.int32)


def _normal(*shape: int, sizes: Sizes, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(sizes.dtype)


def _ints(values: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


_Case = tuple[Callable[..., object], int, int]


def _decode(sizes: Sizes, device: torch.device) -> _Case:
    pages, rows = _Pages(sizes, sizes.rows, sizes.context, device), sizes.rows
    q = _normal(rows, sizes.heads, sizes.head_dim, sizes=sizes, device=device)
    starts, contexts = _ints(range(rows + 1), device), _ints([sizes.context] * rows, device)
    given = torch.empty_like(q), q, pages.cache, starts, contexts, pages.tables, starts[:rows]
    splits = num_splits(rows, sizes.kv_heads, device)

    def work(launch: Launch | None = None) -> None:
        decode_attention(*given, splits, scale=sizes.head_dim**-0.5, launch=launch)

    size = 2 * rows * sizes.context * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
    return work, size, 4 * rows * sizes.context * sizes.heads * sizes.head_dim


def _prefill(sizes: Sizes, device: torch.device) -> _Case:
    pages = _Pages(sizes, 1, sizes.prompt, device)
    q = _normal(sizes.prompt, sizes.heads, sizes.head_dim, sizes=sizes, device=device)
    starts = np.array([0, sizes.prompt], np.int32)
    tiles = _ints(prefill_tiles(starts, np.zeros(1, np.int32)), device)
    given = torch.empty_like(q), q, pages.cache, _ints(starts, device), _ints(starts[1:], device), pages.tables, tiles

    def work(launch: Launch | None = None) -> None:
        prefill_attention(*given, scale=sizes.head_dim**-0.5, launch=launch)

    return work, 0, 2 * sizes.prompt**2 * sizes.heads * sizes.head_dim


def _cases(sizes: Sizes, device: torch.device) -> list[tuple[str, Callable[[], object], int, int]]:
    """Name, work, bytes that must move, operations that must be done."""
    item, tokens = sizes.dtype.itemsize, sizes.prompt
    pages = _Pages(sizes, 1, tokens, device)
    width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    qkv, x = (_normal(tokens, n, sizes=sizes, device=device) for n in (width, 2 * sizes.inter))
    delta, residual = (
        _normal(tokens, sizes.hidden, sizes=sizes, device=device),
        torch.randn(tokens, sizes.hidden, device=device),
    )
    weight, angles = (
        _normal(sizes.hidden, sizes=sizes, device=device),
        torch.randn(tokens, sizes.head_dim // 2, device=device),
    )
    at = _ints(range(tokens), device)
    logits = _normal(sizes.rows, sizes.vocab, sizes=sizes, device=device)
    marks = Marks.empty(1, sizes.vocab, device)
    plain, limited = (_rules(sizes.rows, device, **rule) for rule in ({}, {"top_p": 0.9, "top_k": 50}))
    pool = torch.zeros(66, 1024 if sizes is DRY else 2 << 20, dtype=torch.uint8, device=device)
    copies = np.array([[i, i + 33] for i in range(33)], np.int32)
    return [
        ("decode_attention", *_decode(sizes, device)),
        ("prefill_attention", *_prefill(sizes, device)),
        (
            "rotate_and_store",
            lambda: layers.rotate_and_store(qkv, pages.cache, at, at, angles, angles),
            2 * qkv.nbytes,
            0,
        ),
        (
            "add_rms_norm",
            lambda: layers.add_rms_norm(residual, delta, weight, 1e-5),
            2 * residual.nbytes + 2 * delta.nbytes,
            0,
        ),
        ("gate_mul", lambda: layers.gate_mul(x, "silu"), x.nbytes + tokens * sizes.inter * item, 0),
        ("sample", lambda: sample(logits, plain, marks), logits.nbytes, 0),
        ("sample, top_k and top_p", lambda: sample(logits, limited, marks), logits.nbytes, 0),
        ("copy_blocks", lambda: copy_blocks(pool, copies), 66 * pool.shape[1], 0),
    ]


def _rules(rows: int, device: torch.device, *, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    rules = np.zeros((rows, len(RULE_COLUMNS)), np.int32)
    rules[:, :6] = np.array([1.0, top_p, 0.0, 1.0, 0.0, 0.0], np.float32).view(np.int32)
    rules[:, 6], rules[:, 9], rules[:, 11] = top_k, range(rows), -1
    return torch.from_numpy(rules).to(device)
