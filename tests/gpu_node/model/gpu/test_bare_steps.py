"""The GPU runner's steps: graphs, steps in flight, padding and adapters, with nothing but torch, triton and numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from bench_gpu import model_checks
from bench_gpu.plans import decode_plan, plan_of, random_tables
from bench_gpu.reference import reference_logits
from fixtures.tiny_runners import SPECS, TINY, tiny_runner

from penstock.gpu_node.model.architecture.spec import MATRICES, ModelSpec
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.linear import PlainLinear
from penstock.gpu_node.model.protocol import LowRank, MatrixName


@pytest.mark.parametrize("name", ["llama", "caps, factors, norms on both sides, positions by layer"])
def test_a_graph_and_its_step_without_one_give_the_same_bits(name: str, device: Device) -> None:
    rows = model_checks.check_graphs(tiny_runner(device, SPECS[name]), 20)
    assert {str(row["check"]).split(",")[0] for row in rows} == {f"tiny graph of {size}" for size in (1, 2, 4)}


def test_two_steps_in_flight_sample_the_tokens_of_single_steps(device: Device) -> None:
    assert model_checks.check_in_flight(tiny_runner(device), 3, 20, num_steps=3)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_deterministic_row_is_the_same_alone_and_in_a_batch(quantization: str, device: Device) -> None:
    assert model_checks.check_company(tiny_runner(device, deterministic=True, quantization=quantization), 20)


def test_logits_of_the_heads_padding_are_never_chosen(device: Device) -> None:
    """101 tokens: the head has 27 more rows, here with logits above all others."""
    model = tiny_runner(device)
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
    name: str = "random"

    def low_ranks(self, layer: int, matrix: MatrixName) -> tuple[LowRank, ...]:
        rng = np.random.default_rng([layer, len(matrix)])
        kind = self.spec.layers[layer]
        columns, parts = self.spec.columns_of(kind, matrix), list(enumerate(self.spec.parts_of(kind, matrix)))
        return tuple(
            LowRank(
                part,
                rng.standard_normal((self.rank, columns), np.float32) / columns**0.5,
                rng.standard_normal((rows, self.rank), np.float32),
            )
            for part, (_, rows) in parts[:: 2 if matrix == "qkv" else 1]
        )

    def added(self, layer: int, matrix: MatrixName) -> torch.Tensor:
        """Return the sum that the terms add to the matrix."""
        kind = self.spec.layers[layer]
        parts = self.spec.parts_of(kind, matrix)
        by_part = {term.part: term.up @ term.down for term in self.low_ranks(layer, matrix)}
        zeros = [np.zeros((rows, self.spec.columns_of(kind, matrix)), np.float32) for _, rows in parts]
        return torch.from_numpy(np.concatenate([by_part.get(i, zeros[i]) for i in range(len(parts))]))


def test_an_adapter_replaced_while_steps_are_in_flight_adds_its_terms(device: Device) -> None:
    model, adapter = tiny_runner(device, num_adapters=2), Adapter(TINY)
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
