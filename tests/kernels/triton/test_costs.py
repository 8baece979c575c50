"""The formulas of `costs` equal what kernels load, and quantized matrices are fewer bytes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from bench_gpu import costs
from bench_gpu.costs import Cost, Heads
from fakes.paged import make_scene
from fixtures.sampling import rows_of

from penstock.gpu_node.model.gpu.linear import KeptLinear, linear_of
from penstock.gpu_node.model.torch_common.layers import Norm
from penstock.kernels.arguments import Addend, StateRows
from penstock.kernels.triton import layers, recurrent
from penstock.kernels.triton.norms import add_norm
from penstock.kernels.triton.sampler import Marks, pack_rules, sample
from penstock.kernels.triton.sampling_passes import COLUMNS

from .conftest import HAS_CARD
from .counted import counted_loads
from .mixed_attention import paged_attention

pytestmark = pytest.mark.skipif(HAS_CARD, reason="the interpreter counts loads")


def _tensors(matrix: KeptLinear) -> list[torch.Tensor]:
    parts = (getattr(matrix, field.name) for field in fields(matrix))
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.51), ("fp8", 0.51), ("int4", 0.32)])
def test_one_row_reads_each_byte_of_a_quantized_matrix_once_and_fewer_than_bfloat16_has(
    quantization: str, most: float
) -> None:
    outputs, columns = 192, 512
    matrix = linear_of(quantization)(torch.randn(outputs, columns).bfloat16(), None)
    x = torch.randn(1, columns).bfloat16()
    with counted_loads() as counter:
        matrix(x)
    read, kept = counter.bytes_of(*_tensors(matrix)), sum(tensor.nbytes for tensor in _tensors(matrix))
    assert read == kept
    plain, cost = (costs.linear(1, outputs, columns, name) for name in ("none", quantization))
    given = columns + 4 if quantization != "int4" else x.nbytes
    assert cost.bytes_read == read + given
    assert cost.num_bytes < most * plain.num_bytes


@pytest.mark.parametrize(
    ("rule", "passes"),
    [
        ({"temperature": 0.0}, 1),
        ({}, 1),
        ({"min_p": 0.1}, 2),
        ({"top_k": 5}, 3),
        ({"top_p": 0.9}, 3),
        ({"top_k": 50, "top_p": 0.9, "min_p": 0.01}, 3),
    ],
    ids=str,
)
def test_sampling_reads_the_logits_at_most_three_times(rule: dict[str, Any], passes: int) -> None:
    vocab = 3 * COLUMNS + 100
    logits = torch.randn(2, vocab)
    rules = torch.from_numpy(pack_rules(rows_of(2, **rule), np.full(2, -1, np.int32)))
    with counted_loads() as counter:
        sample(logits, rules, Marks.empty(0, vocab, logits.device))
    again = 0 if rule.get("temperature") == 0.0 else 2 * COLUMNS * 4
    assert counter.bytes_of(logits) <= 2 * vocab * 4 * passes + again
    assert counter.bytes_of(logits) > 2 * vocab * 4 * passes - 1
    assert costs.sample(2, vocab, itemsize=4, passes=passes).bytes_read >= counter.bytes_of(logits)


def test_attention_reads_keys_and_values_as_often_as_its_formula_says() -> None:
    heads = Heads(4, 2, 16, itemsize=4, kv_itemsize=4)
    for counts, contexts in (([1, 1], [64, 192]), ([128], [192])):
        scene = make_scene(
            *(counts, contexts),
            block_size=16,
            num_heads=2,
            head_dim=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        q = torch.randn(sum(counts), 4, 16)
        with counted_loads() as counter:
            paged_attention(q, scene.cache, *scene.tables)
        if counts[0] == 1:
            cost = costs.decode_attention(contexts, heads)
        else:
            cost = costs.prefill_attention(counts, contexts, heads, rows=64)
        assert counter.bytes_of(scene.cache.k) * 2 == cost.bytes_read - q.nbytes
        assert cost.bytes_written == q.nbytes


def test_norms_and_activations_read_their_inputs_once() -> None:
    residual, delta, weight = torch.randn(3, 64), torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    with counted_loads() as counter:
        add_norm(residual, Addend(delta), Norm(weight, None, 1e-5))
    cost = costs.add_norm(3, 64)
    # Each row reads the weight, which caches serve from the second row on.
    assert counter.bytes_of(residual, delta) + weight.nbytes == cost.bytes_read
    assert cost.bytes_written == residual.nbytes + delta.nbytes
    gate_up = torch.randn(3, 200).bfloat16()
    with counted_loads() as counter:
        layers.gate_mul(gate_up, "silu")
    assert counter.bytes_of(gate_up) == costs.activation(3, 100).bytes_read == gate_up.nbytes


def test_states_are_read_once_for_all_tokens_of_a_step() -> None:
    heads, dim = torch.randn(4), 16
    starts, seqs = torch.tensor([0, 5, 6], dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    owners, saves = torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32)
    rows, states = StateRows(owners, starts, seqs, seqs, starts * 0, saves), torch.randn(2, 4, dim, dim)
    mixed, gates = torch.randn(6, 2 * 2 * dim + 4 * dim), torch.randn(6, 8)
    with counted_loads() as counter:
        recurrent.delta_rule(mixed, gates, -heads.exp(), heads, states, rows, num_key_heads=2, tiled=False)
    cost = costs.delta_rule(6, 2, key_heads=2, heads=4, key_dim=dim, value_dim=dim)
    assert counter.bytes_of(states) == states.nbytes == cost.bytes_read - mixed.nbytes - gates.nbytes
    assert cost.bytes_written == states.nbytes + 6 * 4 * dim * 4
    mixed, durations = torch.randn(6, 4 * dim + 2 * dim), torch.randn(6, 4)
    with counted_loads() as counter:
        recurrent.scan(mixed, durations, heads, -heads.exp(), heads, states, rows, num_groups=1)
    cost = costs.scan(6, 2, groups=1, heads=4, head_dim=dim, state_size=dim)
    assert counter.bytes_of(states) == states.nbytes == cost.bytes_read - mixed.nbytes - durations.nbytes


def test_a_quantizing_norm_saves_a_write_and_a_read() -> None:
    apart = costs.total([costs.add_norm(8, 4096), costs.quantize(8, 4096)])
    fused = costs.add_norm(8, 4096, quantized=True)
    assert apart.num_bytes - fused.num_bytes == 2 * 8 * 4096 * 2


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    cost = costs.total([Cost(3 * 10**9, 10**9, 10**12), Cost(0, 0, 10**12)])
    assert cost == Cost(3 * 10**9, 10**9, 2 * 10**12)
    assert cost.floor_ms(gb_s=4000, tflop_s=1000) == pytest.approx(2.0)
    assert cost.floor_ms(gb_s=1000, tflop_s=1000) == pytest.approx(4.0)
