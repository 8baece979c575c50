"""The kernels of mixtures of experts, and of float8 with blocks of 128, against float64."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from bench_gpu.shapes import Sizes, normal
from bench_gpu.verdict import Bound, judge, judge_equal, stored_bound
from penstock.kernels.reference import experts as reference
from penstock.kernels.triton.blocks import BLOCK_COLUMNS, multiply_blocks, quantize_blocks
from penstock.kernels.triton.experts import (
    ExpertChoice,
    ExpertMatrices,
    Routes,
    choose_experts,
    multiply_experts,
    sum_experts,
)
from penstock.kernels.triton.int4 import pack_int4, pair_scales

Row = dict[str, float | str]
NUM_EXPERTS, PER_TOKEN = 8, 2
PRODUCT = Bound(0.005, 0.02)
FLOAT8 = Bound(0.005, 0.03)
"""Hopper's float8 products keep 14 bits of partial sums."""
_SIZES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def check(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield the errors of the choice, of products with experts in floats and four bits, and of the sum."""
    weights = normal(NUM_EXPERTS, sizes.inter, sizes.hidden, sizes=sizes, device=device) / sizes.hidden**0.5
    packed, scales, minima = (torch.stack(parts) for parts in zip(*map(pack_int4, weights), strict=True))
    numbers = torch.randint(0, 256, packed.shape, dtype=torch.uint8, device=device)
    exponents = torch.randint(118, 122, scales.shape, dtype=torch.uint8, device=device)
    levels = torch.tensor(_SIZES, device=device)
    steps = torch.cat((levels, -levels)).double()[_nibbles(numbers).long()]
    formats = [
        (ExpertMatrices("plain", weights), weights.double()),
        (
            ExpertMatrices("int4", packed, pair_scales(scales, minima)),
            (_nibbles(packed).double() * scales.double().unsqueeze(-1) + minima.double().unsqueeze(-1)).flatten(2),
        ),
        (
            ExpertMatrices("mxfp4", numbers, exponents),
            (steps * torch.exp2(exponents.double() - 127).unsqueeze(-1)).flatten(2),
        ),
    ]
    for rows in (1, sizes.rows, sizes.prompt):
        routes = yield from _routed(rows, device)
        x = normal(rows, sizes.hidden, sizes=sizes, device=device)
        tokens, experts = routes.order.long() // PER_TOKEN, _experts_at(routes)
        for matrices, meant in formats:
            got = multiply_experts(x, matrices, routes, x.dtype, gathers=True)
            yield judge(f"experts {matrices.format}, {rows} rows", got, _products(x, tokens, experts, meant), PRODUCT)
        of_pairs = normal(rows * PER_TOKEN, sizes.hidden, sizes=sizes, device=device)
        want = (of_pairs.double().view(rows, PER_TOKEN, -1) * routes.shares.double().unsqueeze(-1)).sum(1)
        yield judge(f"sum_experts, {rows} rows", sum_experts(of_pairs, routes), want, Bound(1e-5, 1e-5))


def check_blocks(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Products in float8 with a scale for each 128 columns, of a matrix and of experts."""
    weights = normal(NUM_EXPERTS, sizes.inter, sizes.hidden, sizes=sizes, device=device)
    kept = [quantize_blocks(one) for one in weights]
    numbers, scales = torch.stack([one for one, _ in kept]), torch.stack([some.T.contiguous() for _, some in kept])
    meant = torch.stack([_widened(*one) for one in kept])
    for rows in (1, 17, sizes.prompt):
        x = normal(rows, sizes.hidden, sizes=sizes, device=device)
        q, of_rows = quantize_blocks(x)
        given = _widened(q, of_rows)
        yield judge(f"quantize_blocks, {rows} rows", given, x, stored_bound(q.dtype, x))
        got = multiply_blocks(q, of_rows, numbers[0], scales[0], None, x.dtype)
        yield judge(f"multiply_blocks, {rows} rows", got, given @ meant[0].T, FLOAT8)
        routes = yield from _routed(rows, device)
        matrices = ExpertMatrices("blocks", numbers, scales)
        got = multiply_experts(q, matrices, routes, x.dtype, gathers=True, x_scales=of_rows)
        want = _products(given, routes.order.long() // PER_TOKEN, _experts_at(routes), meant)
        yield judge(f"experts blocks, {rows} rows", got, want, FLOAT8)


def _routed(rows: int, device: torch.device) -> Generator[Row, None, Routes]:
    scores, slots = torch.randn(rows, NUM_EXPERTS, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    routes = choose_experts(scores, ExpertChoice(PER_TOKEN, normalized=True), slots)
    chosen, shares = reference.choose_experts(scores, PER_TOKEN, normalized=True)
    yield judge_equal(f"choose_experts, {rows} rows", routes.chosen.long(), chosen)
    yield judge(f"choose_experts, {rows} rows, shares", routes.shares, shares, Bound(1e-5, 1e-5))
    yield judge_equal(f"sorted pairs, {rows} rows", routes.order.long(), chosen.flatten().argsort(stable=True))
    return routes


def _experts_at(routes: Routes) -> Tensor:
    """Return the expert of each place of the order."""
    return routes.chosen.flatten()[routes.order.long()].long()


def _products(x: Tensor, tokens: Tensor, experts: Tensor, meant: Tensor) -> Tensor:
    out = torch.empty(len(tokens), meant.shape[1], dtype=torch.float64, device=x.device)
    for expert in range(len(meant)):
        own = experts == expert
        out[own] = x[tokens[own]].double() @ meant[expert].T
    return out


def _nibbles(packed: Tensor) -> Tensor:
    """Return the numbers of four bits of matrices, [experts, rows, groups, 32]."""
    groups = packed.view(*packed.shape[:2], -1, 16)
    return torch.cat((groups & 15, groups >> 4), dim=-1)


def _widened(q: Tensor, scales: Tensor) -> Tensor:
    return q.double() * scales.double().repeat_interleave(BLOCK_COLUMNS, 1)[:, : q.shape[1]]
