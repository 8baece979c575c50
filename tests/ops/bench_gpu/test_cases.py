"""The checks and measurements of the GPU benchmark, and their order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_gpu import kernels, truth
from bench_gpu.measure import Clock
from bench_gpu.models import Options, make_model, spec_of
from bench_gpu.shapes import DRY
from bench_gpu.verdict import WrongResultError, judge, stored_bound

from penstock.gpu_node.model.gpu import linear
from penstock.gpu_node.model.gpu.device import Device
from penstock.kernels.reference import products as reference
from penstock.kernels.reference.layers import quantize_vectors
from penstock.kernels.triton import products
from penstock.kernels.triton.products import QuantizedRows

CPU = torch.device("cpu")


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_models_head_counts_with_the_bytes_that_it_is_stored_in(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "quantize_vectors", quantize_vectors)
    model = make_model("tiny", spec_of("tiny"), Device(CPU), Options(num_blocks=8, quantization=quantization))
    head: Any = model.weights.head
    assert model.head_num_bytes == head.weight[: model.spec.vocab_size].nbytes


def test_a_sweep_begins_with_the_tiles_that_hopper_uses() -> None:
    rows = list(kernels.sweep(DRY, Clock(CPU, -1.0), dry=True))
    assert [row["rows"] for row in rows] == [128, 0, 64]


def _reference_library(*given: Any) -> torch.Tensor:
    """The library's product with row scales, which not every torch has on the CPU."""
    return reference.multiply_scaled(*given)


def test_the_librarys_float8_products_are_checked_and_measured_apart_from_quantizing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_gpu(q: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
        return q.dtype == torch.float8_e4m3fn and len(q) > products.FEW_ROWS

    quantized: list[int] = []

    def quantize(x: torch.Tensor, kept: torch.dtype) -> Any:
        quantized.append(len(x))
        return QuantizedRows(*quantize_vectors(x, kept))

    monkeypatch.setattr(products, "quantize_vectors", quantize)
    monkeypatch.setattr(products, "library_multiplies", on_gpu)
    monkeypatch.setattr(products, "multiply_by_library", _reference_library)
    with truth.poisoned():
        checked = [str(row["check"]) for row in truth._scaled_products(DRY, CPU, torch.float8_e4m3fn)]
    assert sum(name.startswith("multiply_by_library") for name in checked) == 2, "of 17 rows and of 18"
    found = {case.name: case for case in kernels._product_cases(DRY, 20, CPU, has_float8=True)}
    quantized.clear()
    for name in ("multiply_by_library fp8 20 rows", "multiply_scaled fp8 20 rows", "multiply_scaled int8 20 rows"):
        work = found[name].make()
        assert quantized == [20, DRY.hidden]
        work()
        assert quantized == [20, DRY.hidden], "the measured call only multiplies"
        quantized.clear()
    assert "multiply_by_library fp8 20 rows" not in {
        case.name for case in kernels._product_cases(DRY, 16, CPU, has_float8=True)
    }


@pytest.mark.parametrize("spread", ["even", "one large number"])
def test_the_bound_of_int8_follows_the_vectors(spread: str) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        want = torch.randn(16, 512)
        if spread != "even":
            want[:, 7] *= 20
        q, scales = quantize_vectors(want, torch.int8)
        got = q.float() * scales.unsqueeze(-1)
        bound = stored_bound(torch.int8, want)
        judge("right", got, want, bound)
        with pytest.raises(WrongResultError):
            judge("steps half as fine", (got / scales[:, None] / 2).round() * 2 * scales[:, None], want, bound)


def test_layers_in_host_memory_give_the_same_logits() -> None:
    """The benchmark compares graphs of such a runner with its eager steps."""
    whole = spec_of("tiny")
    spec = replace(whole, layers=whole.layers[:1] * 4)
    weights = []
    for count in (0, 3):
        torch.manual_seed(0)
        model = make_model("tiny", spec, Device(CPU), Options(num_blocks=8, num_offloaded=count))
        weights.append([layer.qkv(torch.ones(1, 64, dtype=torch.bfloat16)) for layer in model.weights.layers])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
