"""Triton's small kernels against the references, on sizes that fill no block."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from fakes.paged import empty_cache

from penstock.kernels.reference import layers as reference
from penstock.kernels.triton import layers
from penstock.kernels.triton.products import quantise_vectors

from .conftest import TOLERANCES

BOTH = (reference, layers)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", ["rms", "layer", "layer with bias"])
def test_norms_add_and_scale(name: str, added: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    weight, bias = (_random(77, dtype=dtype, device=device) for _ in range(2))
    residual, delta = 3 + torch.randn(5, 77, device=device), _random(5, 77, dtype=dtype, device=device)
    kept, normed = [], []
    for module in BOTH:
        mine, more = residual.clone(), delta if added else None
        if name == "rms":
            normed.append(module.add_rms_norm(mine, more, weight, 1e-5))
        else:
            normed.append(module.add_layer_norm(mine, more, weight, bias if "bias" in name else None, 1e-5))
        kept.append(mine)
    assert normed[1].dtype == dtype
    torch.testing.assert_close(kept[1], kept[0])
    torch.testing.assert_close(normed[1], normed[0], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("inter", [1, 1100])
def test_activations(inter: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = 3 * _random(3, 2 * inter, dtype=dtype, device=device)
    for name, activation in product(("gate_mul", "activate"), layers.ACTIVATIONS):
        want, got = (getattr(module, name)(x, activation) for module in BOTH)
        torch.testing.assert_close(got, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_norms_and_activations_quantise_as_the_kernel_that_does_only_that(
    kept: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    weight, bias = (_random(77, dtype=dtype, device=device) for _ in range(2))
    residual, delta = torch.randn(5, 77, device=device), _random(5, 77, dtype=dtype, device=device)
    gate_up = 3 * _random(3, 2200, dtype=dtype, device=device)
    gate_up[0] = 0
    plain = [
        layers.add_layer_norm(residual.clone(), delta, weight, None, 1e-5, centred=False),
        layers.add_layer_norm(residual.clone(), None, weight, bias, 1e-5),
        layers.gate_mul(gate_up, "silu"),
        layers.activate(gate_up, "gelu"),
    ]
    fused = [
        layers.add_norm_quantised(residual.clone(), delta, weight, None, 1e-5, kept, centred=False),
        layers.add_norm_quantised(residual.clone(), None, weight, bias, 1e-5, kept, centred=True),
        layers.activate_quantised(gate_up, "silu", kept, gated=True),
        layers.activate_quantised(gate_up, "gelu", kept, gated=False),
    ]
    for want, got in zip((quantise_vectors(x, kept) for x in plain), fused, strict=True):
        assert torch.equal(got.q.float(), want.q.float())
        assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("kept", ["plain", torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"group": 3, "kv_heads": 2, "head_dim": 24, "rotary": 24, "normed": True},
        {"group": 1, "kv_heads": 1, "head_dim": 16, "rotary": 8, "normed": False},
        {"group": 2, "kv_heads": 3, "head_dim": 8, "rotary": 0, "normed": False},
    ],
    ids=["all turned", "half turned", "none turned"],
)
def test_queries_turn_and_keys_and_values_are_kept(
    shape: dict[str, Any], kept: Any, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    group, kv_heads, head_dim = shape["group"], shape["kv_heads"], shape["head_dim"]
    qkv = _random(5, (group + 2) * kv_heads * head_dim, dtype=dtype, device=device)
    angles = torch.randn(9, shape["rotary"] // 2, device=device)
    norms = {name: _random(head_dim, dtype=dtype, device=device) for name in ("q_norm", "k_norm") if shape["normed"]}
    positions, slots = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 8, 3, 7, 1], [9, 31, -1, 0, 16])
    )
    queries, caches = [], []
    for module in BOTH:
        cache = empty_cache(4, 8, kv_heads, head_dim, dtype if kept == "plain" else kept, device)
        given = qkv, cache, positions, slots, angles.cos(), angles.sin()
        queries.append(module.rotate_and_store(*given, **norms, eps=1e-6))
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
