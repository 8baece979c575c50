"""Layers that differ from each other: the native runner and the torch runner compute the same of every kind.

No family has all of these kinds at once, so the spec is made here, with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fakes.native import built
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, logits_alone, logits_of_step

from penstock.gpu_node.model.architecture.mlp import ClampedGate, Experts, Mlp, SharedExperts
from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.architecture.recurrent import DeltaRule, ShortConvolution
from penstock.gpu_node.model.architecture.rope import Rope
from penstock.gpu_node.model.architecture.spec import Attention, LayerSpec, ModelSpec
from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.native import load as native_load
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import LowRank, MatrixName
from penstock.gpu_node.model.torch_cpu.load import load_torch
from penstock.kernels.cpu.probe import Isa

HIDDEN, VOCAB, LENGTH = 64, 131, 90
TOKEN_IDS = [(37 * i) % VOCAB for i in range(LENGTH)]


def _attention(num_heads: int, num_kv_heads: int, head_dim: int, **changes: Any) -> Attention:
    fields: dict[str, Any] = {"rope": Rope(10_000.0, head_dim), "qkv": ("{layer}.q", "{layer}.k", "{layer}.v")}
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "out": "{layer}.o"}
    return Attention(**sizes | fields | changes)


def _mlp(size: int, **changes: Any) -> Mlp:
    fields: dict[str, Any] = {"mlp_in": ("{layer}.gate", "{layer}.up"), "mlp_out": "{layer}.down"}
    return Mlp(**{"intermediate_size": size} | fields | changes)


def _layer(attention: Attention | None, mlp: Mlp | None, **changes: Any) -> LayerSpec:
    norms = {
        "attention_norm": None if attention is None else "{layer}.norm",
        "mlp_norm": None if mlp is None else "{layer}.mlp_norm",
    }
    return LayerSpec(attention=attention, mlp=mlp, **norms | changes)


WIDE = _layer(_attention(4, 2, 48), _mlp(176))
WINDOWED = _layer(_attention(3, 1, 16, window=7, rope=Rope(500.0, 8), score_cap=4.0), _mlp(40, mlp_in=("{layer}.up",)))
ONLY_ATTENTION = _layer(_attention(5, 5, 16, rope=None, score_scale=0.5), None)
ONLY_MLP = _layer(None, _mlp(24, activation="gelu"))
PARALLEL = _layer(_attention(2, 1, 32), _mlp(96), parallel_residual=True, mlp_norm=None)
NORMED = _layer(_attention(2, 2, 16), _mlp(48), post_attention_norm="{layer}.a", post_mlp_norm="{layer}.m")
EXPERTS = _layer(
    _attention(2, 2, 16),
    _mlp(
        48,
        experts=Experts(5, 2, normalized=True, router="{layer}.router"),
        mlp_in=("{layer}.{expert}.gate", "{layer}.{expert}.up"),
        mlp_out="{layer}.{expert}.down",
    ),
)
MORE_EXPERTS = _layer(
    None,
    _mlp(
        80,
        experts=Experts(7, 3, normalized=False, router="{layer}.router"),
        mlp_in=("{layer}.{expert}.gate", "{layer}.{expert}.up"),
        mlp_out="{layer}.{expert}.down",
    ),
)
DELTA = replace(
    ONLY_MLP,
    attention_norm="{layer}.norm",
    recurrence=DeltaRule(
        num_key_heads=2,
        num_value_heads=4,
        key_dim=16,
        value_dim=32,
        taps=3,
        norm_eps=1e-5,
        inputs=("{layer}.inputs", "{layer}.gates"),
        learning_gate="{layer}.b",
        decay_gate="{layer}.a",
        convolution="{layer}.convolution",
        decay_log="{layer}.log",
        decay_bias="{layer}.bias",
        norm="{layer}.value_norm",
        out="{layer}.out",
    ),
)
SHORT = LayerSpec(
    attention=None,
    mlp=None,
    attention_norm="{layer}.norm",
    recurrence=ShortConvolution(
        channels=HIDDEN,
        taps=4,
        has_bias=True,
        has_convolution_bias=True,
        inputs="{layer}.inputs",
        convolution="{layer}.convolution",
        out="{layer}.out",
    ),
)
GATED = _layer(_attention(4, 2, 16, output_gate=True), _mlp(40))
SHARED = replace(
    MORE_EXPERTS,
    mlp=_mlp(
        48,
        experts=Experts(
            5,
            2,
            normalized=True,
            router="{layer}.router",
            by_sigmoid=True,
            scale=1.5,
            shared=SharedExperts(
                2, ("{layer}.shared_gate", "{layer}.shared_up"), "{layer}.shared_down", "{layer}.share"
            ),
        ),
        mlp_in=("{layer}.{expert}.gate", "{layer}.{expert}.up"),
        mlp_out="{layer}.{expert}.down",
    ),
)
SINKS = _layer(
    _attention(4, 2, 16, window=9, sinks="{layer}.sinks"),
    _mlp(
        48,
        clamped_gate=ClampedGate(limit=0.7, slope=1.7),
        bias=True,
        experts=Experts(5, 2, normalized=True, router="{layer}.router", router_bias=True),
        mlp_in=("{layer}.{expert}.gate", "{layer}.{expert}.up"),
        mlp_out="{layer}.{expert}.down",
    ),
)
CLAMPED = _layer(
    _attention(4, 1, 32, window=5, sinks="{layer}.sinks"), _mlp(40, clamped_gate=ClampedGate(limit=0.5, slope=2.0))
)
RECURRENT = "recurrent layers of both kinds, and attention with output gates"
SLACK = {RECURRENT: 2}
"""Gates multiply what is rounded, and short queries and keys are made longer."""
SPECS = {
    RECURRENT: (DELTA, GATED, SHORT, WIDE, DELTA),
    "experts that are chosen by sigmoid, and shared ones": (WIDE, SHARED, ONLY_ATTENTION, SHARED),
    "attention and MLPs of all sizes": (WIDE, WINDOWED, ONLY_ATTENTION, ONLY_MLP, PARALLEL, WIDE, ONLY_MLP),
    "attention in the last layer alone": (ONLY_MLP, ONLY_MLP, WINDOWED),
    "attention sinks, and clamped gates": (CLAMPED, WIDE, CLAMPED, SINKS),
    "experts, and norms of outputs": (EXPERTS, NORMED, MORE_EXPERTS, WIDE, ONLY_ATTENTION),
}


def _described(name: str) -> Description:
    spec = ModelSpec(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=SPECS[name],
        max_position=128,
        norm_eps=1e-5,
        tied_head=False,
        embedding="embedding",
        final_norm="final",
        head="head",
    )
    return Description(ModelSource(Path("/nowhere"), is_dummy=True), "Test", spec, "bfloat16", 128)


@contextmanager
def _native(isa: Isa, name: str, **options: Any) -> Iterator[NativeRunner]:
    given = {"runner": "native", "dtype": "bfloat16", "quantization": "none", "num_kv_blocks": 60, "state_slots": 3}
    given["max_num_seqs"] = 32  # So many that windows have no blocks of their own.
    with (
        mock.patch.object(native_load, "best_isa", lambda *_: isa),
        mock.patch.object(native_load, "library_path", lambda isa, *_: built(isa)),
    ):
        runner, _ = native_load.load_native(_described(name), runner_options(**given | options), lambda *_: None)
    try:
        yield runner
    finally:
        runner.close()


def _torch(name: str) -> Any:
    return load_torch(_described(name), runner_options(num_kv_blocks=60, state_slots=3), lambda *_: None)[0]


def _error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the error that four of five tokens do not exceed: near a tie, rounding chooses other experts."""
    errors = np.sqrt(np.square(got - want).mean(axis=1) / want.var())
    return float(np.quantile(errors, 0.8))


@pytest.mark.parametrize("name", SPECS)
def test_native_logits_are_those_of_the_torch_runner(isa: Isa, name: str) -> None:
    want = logits_alone(_torch(name), TOKEN_IDS)
    for options, most in (
        ({}, 0.02),
        ({"kv_cache_dtype": "int8"}, 0.04),
        ({"quantization": "int8", "kv_cache_dtype": "float16"}, 0.08),
    ):
        with _native(isa, name, num_threads=2, **options) as runner:
            assert _error(logits_alone(runner, TOKEN_IDS), want) < most * SLACK.get(name, 1), options


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bits_depend_neither_on_parts_nor_on_company(isa: Isa, name: str, quantization: str) -> None:
    """Rows are as wide as the widest layer's: what that leaves behind a narrower layer's must not count."""
    options = {"quantization": quantization, "kv_cache_dtype": "int8" if quantization == "int8" else "auto"}
    with _native(isa, name, **options) as runner:
        want = logits_alone(runner, TOKEN_IDS)
    with _native(isa, name, **options, num_threads=3) as runner:
        track, other = Track(TOKEN_IDS, range(1, 10), state=2), Track(TOKEN_IDS[::-1], range(20, 40), state=1)
        parts = [logits_of_step(runner, [(other, 1), (track, count)])[1] for count in (1, 33, 5, 1, 50)]
    np.testing.assert_array_equal(np.concatenate(parts), want)


@dataclass
class Adapter:
    """Random low-rank terms of every matrix that a layer has."""

    spec: ModelSpec
    digest: str = "1"
    name: str = "random"

    def low_ranks(self, layer: int, matrix: MatrixName) -> tuple[LowRank, ...]:
        rng, kind = np.random.default_rng([layer, len(matrix)]), self.spec.layers[layer]
        columns = self.spec.columns_of(kind, matrix)
        return tuple(
            LowRank(
                part,
                rng.standard_normal((3, columns), np.float32) / columns**0.5,
                0.3 * rng.standard_normal((rows, 3), np.float32),
            )
            for part, (_, rows) in enumerate(self.spec.parts_of(kind, matrix))
            if matrix in kind.adapted_matrices
        )


@pytest.mark.parametrize("name", ["attention and MLPs of all sizes", RECURRENT])
def test_adapters_change_the_matrices_that_each_layer_has(isa: Isa, name: str) -> None:
    adapter, logits = Adapter(_described(name).spec), []
    torch_runner = _torch(name)
    without = logits_alone(torch_runner, TOKEN_IDS)
    with _native(isa, name) as native:
        for runner in (torch_runner, native):
            runner.set_adapter(0, adapter)
            track = Track(TOKEN_IDS, range(1, 10), adapter=0, state=1)
            logits.append(logits_of_step(runner, [(track, LENGTH)])[0])
    assert _error(logits[1], logits[0]) < 0.02 * SLACK.get(name, 1)
    assert _error(without, logits[0]) > 0.1


def test_a_layer_without_attention_costs_no_cache(isa: Isa) -> None:
    bytes_of = {}
    for layers in ((WIDE,), (WIDE, ONLY_MLP), (WIDE, WINDOWED)):
        with mock.patch.dict(SPECS, {"one": layers}), _native(isa, "one") as runner:
            bytes_of[layers] = runner.cache_sizes.block_bytes
    assert list(bytes_of.values()) == [16 * 4 * heads for heads in (2 * 48, 2 * 48, 2 * 48 + 16)]


def test_parts_of_ranks_have_the_sizes_of_their_layers() -> None:
    whole = replace(_described("attention in the last layer alone").spec, layers=(ONLY_MLP, WIDE, PARALLEL_2))
    parts = [RankPart(whole, rank, 2).spec.layers for rank in range(2)]
    assert [[layer.mlp.intermediate_size for layer in part if layer.mlp] for part in parts] == [[12, 88, 48]] * 2
    heads = [[(one.num_heads, one.num_kv_heads) for layer in part if (one := layer.attention)] for part in parts]
    assert heads == [[(2, 1), (1, 1)]] * 2


PARALLEL_2 = replace(PARALLEL, attention=_attention(2, 2, 32))
