"""The GPU runner against a decoder in float64, with nothing but torch, triton and numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from bench_gpu import model_checks
from bench_gpu.models import Model, Options, make_model, spec_of
from bench_gpu.plans import decode_plan, plan_of, random_tables
from bench_gpu.reference import reference_logits
from bench_gpu.sdpa import SdpaAttention
from bench_gpu.verdict import WrongResultError

from penstock.gpu_node.model.architecture.spec import MATRICES, MatrixName, ModelSpec
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.linear import PlainLinear
from penstock.gpu_node.model.lora.low_rank import LowRank

TINY = replace(spec_of("tiny"), vocab_size=101)
NAMES = TINY.names
SPECS: dict[str, ModelSpec] = {
    "llama": TINY,
    "norms of heads, window, tied head": replace(
        TINY, names=replace(NAMES, q_norm="q", k_norm="k"), windows=(5, None), tied_head=True
    ),
    "caps, factors, norms on both sides, positions by layer": replace(
        TINY,
        names=replace(NAMES, post_attention_norm="a", post_mlp_norm="m"),
        norm_offset=1.0,
        layer_ropes=(TINY.rope, None),
        windows=(None, 5),
        score_scale=0.2,
        score_cap=2.0,
        logit_scale=0.5,
        logit_cap=3.0,
        embedding_scale=3.0,
        residual_scale=0.4,
    ),
    "norms of all heads, none before attention": replace(
        TINY,
        names=replace(
            NAMES,
            attention_norm=None,
            mlp_norm=None,
            q_norm="q",
            k_norm="k",
            post_attention_norm="a",
            post_mlp_norm="m",
        ),
        joint_head_norms=True,
    ),
    "biases of positions, parallel, one key head": replace(
        TINY,
        names=replace(NAMES, mlp_norm=None, mlp_in=("up",)),
        rope=None,
        norm="layer",
        activation="gelu",
        parallel_residual=True,
        num_kv_heads=1,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
}


@pytest.fixture(scope="module")
def device() -> Device:
    """The GPU, or the CPU for the interpreter."""
    return Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _model(device: Device, spec: ModelSpec = TINY, **options: Any) -> Model:
    torch.manual_seed(0)
    usual: dict[str, Any] = {"dtype": torch.float32, "max_num_seqs": 4, "max_model_len": 96, "num_blocks": 40}
    return make_model("tiny", spec, device, Options(**usual | options))


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


@pytest.mark.parametrize("name", ["llama", "caps, factors, norms on both sides, positions by layer"])
def test_a_graph_and_its_step_without_one_give_the_same_bits(name: str, device: Device) -> None:
    rows = model_checks.check_graphs(_model(device, SPECS[name]), 20)
    assert {str(row["check"]).split(",")[0] for row in rows} == {f"tiny graph of {size}" for size in (1, 2, 4)}


def test_two_steps_in_flight_say_what_single_ones_say(device: Device) -> None:
    assert model_checks.check_in_flight(_model(device), 3, 20, num_steps=3)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_deterministic_row_is_the_same_alone_and_in_a_batch(quantization: str, device: Device) -> None:
    assert model_checks.check_company(_model(device, deterministic=True, quantization=quantization), 20)


def test_a_second_attention_backend_computes_the_same(device: Device) -> None:
    for spec in SPECS.values():
        model = _model(device, spec, kv_dtype=torch.int8)
        tables, ids = random_tables(model, 2, 24), np.arange(20, dtype=np.int32)
        assert tables is not None
        plan = plan_of([ids[:1], ids], np.array([0, 0]), tables, np.zeros(0, np.int64))
        got = model.runner.logits(plan)
        model.runner._decoder = GpuDecoder(spec, model.weights, model.max_model_len, SdpaAttention())
        np.testing.assert_allclose(got, model.runner.logits(plan), rtol=0, atol=1e-4)


def test_logits_of_the_heads_padding_are_never_chosen(device: Device) -> None:
    """101 tokens: the head has 27 more rows, here with logits above all others."""
    model = _model(device)
    head: Any = model.weights.head
    assert head.weight.shape == (128, 64)
    head.weight[101:] = 100 * head.weight[:27]
    tables = random_tables(model, 4, 8)
    assert tables is not None
    for temperature in (0.0, 30.0):
        for ids in np.arange(8, dtype=np.int32).reshape(2, 4):
            tokens = model.runner.submit(decode_plan(ids, 1, tables, temperature=temperature)).result().tokens
            assert ((tokens >= 0) & (tokens < 101)).all()


@dataclass
class Adapter:
    """Random low-rank terms of every matrix; of qkv only queries and values have one."""

    spec: ModelSpec
    rank: int = 3
    digest: str = ""

    def low_ranks(self, layer: int, matrix: MatrixName) -> tuple[LowRank, ...]:
        rng = np.random.default_rng([layer, len(matrix)])
        columns, parts = self.spec.columns_of(matrix), list(enumerate(self.spec.parts_of(matrix)))
        return tuple(
            LowRank(
                part,
                rng.standard_normal((self.rank, columns), np.float32) / columns**0.5,
                rng.standard_normal((rows, self.rank), np.float32),
            )
            for part, (_, rows) in parts[:: 2 if matrix == "qkv" else 1]
        )

    def added(self, layer: int, matrix: MatrixName) -> torch.Tensor:
        """What the terms add to the matrix."""
        parts = self.spec.parts_of(matrix)
        by_part = {term.part: term.up @ term.down for term in self.low_ranks(layer, matrix)}
        zeros = [np.zeros((rows, self.spec.columns_of(matrix)), np.float32) for _, rows in parts]
        return torch.from_numpy(np.concatenate([by_part.get(i, zeros[i]) for i in range(len(parts))]))


def test_an_adapter_replaced_while_steps_are_in_flight_adds_its_terms(device: Device) -> None:
    model, adapter = _model(device, num_adapters=2), Adapter(TINY)
    ids = np.arange(7, dtype=np.int32)
    tables = random_tables(model, 2, 8)
    assert tables is not None
    model.runner.set_adapter(1, Adapter(TINY, rank=2))
    step = model.runner.submit(plan_of([ids], np.array([0]), tables[:1], np.array([0]), adapters=np.array([1])))
    model.runner.set_adapter(1, adapter)
    step.result()
    plan = plan_of([ids, ids], np.array([0, 0]), tables, np.zeros(0, np.int64), adapters=np.array([1, -1]))
    merged = []
    for at, layer in enumerate(model.weights.layers):
        changed: dict[str, Any] = {
            name: PlainLinear(getattr(layer, name).weight + adapter.added(at, name).to(device.torch), None)
            for name in MATRICES
        }
        merged.append(replace(layer, **changed))
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device.torch)
    want = [reference_logits(TINY, w, tokens) for w in (replace(model.weights, layers=merged), model.weights)]
    np.testing.assert_allclose(model.runner.logits(plan), torch.cat(want).cpu(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("fp8", 0.1), ("int4", 0.2)])
def test_short_weights_err_a_little(quantization: str, most: float, device: Device) -> None:
    logits = []
    for name in ("none", quantization):
        model = _model(device, quantization=name)
        tables = random_tables(model, 1, 24)
        assert tables is not None
        plan = plan_of([np.arange(20, dtype=np.int32)], np.array([0]), tables, np.zeros(0, np.int64))
        logits.append(model.runner.logits(plan))
    error = logits[1] - logits[0]
    assert 0 < np.sqrt(np.square(error).mean() / logits[0].var()) < most
