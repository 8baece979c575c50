"""Mixtures of experts on Triton against the reference: the choice, products in every format, and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.kernels.reference import experts as reference
from penstock.kernels.reference import layers as reference_layers
from penstock.kernels.reference import products as reference_products
from penstock.kernels.triton.blocks import quantize_blocks
from penstock.kernels.triton.experts import (
    ExpertChoice,
    ExpertFormat,
    ExpertMatrices,
    Routes,
    choose_experts,
    multiply_experts,
    sum_experts,
)
from penstock.kernels.triton.int4 import pack_int4, pair_scales
from penstock.kernels.triton.products import quantize_vectors

from .conftest import TOLERANCES

NUM_EXPERTS, PER_TOKEN = 6, 3
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax with a sum of 1 and factors": {"normalized": True, "factors": True},
    "sigmoid, chosen with a bias": {"by_sigmoid": True, "normalized": True, "scale": 2.5, "bias": True},
    "sigmoid beside shared ones": {"by_sigmoid": True, "num_shared": 2},
    "softmax beside a shared one with a gate": {"num_shared": 1, "gates": True},
}


def _choice(rules: dict[str, Any], num_tokens: int, device: torch.device) -> tuple[ExpertChoice, dict[str, Any]]:
    """Return a choice, and the same as arguments of the reference."""
    drawn: dict[str, Any] = {
        name: torch.rand(num_tokens if name == "gates" else NUM_EXPERTS, device=device)
        for name in ("bias", "factors", "gates")
        if rules.get(name)
    }
    given = rules | drawn
    return ExpertChoice(PER_TOKEN, **{name: value for name, value in given.items() if name != "gates"}), given


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_experts_are_chosen_as_by_the_reference_and_pairs_are_sorted(
    name: str, num_tokens: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    scores = torch.randn(num_tokens, NUM_EXPERTS, device=device)
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
    choice, given = _choice(RULES[name], num_tokens, device)
    routes = choose_experts(scores, choice, slots, given.get("gates"))
    chosen, shares = reference.choose_experts(scores, PER_TOKEN, **given)
    assert torch.equal(routes.chosen.long(), chosen)
    torch.testing.assert_close(routes.shares, shares, atol=1e-6, rtol=1e-5)
    assert torch.equal(routes.order.long(), chosen.flatten().argsort(stable=True))
    counts = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS + choice.num_shared)
    assert torch.equal(routes.starts.diff().long(), counts)


def test_padding_tokens_go_to_no_expert_whatever_their_scores_are(device: torch.device) -> None:
    scores = torch.randn(40, NUM_EXPERTS, device=device)
    scores[3], scores[7, 2] = torch.nan, torch.inf
    slots = torch.arange(40, dtype=torch.int32, device=device)
    slots[[0, 3, 39]] = -1
    routes = choose_experts(scores, ExpertChoice(PER_TOKEN, num_shared=1), slots)
    assert (routes.chosen[slots < 0] == -1).all()
    assert int(routes.starts[0]) == 0 and int(routes.starts[-1]) == 37 * (PER_TOKEN + 1)
    placed = routes.order[: int(routes.starts[-1])]
    assert sorted(placed.tolist()) == [pair for pair in range(160) if int(slots[pair // 4]) >= 0]
    of_pairs = torch.full((160, 5), torch.nan, device=device)
    of_pairs[placed.long()] = 1.0
    assert torch.equal(sum_experts(of_pairs, routes)[slots < 0], torch.zeros(3, 5, device=device))


def _matrices(kind: ExpertFormat, weights: torch.Tensor, bias: torch.Tensor) -> tuple[ExpertMatrices, torch.Tensor]:
    """Return matrices in a format, and their values in float32. weights: [experts, outputs, columns]."""
    if kind == "plain":
        return ExpertMatrices("plain", weights, None, bias), weights.float()
    if kind == "int4":
        packed, scales, minima = (torch.stack(parts) for parts in zip(*map(pack_int4, weights), strict=True))
        eye = torch.eye(weights.shape[2], device=weights.device)
        each = zip(packed, scales, minima, strict=True)
        values = torch.stack([reference_products.multiply_int4(eye, *one).T for one in each])
        return ExpertMatrices("int4", packed, pair_scales(scales, minima), bias), values
    if kind == "mxfp4":
        nibbles = torch.randint(0, 16, (*weights.shape[:2], weights.shape[2] // 32, 32), device=weights.device)
        exponents = torch.randint(122, 127, nibbles.shape[:3], device=weights.device)
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weights.device)
        values = torch.cat((sizes, -sizes))[nibbles] * torch.exp2(exponents - 127.0).unsqueeze(-1)
        packed = (nibbles[..., :16] | nibbles[..., 16:] << 4).to(torch.uint8).flatten(2)
        return ExpertMatrices("mxfp4", packed, exponents.to(torch.uint8), bias), values.flatten(2)
    raise AssertionError(kind)


def _mixed(
    x: torch.Tensor, routes: Routes, first: ExpertMatrices, last: ExpertMatrices, *, deterministic: bool = False
) -> torch.Tensor:
    inner = multiply_experts(x, first, routes, x.dtype, gathers=True, deterministic=deterministic)
    outer = multiply_experts(inner, last, routes, x.dtype, gathers=False, deterministic=deterministic)
    return sum_experts(outer, routes)


def _want(
    x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, expert: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts in float32.

    expert: computes one expert for rows. Experts below 0 are none.
    """
    outputs = [[expert(at, x[i : i + 1])[0].float() for at in row if at >= 0] for i, row in enumerate(chosen.tolist())]
    mixed = [
        torch.stack([share * row for share, row in zip(weights, rows, strict=False)]).sum(0)
        for weights, rows in zip(shares.float(), outputs, strict=True)
    ]
    return torch.stack(mixed)


@pytest.mark.parametrize("num_tokens", [1, 50, 230])
@pytest.mark.parametrize("kind", ["plain", "int4", "mxfp4"])
def test_products_grouped_by_expert_equal_those_of_each_token(
    kind: ExpertFormat, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    hidden, inter = 96, 160
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    routes = choose_experts(
        torch.randn(num_tokens, NUM_EXPERTS, device=device),
        ExpertChoice(PER_TOKEN, num_shared=1),
        torch.arange(num_tokens, dtype=torch.int32, device=device),
    )
    drawn = (
        (torch.randn(NUM_EXPERTS + 1, *shape, device=device).to(dtype) / 8, torch.randn(7, shape[0], device=device))
        for shape in ((inter, hidden), (hidden, inter))
    )
    (first, up), (last, down) = (_matrices(kind, weights, bias.to(dtype)) for weights, bias in drawn)

    def expert(at: int, rows: torch.Tensor) -> torch.Tensor:
        assert first.bias is not None and last.bias is not None
        inner = (rows.float() @ up[at].T + first.bias[at].float()).to(dtype)
        return (inner.float() @ down[at].T + last.bias[at].float()).to(dtype)

    want = _want(x, routes.chosen, routes.shares, expert)
    tolerance = 8 * TOLERANCES[dtype]
    torch.testing.assert_close(_mixed(x, routes, first, last), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_tokens", [2, 150])
def test_products_of_quantized_rows_with_a_scale_each(kept: torch.dtype, num_tokens: int, device: torch.device) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(num_tokens, 72, device=device), torch.randn(NUM_EXPERTS, 40, 72, device=device)
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
    routes = choose_experts(torch.randn(num_tokens, NUM_EXPERTS, device=device), ExpertChoice(PER_TOKEN), slots)
    q, x_scales = quantize_vectors(x, kept)
    parts = [reference_layers.quantize_vectors(one.cpu(), kept) for one in weights]
    numbers, scales = (torch.stack(some).to(device) for some in zip(*parts, strict=True))
    matrices = ExpertMatrices("rows", numbers, scales)
    got = multiply_experts(q, matrices, routes, torch.float32, gathers=True, x_scales=x_scales)
    for place, pair in enumerate(routes.order.tolist()):
        token, expert = pair // PER_TOKEN, int(routes.chosen.flatten()[pair])
        given = q[token : token + 1], x_scales[token : token + 1], numbers[expert], scales[expert]
        want = reference_products.multiply_scaled(*given, torch.float32)[0]
        torch.testing.assert_close(got[place], want, atol=2e-2 if _has_short_sums(kept, device) else 1e-4, rtol=1e-4)


def _has_short_sums(kept: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU adds up float8 products with few bits."""
    return kept == torch.float8_e4m3fn and device.type == "cuda"


@pytest.mark.parametrize("num_tokens", [2, 150])
def test_products_of_float8_with_a_scale_for_each_128_columns(num_tokens: int, device: torch.device) -> None:
    torch.manual_seed(0)
    columns, outputs = 320, 40
    # Groups of very different sizes.
    sizes = torch.logspace(-2, 2, 3, device=device).repeat_interleave(128)[:columns]
    x, weights = (
        torch.randn(num_tokens, columns, device=device) * sizes,
        torch.randn(6, outputs, columns, device=device),
    )
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
    routes = choose_experts(torch.randn(num_tokens, NUM_EXPERTS, device=device), ExpertChoice(PER_TOKEN), slots)
    q, x_scales = quantize_blocks(x)
    scales = torch.rand(6, 3, outputs, device=device)
    matrices = ExpertMatrices("blocks", weights.to(torch.float8_e4m3fn), scales)
    got = multiply_experts(q, matrices, routes, torch.float32, gathers=True, x_scales=x_scales)
    values = q.float() * x_scales.repeat_interleave(128, 1)[:, :columns]
    dequantized = matrices.weight.float() * scales.transpose(1, 2).repeat_interleave(128, 2)[..., :columns]
    experts = routes.chosen.flatten()[routes.order.long()].long()
    want = torch.einsum("pc,poc->po", values[routes.order.long() // PER_TOKEN], dequantized[experts])
    torch.testing.assert_close(got, want, atol=2e-3 * float(want.abs().max()), rtol=1e-4)


def test_a_deterministic_row_does_not_depend_on_the_number_of_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    x, scores = torch.randn(300, 64, device=device), torch.randn(300, NUM_EXPERTS, device=device)
    weights = [ExpertMatrices("plain", torch.randn(6, *shape, device=device)) for shape in ((96, 64), (64, 96))]
    found = []
    for count in (1, 20, 300):
        slots = torch.arange(count, dtype=torch.int32, device=device)
        routes = choose_experts(scores[:count].contiguous(), ExpertChoice(PER_TOKEN), slots)
        found.append(_mixed(x[:count].contiguous(), routes, weights[0], weights[1], deterministic=True)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
