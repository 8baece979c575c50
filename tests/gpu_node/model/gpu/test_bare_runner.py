"""The GPU runner's logits against a decoder in float64, with nothing but torch, triton and numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bench_gpu import model_checks
from bench_gpu.plans import plan_of, random_tables
from bench_gpu.reference import reference_logits
from bench_gpu.sdpa import SdpaAttention
from bench_gpu.verdict import WrongResultError
from fixtures.tiny_runners import SPECS, TINY, tiny_runner

from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.linear import PlainLinear


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in SPECS), ("llama", torch.bfloat16)], ids=str
)
def test_logits_are_those_in_float64(name: str, dtype: torch.dtype, device: Device) -> None:
    torch.manual_seed(0)
    (row,) = model_checks.check_logits(name, SPECS[name], device, dtype, 21)
    assert float(row["rms"]) > 0, "two roundings are never all alike"


def test_a_wrong_weight_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: here the runner's first layer gets another output matrix than the reference's."""
    real = reference_logits

    def of_other_weights(spec: ModelSpec, weights: Any, token_ids: torch.Tensor) -> torch.Tensor:
        first, *others = weights.layers
        other = replace(first, out=PlainLinear(1.01 * first.out.weight, None))
        return real(spec, replace(weights, layers=(other, *others)), token_ids)

    monkeypatch.setattr(model_checks, "reference_logits", of_other_weights)
    with pytest.raises(WrongResultError, match="llama"):
        model_checks.check_logits("llama", TINY, device, torch.float32, 21)


def test_a_second_attention_backend_computes_the_same(device: Device) -> None:
    for spec in SPECS.values():
        model = tiny_runner(device, spec, kv_dtype=torch.int8)
        tables, ids = random_tables(model, 2, 24), np.arange(20, dtype=np.int32)
        assert tables is not None
        plan = plan_of([ids[:1], ids], np.array([0, 0]), tables, np.zeros(0, np.int64))
        got = model.runner.logits(plan)
        model.runner._decoder = GpuDecoder(spec, model.weights, model.max_model_len, SdpaAttention())
        np.testing.assert_allclose(got, model.runner.logits(plan), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("fp8", 0.1), ("int4", 0.2)])
def test_errors_of_quantized_weights_are_small(quantization: str, most: float, device: Device) -> None:
    logits = []
    for name in ("none", quantization):
        model = tiny_runner(device, quantization=name)
        tables = random_tables(model, 1, 24)
        assert tables is not None
        plan = plan_of([np.arange(20, dtype=np.int32)], np.array([0]), tables, np.zeros(0, np.int64))
        logits.append(model.runner.logits(plan))
    error = logits[1] - logits[0]
    assert 0 < np.sqrt(np.square(error).mean() / logits[0].var()) < most
