"""Triton's small kernels against the references, on sizes that fill no block."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from fakes.paged import empty_cache

from penstock.gpu_node.model.torch_common.layers import NoNorm, Norm
from penstock.kernels.arguments import Addend
from penstock.kernels.reference import layers as reference
from penstock.kernels.triton import layers, norms
from penstock.kernels.triton.products import quantize_vectors

from .conftest import TOLERANCES

BOTH = (reference, layers)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def test_tokens_of_the_step_before_are_embedded_beside_given_ones(dtype: torch.dtype, device: torch.device) -> None:
    """An id of -1 - i means the sample of row i, and a failed row's -1 means token 0."""
    torch.manual_seed(0)
    ids = torch.tensor([7, -1, 0, -3, -2, 10], dtype=torch.int32, device=device)
    sampled = torch.tensor([4, -1, 9], dtype=torch.int32, device=device)
    table = _random(11, 1100, dtype=dtype, device=device)
    want = reference.embed(ids, sampled, table, 3.5)
    assert torch.equal(want[[1, 3, 4]], table[[4, 9, 0]].float() * 3.5)
    assert torch.equal(layers.embed(ids, sampled, table, 3.5), want)


NORMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "alone": (False, {}),
    "added": (True, {}),
    "added after its norm": (True, {"norm": 1.0, "scale": 0.3}),
}
"""Whether a delta is added; the offset of its own norm, and its factor."""


@pytest.mark.parametrize("added", NORMS)
@pytest.mark.parametrize("name", ["rms", "rms with offset", "layer", "none"])
def test_norms_add_and_scale(name: str, added: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    weight, bias = (_random(77, dtype=dtype, device=device) for _ in range(2))
    norm = Norm(weight, bias if name == "layer" else None, 1e-5, offset=float("offset" in name))
    residual, rows = 3 + torch.randn(5, 77, device=device), _random(5, 77, dtype=dtype, device=device)
    is_added, rule = NORMS[added]
    before = Norm(bias, None, 1e-6, rule["norm"]) if "norm" in rule else None
    delta = Addend(rows, before, rule.get("scale", 1.0)) if is_added else None
    kept, normed = [], []
    for add_norm in (reference.add_norm, norms.add_norm):
        kept.append(residual.clone())
        normed.append(add_norm(kept[-1], delta, NoNorm(dtype, device) if name == "none" else norm))
    assert normed[1].dtype == dtype
    torch.testing.assert_close(kept[1], kept[0])
    torch.testing.assert_close(normed[1], normed[0], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_all_heads_of_a_token_are_normed_as_one(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    q_norm, k_norm = (Norm(_random(size, dtype=dtype, device=device), None, 1e-5, 1.0) for size in (48, 24))
    given = _random(3, 96, dtype=dtype, device=device)
    want, got = given.clone(), given.clone()
    reference.norm_all_heads(want, q_norm, k_norm)
    norms.norm_all_heads(got, q_norm, k_norm)
    assert torch.equal(got[:, 72:], given[:, 72:])
    torch.testing.assert_close(got, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(("scale", "cap"), [(0.5, None), (2.0, 3.0)])
def test_logits_are_scaled_and_capped(
    scale: float, cap: float | None, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    want = 5 * _random(3, 700, dtype=dtype, device=device)
    want[0, :4] = torch.tensor([60.0, -60.0, 3e4, -3e4])
    got = want.clone()
    reference.bound_logits(want, scale, cap)
    layers.bound_logits(got, scale, cap)
    torch.testing.assert_close(got, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("inter", [1, 1100])
def test_activations(inter: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = 3 * _random(3, 2 * inter, dtype=dtype, device=device)
    for name, activation in product(("gate_mul", "activate"), layers.ACTIVATIONS):
        want, got = (getattr(module, name)(x, activation) for module in BOTH)
        torch.testing.assert_close(got, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    # A limit that clamps many of the numbers.
    want, got = (module.gate_mul(x, "silu", (2.0, 1.7)) for module in BOTH)
    torch.testing.assert_close(got, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_norms_and_activations_quantize_as_the_kernel_that_does_only_that(
    kept: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    weight, bias = (_random(77, dtype=dtype, device=device) for _ in range(2))
    rms = Norm(weight, None, 1e-5)
    residual, delta = torch.randn(5, 77, device=device), Addend(_random(5, 77, dtype=dtype, device=device), rms)
    gate_up = 3 * _random(3, 2200, dtype=dtype, device=device)
    gate_up[0] = 0
    plain = [
        norms.add_norm(residual.clone(), delta, rms),
        norms.add_norm(residual.clone(), None, Norm(weight, bias, 1e-5)),
        norms.add_norm(residual.clone(), delta, NoNorm(dtype, device)),
        layers.gate_mul(gate_up, "silu"),
        layers.gate_mul(gate_up, "silu", (2.0, 1.7)),
        layers.activate(gate_up, "gelu"),
    ]
    fused = [
        norms.add_norm_quantized(residual.clone(), delta, rms, kept),
        norms.add_norm_quantized(residual.clone(), None, Norm(weight, bias, 1e-5), kept),
        norms.add_norm_quantized(residual.clone(), delta, NoNorm(dtype, device), kept),
        layers.activate_quantized(gate_up, "silu", kept, gated=True),
        layers.activate_quantized(gate_up, "silu", kept, gated=True, clamp=(2.0, 1.7)),
        layers.activate_quantized(gate_up, "gelu", kept, gated=False),
    ]
    for want, got in zip((quantize_vectors(x, kept) for x in plain), fused, strict=True):
        assert torch.equal(got.q.float(), want.q.float())
        assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("kept", ["plain", torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"group": 3, "kv_heads": 2, "head_dim": 24, "rotary": 24, "normed": True, "offset": 1.0},
        {"group": 1, "kv_heads": 1, "head_dim": 16, "rotary": 8, "normed": False, "value_norm": True},
        {"group": 2, "kv_heads": 3, "head_dim": 8, "rotary": 0, "normed": False},
    ],
    ids=["all turned", "half turned and values normed", "none turned"],
)
def test_queries_and_keys_are_rotated_and_keys_and_values_stored(
    shape: dict[str, Any], kept: Any, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    group, kv_heads, head_dim = shape["group"], shape["kv_heads"], shape["head_dim"]
    qkv = _random(5, (group + 2) * kv_heads * head_dim, dtype=dtype, device=device)
    # Its scale is 0.
    qkv[1] = 0
    angles = torch.randn(9, shape["rotary"] // 2, device=device)
    head_norms = {
        name: _random(head_dim, dtype=dtype, device=device) for name in ("q_norm", "k_norm") if shape["normed"]
    }
    positions, slots = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 8, 3, 7, 1], [9, 31, -1, 0, 16])
    )
    queries, caches = [], []
    for module in BOTH:
        cache = empty_cache(4, 8, kv_heads, head_dim, dtype if kept == "plain" else kept, device)
        given = qkv, cache, positions, slots, angles.cos(), angles.sin()
        rules = {"eps": 1e-6, "offset": shape.get("offset", 0.0), "value_norm": shape.get("value_norm", False)}
        queries.append(module.rotate_and_store(*given, **head_norms, **rules))
        caches.append(cache)
    tolerances = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype], "equal_nan": True}
    torch.testing.assert_close(queries[1], queries[0], **tolerances)
    for name in ("k", "v"):
        want, got = (_contents(cache, name) for cache in caches)
        assert (want.isnan() == got.isnan()).all()
        excess = (want - got).abs() - TOLERANCES[dtype] * (1 + want.abs()) - 1.01 * _step(want, kept)
        assert (excess <= 0)[~want.isnan()].all()


def _step(x: torch.Tensor, kept: Any) -> torch.Tensor | float:
    """The distance between two numbers that x's vectors are quantized to: rounding may differ by one."""
    most = x.abs().amax(-1, keepdim=True)
    if kept == torch.int8:
        return most / 127
    # Three bits behind the leading one, and 2^-9 of the unit below the smallest normal number.
    return x.abs() / 8 + most / 448 / 512 if kept == torch.float8_e4m3fn else 0.0


def _contents(cache: Any, name: str) -> torch.Tensor:
    values, scales = getattr(cache, name).float(), getattr(cache, f"{name}_scales")
    return values if scales is None else values * scales.unsqueeze(-1)
