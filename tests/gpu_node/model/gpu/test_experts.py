"""Mixtures of experts and attention sinks on the GPU runner: the torch runner's results, in every format."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.prompts import mixed_prompts
from fakes.runners.runner_options import runner_options
from fakes.runners.turn_ranks import TurnTakingRunner
from fixtures.mxfp4_checkpoint import write_mxfp4
from fixtures.plans import Track, logits_of_step, tokens_of_step
from fixtures.quantized_checkpoint import LAYOUTS, Layout, write_quantized
from fixtures.random_families import RECURRENT_FAMILIES, make_family_model
from fixtures.sampling import rows_of
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.loading.load import find_model, load_model
from penstock.gpu_node.model.loading.plan import sizes_of

Family = Callable[..., Path]
FAMILIES = (
    *("mixtral", "qwen3 moe", "qwen3 moe in some layers", "gpt-oss", "gemma4", "gemma4 moe"),
    *("qwen3.5 moe", "qwen3 next", "lfm2 moe", "granite hybrid moe", "nemotron h moe"),
)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "num_kv_blocks": 20,
    "max_model_len": 128,
    "state_slots": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}
TOKEN_IDS = [(7919 * i) % 300 for i in range(1, 24)]
MAX_ERROR = 3e-4
BLOCKS_OF_128 = Layout(
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    LAYOUTS["fp8 in blocks"].pack,
    LAYOUTS["fp8 in blocks"].given | {"block": (128, 128)},
)
WIDE = {"hidden_size": 320, "intermediate_size": 192}
"""Rows of three scales, the last one of half as many columns."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Folder of a random model of a family, in float32."""
    return cache(lambda *name, **changes: make_family_model(tmp_path_factory.mktemp("family"), *name, **changes))


@cache
def _loaded(folder: Path, runner: str, **options: Any) -> Any:
    return load_model(str(folder), runner_options(runner=runner, **OPTIONS | options), lambda *_: None)


def _runner(folder: Path, runner: str, **options: Any) -> Any:
    return _loaded(folder, runner, **options).runner


def _tracks(runner: Any) -> tuple[Track, Track]:
    states = (3, 1) if runner.state_sizes.num_slots else (-1, -1)
    ids = TOKEN_IDS, TOKEN_IDS[::-1]
    return Track(ids[0], [3, 17, 5, 7], state=states[0]), Track(ids[1], [2, 4, 6, 8], state=states[1])


def _logits(runner: Any) -> NDArray[np.float32]:
    """Return the logits of two texts whose parts and single tokens share steps."""
    track, other = _tracks(runner)
    parts = [rows for counts in ((14, 2), (1, 5), (1, 1), (3, 4)) for rows in _step(runner, track, other, counts)]
    return np.concatenate(parts)


def _step(runner: Any, track: Track, other: Track, counts: tuple[int, int]) -> list[NDArray[np.float32]]:
    return logits_of_step(runner, [(track, counts[0]), (other, counts[1])])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_torch_runner(family: Family, name: str) -> None:
    want, got = (_logits(_runner(family(name), runner)) for runner in ("torch", "gpu"))
    np.testing.assert_allclose(got, want, rtol=0, atol=MAX_ERROR * np.abs(want).max())


def _tokens(runner: Any) -> list[list[int]]:
    """Return greedy tokens of steps that are padded to the shapes of graphs: a prompt, both, then decoding."""
    track, other = _tracks(runner)
    rows = rows_of(2, temperature=0.0)
    steps = ((12, 3), (3, 5), (1, 1), (1, 1))
    return [tokens_of_step(runner, list(zip((track, other), counts, strict=True)), rows).tolist() for counts in steps]


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4 moe", "qwen3.5 moe", "nemotron h moe"])
def test_steps_of_graphs_sample_the_tokens_of_the_torch_runner(family: Family, name: str) -> None:
    want, got = (_tokens(_runner(family(name), runner)) for runner in ("torch", "gpu"))
    assert got == want


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.2), ("fp8", 0.25), ("int4", 0.45)])
@pytest.mark.parametrize("name", ["qwen3 moe", "gpt-oss"])
def test_errors_of_quantized_experts_are_small(family: Family, name: str, quantization: str, most: float) -> None:
    # All experts are chosen, so that no choice changes.
    folder = family(name, num_experts_per_tok=6, **({"moe_intermediate_size": 64} if "moe" in name else {}))
    want = _logits(_runner(folder, "torch"))
    assert 0 < _error(_logits(_runner(folder, "gpu", quantization=quantization)), want) < most


def _error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.square(got - want).mean() / want.var()))


def test_deterministic_logits_do_not_depend_on_the_rest_of_a_step(family: Family) -> None:
    runner = _runner(family("gpt-oss"), "gpu", deterministic=True)
    alone, beside = _tracks(runner)[0], _tracks(runner)
    first = logits_of_step(runner, [(alone, 5)])[0]
    assert np.array_equal(_step(runner, *beside, (5, 9))[0], first)


def test_experts_in_mxfp4_are_multiplied_as_they_are_stored(family: Family, tmp_path: Path) -> None:
    write_mxfp4(family("gpt-oss", "bfloat16"), tmp_path)
    want, got = (_loaded(tmp_path, runner) for runner in ("torch", "gpu"))
    assert got.arithmetic == "gpu-float32-mxfp4+none-kv-float32"
    np.testing.assert_allclose(_logits(got.runner), _logits(want.runner), rtol=0, atol=1e-3)
    expert_bytes = 4 * 6 * (64 * 3 * 64) * 17 // 32
    matrices = _bytes_of_matrices(tmp_path)
    assert expert_bytes <= matrices < expert_bytes + 4 * 1_000_000


def _bytes_of_matrices(folder: Path, **options: Any) -> int:
    given = runner_options(runner="gpu", **OPTIONS | options)
    return sizes_of(find_model(str(folder), given, lambda *_: None).described, given, "gpu").weight_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_float8_with_blocks_of_128_is_multiplied_as_it_is_stored(family: Family, tmp_path: Path, name: str) -> None:
    """Errors are not larger than with a scale for each row, for which the weights are rounded once more."""
    changes = WIDE | ({"num_experts_per_tok": 6, "moe_intermediate_size": 192} if "moe" in name else {})
    write_quantized(family(name, **changes), BLOCKS_OF_128, tmp_path)
    got, want = _loaded(tmp_path, "gpu"), _logits(_runner(tmp_path, "torch"))
    assert "fp8_blocks" in got.arithmetic
    by_row = _error(_logits(_runner(tmp_path, "gpu", quantization="fp8")), want)
    assert 0 < _error(_logits(got.runner), want) < min(1.1 * by_row, 0.3)
    assert _bytes_of_matrices(tmp_path) < 0.6 * _bytes_of_matrices(tmp_path, quantization="none")


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3 moe"])
def test_ranks_compute_a_part_of_each_expert(family: Family, name: str) -> None:
    options = {name: value for name, value in OPTIONS.items() if name not in ("dtype", "state_slots")}
    ranks = TurnTakingRunner(family(name), 2, **options)
    want = _logits(_runner(family(name), "gpu"))
    np.testing.assert_allclose(_logits(ranks), want, rtol=0, atol=MAX_ERROR * np.abs(want).max())


def test_offloading_experts_is_refused_by_name(family: Family) -> None:
    with pytest.raises(ConfigError, match="cpu_offload_gib moves no experts"):
        _runner(family("mixtral"), "gpu", cpu_offload_gib=0.1)


def _generations(folder: Path, runner: str) -> list[tuple[int, ...]]:
    """Return answers of one batch with too few blocks for all of it."""
    sizes: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 5, "num_swap_blocks": 30, "max_num_seqs": 4}
    engine = Engine(
        EngineConfig(
            model=str(folder),
            runner=runner,
            dtype="float32",
            preemption="swap",
            max_num_batched_tokens=24,
            max_model_len=256,
            **sizes,
        )
    )
    prompts = [prompt[:14] for prompt in mixed_prompts(engine, 4)]
    rules: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 3}, {"temperature": 0.8}, {"logit_bias": {5: 9.0}}]
    params = [
        SamplingParams(**{"max_tokens": 7, "ignore_eos": True, "seed": i} | rules[i]) for i in range(len(prompts))
    ]
    generations = engine.generate(prompts, params)
    engine.check_integrity()
    assert engine.stats().num_swaps > 0
    return [one.choices[0].token_ids for one in generations]


def test_engine_generates_the_same_tokens_on_the_gpu_runner(family: Family) -> None:
    want, got = (_generations(family("gpt-oss"), runner) for runner in ("torch", "gpu"))
    assert got == want


def test_each_family_with_experts_is_here() -> None:
    with_experts = {name for name, (_, changes) in RECURRENT_FAMILIES.items() if "num_experts_per_tok" in changes}
    assert with_experts - set(FAMILIES) == set()
