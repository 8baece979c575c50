"""Each kernel by itself: its time by replayed graphs over rotated buffers, and what fraction of its ceiling that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from bench_gpu import costs
from bench_gpu.measure import Clock, Work, fraction, rotated
from bench_gpu.shapes import Pages, Sizes, ints, normal
from penstock.gpu_node.model.gpu.linear import SCALED
from penstock.gpu_node.model.torch_common.layers import Norm
from penstock.kernels.arguments import Addend, StateRows
from penstock.kernels.triton import layers, products, recurrent
from penstock.kernels.triton.copies import copy_blocks
from penstock.kernels.triton.decode_attention import decode_attention, num_splits
from penstock.kernels.triton.few_rows import MOST_ROWS, is_for_few, multiply_few
from penstock.kernels.triton.int4 import multiply_int4, pack_int4, pair_scales
from penstock.kernels.triton.invariant import multiply_invariant
from penstock.kernels.triton.launches import Launch, prefill_rows, shape_name
from penstock.kernels.triton.norms import add_norm
from penstock.kernels.triton.prefill_attention import prefill_attention, prefill_tiles
from penstock.kernels.triton.sampler import RULE_COLUMNS, Marks, sample


@dataclass(frozen=True)
class Case:
    """A kernel's call on buffers of its own, and what it must at least move and compute."""

    name: str
    make: Callable[[], Work]
    num_bytes: float
    num_operations: float = 0.0
    rate: str = "bf16_tflop_s"
    """The ceiling of its operations."""


def measure(cases: Iterator[Case], clock: Clock, ceilings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the time of each case, and the fraction of its ceiling, while the stage has time left."""
    for case in cases:
        if clock.left_s < 0:
            yield {"kernel": case.name, "skipped": "the stage's time is over"}
            continue
        try:
            ms = clock.device_ms(rotated(case.make, int(case.num_bytes)))
        except (OutOfResources, torch.OutOfMemoryError) as error:
            yield {"kernel": case.name, "skipped": str(error)[:200]}
            continue
        share = fraction(ceilings, ms, case.num_bytes, case.num_operations, case.rate)
        rates = {"gb_s": case.num_bytes / ms / 1e6, "tflop_s": case.num_operations / ms / 1e9}
        yield {"kernel": case.name, "ms": ms, **rates, "fraction": share}


def cases(sizes: Sizes, device: torch.device, ceilings: dict[str, Any], *, dry: bool) -> Iterator[Case]:
    """Yield what is measured: attention over batch and context, products over rows, samplers, small kernels, copies."""
    grid = [(1, 20)] if dry else [(b, c) for c in (128, 1024, 8192) for b in (1, 8, 32, 64, 128, 256)]
    for kept in (sizes.dtype, torch.int8):
        for batch, context in grid:
            yield decode_case(replace(sizes, rows=batch, context=context), device, kept)
    for prompt in (18,) if dry else (2048, 8192, 32_768):
        yield prefill_case(replace(sizes, prompt=prompt), device, prefill_rows(sizes.head_dim, sizes.dtype, device))
    for rows in (1, 20) if dry else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192):
        yield from _product_cases(sizes, rows, device, has_float8="fp8_tflop_s" in ceilings)
    yield from _sampler_cases(sizes, device)
    yield from _small_cases(sizes, device)
    for seqs, tokens in ((1, 2), (2, 1)) if dry else ((1, 1), (64, 1), (256, 1), (1, 2048), (16, 512)):
        yield from _state_cases(sizes, device, seqs, tokens)


def decode_case(sizes: Sizes, device: torch.device, kept: torch.dtype, launch: Launch | None = None) -> Case:
    rows, dim = sizes.rows, sizes.head_dim

    def make() -> Work:
        pages = Pages.of(sizes, rows, sizes.context, device, kept)
        q = normal(rows, sizes.heads, dim, sizes=sizes, device=device)
        starts, contexts = ints(range(rows + 1), device), ints([sizes.context] * rows, device)
        given = torch.empty_like(q), q, pages.cache, starts, contexts, pages.tables, starts[:rows]
        splits = num_splits(rows, sizes.kv_heads, device)
        return lambda: decode_attention(*given, splits, scale=dim**-0.5, launch=launch)

    vector = dim * kept.itemsize + (4 if kept.itemsize == 1 else 0)
    num_bytes = 2 * rows * sizes.context * sizes.kv_heads * vector
    operations = 4 * rows * sizes.context * sizes.heads * dim
    return Case(_name("decode_attention", kept, rows, sizes.context), make, num_bytes, operations)


def profiled_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield a case for each kernel that a profiler looks at."""
    rows = prefill_rows(sizes.head_dim, sizes.dtype, device)
    yield from (decode_case(sizes, device, sizes.dtype), prefill_case(sizes, device, rows))
    wanted = {"multiply_few 1 rows", "multiply_int4 1 rows", "sample top_p", "add_norm"}
    others = *_product_cases(sizes, 1, device, has_float8=False), *_sampler_cases(sizes, device)
    yield from (case for case in (*others, *_small_cases(sizes, device)) if case.name in wanted)


def prefill_case(sizes: Sizes, device: torch.device, rows: int, launch: Launch | None = None) -> Case:
    """rows: queries of a tile."""
    prompt, dim = sizes.prompt, sizes.head_dim

    def make() -> Work:
        pages = Pages.of(sizes, 1, prompt, device, sizes.dtype)
        q = normal(prompt, sizes.heads, dim, sizes=sizes, device=device)
        starts = np.array([0, prompt], np.int32)
        tiles = ints(prefill_tiles(starts, np.zeros(1, np.int32), rows), device)
        tables = ints(starts, device), ints(starts[1:], device), pages.tables
        given = torch.empty_like(q), q, pages.cache, *tables, tiles
        return lambda: prefill_attention(*given, scale=dim**-0.5, rows=rows, launch=launch)

    return Case(f"prefill_attention {prompt}, {rows} rows a tile", make, 0, 2 * prompt**2 * sizes.heads * dim)


def _name(kernel: str, kept: torch.dtype, *numbers: int) -> str:
    return f"{kernel} {str(kept).removeprefix('torch.')} {' x '.join(map(str, numbers))}"


def _product_cases(sizes: Sizes, rows: int, device: torch.device, *, has_float8: bool) -> Iterator[Case]:
    """Yield the products of `rows` rows with the MLP's second matrix."""
    outputs, columns = sizes.hidden, sizes.inter
    operations, moved = 2 * rows * outputs * columns, rows * (columns + outputs) * sizes.dtype.itemsize

    def plain(multiply: Callable[..., object]) -> Callable[[], Work]:
        def make() -> Work:
            x, weight = (normal(n, columns, sizes=sizes, device=device) for n in (rows, outputs))
            return lambda: multiply(x, weight)

        return make

    def scaled(kept: torch.dtype, multiply: Callable[..., object]) -> Callable[[], Work]:
        def make() -> Work:
            both = (normal(n, columns, sizes=sizes, device=device) for n in (rows, outputs))
            x, weight = (products.quantize_vectors(vectors, kept) for vectors in both)
            return lambda: multiply(*x, *weight, sizes.dtype)

        return make

    def int4() -> Work:
        x, weight = (normal(n, columns, sizes=sizes, device=device) for n in (rows, outputs))
        packed, *scales = pack_int4(weight)
        pairs = pair_scales(*scales)
        return lambda: multiply_int4(x, packed, pairs)

    whole, short_moved = outputs * columns, rows * (columns + outputs * sizes.dtype.itemsize)
    yield Case(f"cuBLAS {rows} rows", plain(torch.nn.functional.linear), 2 * whole + moved, operations)
    if rows <= MOST_ROWS and is_for_few(*(torch.empty(n, 16, dtype=sizes.dtype, device=device) for n in (rows, 16))):
        few = plain(lambda x, weight: multiply_few(x, weight, None))
        yield Case(f"multiply_few {rows} rows", few, 2 * whole + moved, operations)
    fixed = plain(lambda x, weight: multiply_invariant(x, weight, None))
    yield Case(f"multiply_invariant {rows} rows", fixed, 2 * whole + moved, operations)
    for name, kept in SCALED.items():
        if name != "fp8" or has_float8:
            rate = "fp8_tflop_s" if name == "fp8" else "bf16_tflop_s"
            cost: Any = whole + short_moved, operations, rate
            yield Case(f"multiply_scaled {name} {rows} rows", scaled(kept, products.multiply_scaled), *cost)
            q, weight = (torch.empty(n, columns, dtype=kept, device=device) for n in (rows, outputs))
            if products.library_multiplies(q, weight, sizes.dtype):
                by_library = scaled(kept, products.multiply_by_library)
                yield Case(f"multiply_by_library {name} {rows} rows", by_library, *cost)
    yield Case(f"multiply_int4 {rows} rows", int4, whole * 5 / 8 + moved, operations)


def _sampler_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    modes: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "top_k": {"top_k": 50},
        "top_p": {"top_p": 0.9},
        "top_k and top_p": {"top_k": 50, "top_p": 0.9},
    }
    for name, rules in modes.items():

        def make(rules: dict[str, Any] = rules) -> Work:
            logits = normal(sizes.rows, sizes.vocab, sizes=sizes, device=device)
            packed, marks = _rules(sizes.rows, device, **rules), Marks.empty(1, sizes.vocab, device)
            return lambda: sample(logits, packed, marks)

        yield Case(f"sample {name}", make, sizes.rows * sizes.vocab * sizes.dtype.itemsize)


def _rules(
    rows: int, device: torch.device, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    rules = np.zeros((rows, len(RULE_COLUMNS)), np.int32)
    rules[:, :6] = np.array([temperature, top_p, 0.0, 1.0, 0.0, 0.0], np.float32).view(np.int32)
    rules[:, 6], rules[:, 9], rules[:, 11] = top_k, range(rows), -1
    return torch.from_numpy(rules).to(device)


def _small_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    item, tokens = sizes.dtype.itemsize, sizes.prompt
    width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim

    def rope() -> Work:
        qkv, at = normal(tokens, width, sizes=sizes, device=device), ints(range(tokens), device)
        angles = torch.randn(tokens, sizes.head_dim // 2, device=device)
        cache = Pages.of(sizes, 1, tokens, device, sizes.dtype).cache
        return lambda: layers.rotate_and_store(qkv, cache, at, at, angles, angles)

    def norm() -> Work:
        delta = normal(tokens, sizes.hidden, sizes=sizes, device=device)
        residual, weight = torch.randn(delta.shape, device=device), normal(sizes.hidden, sizes=sizes, device=device)
        return lambda: add_norm(residual, Addend(delta), Norm(weight, None, 1e-5))

    def gate() -> Work:
        x = normal(tokens, 2 * sizes.inter, sizes=sizes, device=device)
        return lambda: layers.gate_mul(x, "silu")

    yield Case("rotate_and_store", rope, 2 * tokens * width * item)
    yield Case("add_norm", norm, tokens * sizes.hidden * (8 + 2 * item))

    def quantized() -> Work:
        x = normal(tokens, sizes.hidden, sizes=sizes, device=device)
        return lambda: products.quantize_vectors(x, torch.int8)

    yield Case("gate_mul", gate, 3 * tokens * sizes.inter * item)
    yield Case("quantize_vectors", quantized, tokens * sizes.hidden * (item + 1))


def _state_cases(sizes: Sizes, device: torch.device, num_seqs: int, num_tokens: int) -> Iterator[Case]:
    """Yield recurrences of sequences with as many tokens each: prompts, or decoding."""
    heads, dim, tokens = sizes.heads, sizes.head_dim, num_seqs * num_tokens
    seqs, none = ints(range(num_seqs), device), ints(np.zeros((0, 2)), device)
    starts = ints(range(0, tokens + 1, num_tokens), device)
    rows = StateRows(ints(np.repeat(range(num_seqs), num_tokens), device), starts, seqs, seqs, starts * 0, none)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    def learn() -> Work:
        given = real(tokens, 3 * heads * dim), real(tokens, 2 * heads), -real(heads).exp(), real(heads)
        states = real(num_seqs, heads, dim, dim)
        return lambda: recurrent.delta_rule(*given, states, rows, num_key_heads=heads, tiled=False)

    def read() -> Work:
        mixed, durations, of_heads = real(tokens, (heads + 2) * dim), real(tokens, heads), real(3, heads)
        states = real(num_seqs, heads, dim, dim)
        rates = of_heads[0], -of_heads[1].exp(), of_heads[2]
        return lambda: recurrent.scan(mixed, durations, *rates, states, rows, num_groups=1)

    cost = costs.delta_rule(tokens, num_seqs, key_heads=heads, heads=heads, key_dim=dim, value_dim=dim)
    yield Case(f"delta_rule {num_seqs} x {num_tokens}", learn, cost.num_bytes, cost.flops)
    cost = costs.scan(tokens, num_seqs, groups=1, heads=heads, head_dim=dim, state_size=dim)
    yield Case(f"scan {num_seqs} x {num_tokens}", read, cost.num_bytes, cost.flops)


def copy_ms(clock: Clock, *, dry: bool) -> dict[str, float | str]:
    """Copy 33 blocks, by wall clock: the list of blocks comes from the host, so no graph can hold it."""
    pool = torch.zeros(66, 1024 if dry else 2 << 20, dtype=torch.uint8, device=clock.device)
    copies = np.array([[i, i + 33] for i in range(33)], np.int32)
    copy_blocks(pool, copies)
    return {"kernel": "copy_blocks, host included", "ms": clock.wall_ms(lambda: copy_blocks(pool, copies))}


def sweep(sizes: Sizes, clock: Clock, *, dry: bool) -> Iterator[dict[str, Any]]:
    """Yield the times of the attention kernels over rows of a tile, its keys, warps and stages."""
    tiles, warps, stages = ((16,), (4,), (1,)) if dry else ((32, 64, 128), (4, 8), (2, 3, 4))
    launches = [Launch(tile, warp, stage) for tile in tiles for warp in warps for stage in stages]
    # First what Hopper uses: the stage may end before the rest.
    makers: dict[int, Callable[[Launch], Case]] = {
        128: lambda launch: prefill_case(sizes, clock.device, 128, launch),
        0: lambda launch: decode_case(sizes, clock.device, sizes.dtype, launch),
        64: lambda launch: prefill_case(sizes, clock.device, 64, launch),
    }
    for rows, make in makers.items():
        kernel = "prefill_attention" if rows else "decode_attention"
        for launch in launches:
            row: dict[str, Any] = {"kernel": kernel, "rows": rows, **launch._asdict()}
            if clock.left_s < 0:
                yield row | {"skipped": "the stage's time is over"}
                continue
            try:
                yield row | {"ms": clock.device_ms([make(launch).make()])}
            except (OutOfResources, torch.OutOfMemoryError) as error:
                yield row | {"skipped": str(error)[:200]}


def tuned(rows: list[dict[str, Any]], sizes: Sizes) -> dict[str, dict[str, list[int]]]:
    """Return the fastest launches of a sweep, as `kernels/triton/launches.py` reads them."""
    shape = shape_name(sizes.head_dim, sizes.heads // sizes.kv_heads, sizes.dtype)
    found: dict[str, dict[str, list[int]]] = {}
    # The fastest one comes last.
    for row in sorted((row for row in rows if "ms" in row), key=lambda row: -row["ms"]):
        name = f"{row['kernel']}_128" if row["rows"] == 128 else row["kernel"]
        found[name] = {shape: [row["tile"], row["num_warps"], row["num_stages"]]}
    return found
