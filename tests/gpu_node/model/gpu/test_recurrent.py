"""Recurrent layers on the GPU runner: the torch runner's results, from slots of states and to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.prompts import mixed_prompts
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, logits_of_step, plan_of, tokens_of_step
from fixtures.random_adapters import make_adapter
from fixtures.random_families import make_family_model
from fixtures.sampling import rows_of
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError, InvariantError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.protocol import StateSizes

Family = Callable[[str], Path]
FAMILIES = (
    *("qwen3.5", "lfm2", "lfm2 with biases", "granite hybrid", "nemotron h", "lfm3", "lfm3 without gates"),
    *("falcon h1", "falcon h1 with norms"),
)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "num_kv_blocks": 20,
    "max_model_len": 128,
    "state_slots": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}
TOKEN_IDS = [(7919 * i) % 300 for i in range(1, 24)]
OTHER_IDS = TOKEN_IDS[::-1]
MAX_ERROR = 3e-4


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Folder of a random model of a family, in float32."""
    return cache(lambda name: make_family_model(tmp_path_factory.mktemp("family"), name))


@cache
def _loaded(folder: Path, runner: str, **options: Any) -> Any:
    return load_model(str(folder), runner_options(runner=runner, **OPTIONS | options), lambda *_: None)


def _runner(folder: Path, runner: str, **options: Any) -> Any:
    return _loaded(folder, runner, **options).runner


def _logits(runner: Any, adapter: int = -1) -> NDArray[np.float32]:
    """Return the logits of a text in parts beside another one, and behind a state that was saved within a part."""
    track = Track(TOKEN_IDS, [3, 17, 5], state=3, saves={0: 4, 8: 5}, adapter=adapter)
    other = Track(OTHER_IDS, [2, 4, 6], state=1, adapter=adapter)
    parts = logits_of_step(runner, [(track, 1), (other, 2)])
    parts += logits_of_step(runner, [(other, 1), (track, 11)])
    parts += [rows for count in (1, 1) for rows in logits_of_step(runner, [(track, count), (other, count)])]
    for slot, done in ((4, 1), (5, 9)):
        # Both continue from slots of saved states, of which one is written again.
        again = Track(TOKEN_IDS, [3, 18, 19], done=done, state=7 - slot, read=slot, adapter=adapter)
        parts += logits_of_step(runner, [(again, 3)])
    return np.concatenate(parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_torch_runner(family: Family, name: str) -> None:
    want, got = (_logits(_runner(family(name), runner)) for runner in ("torch", "gpu"))
    np.testing.assert_allclose(got, want, rtol=0, atol=MAX_ERROR * np.abs(want).max())


def _tokens(runner: Any) -> list[list[int]]:
    """Return greedy tokens of steps that are padded to the shape of a graph: a prompt, both, then decoding."""
    track = Track([*TOKEN_IDS], [3, 17, 5, 7], state=3, saves={5: 4, 11: 5})
    other = Track([*OTHER_IDS], [2, 4, 6, 8], state=1)
    rows, found = rows_of(2, temperature=0.0), []
    for counts in ((20, 3), (3, 5), (1, 1), (1, 1)):
        for one, count in zip((track, other), counts, strict=True):
            one.token_ids = [*one.token_ids, *([found[-1][0]] * max(0, count - one.left))] if found else one.token_ids
        found.append(tokens_of_step(runner, [(track, counts[0]), (other, counts[1])], rows).tolist())
    again = Track(TOKEN_IDS, [3, 17, 5, 7], done=12, state=6, read=5)
    found.append(tokens_of_step(runner, [(again, 4)], rows_of(1, temperature=0.0)).tolist())
    return found


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron h", "falcon h1"])
def test_steps_of_graphs_sample_the_tokens_of_the_torch_runner(family: Family, name: str) -> None:
    want, got = (_tokens(_runner(family(name), runner)) for runner in ("torch", "gpu"))
    assert got == want


def test_more_saved_states_than_a_graph_holds_are_saved_without_one(family: Family) -> None:
    runner = _runner(family("lfm2"), "gpu")
    track = Track(TOKEN_IDS, [3, 17, 5], state=0, saves={at: at for at in range(1, 7)})
    flight = runner.submit(plan_of([(track, 12)], rows_of(1, temperature=0.0)))
    assert flight.result().eager == "too_large"
    for slot in (1, 6):
        again = Track(TOKEN_IDS, [3, 18, 19], done=slot + 1, state=7, read=slot)
        want = Track(TOKEN_IDS, [3, 18, 19], state=0)
        logits_of_step(runner, [(want, slot + 1)])
        pair = [logits_of_step(runner, [(one, 1)])[0] for one in (want, again)]
        np.testing.assert_allclose(pair[1], pair[0], rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize("name", ["qwen3.5", "granite hybrid", "lfm3"])
def test_errors_of_quantized_matrices_are_small(family: Family, name: str) -> None:
    want = _logits(_runner(family(name), "torch"))
    error = _logits(_runner(family(name), "gpu", quantization="int8")) - want
    assert 0 < np.sqrt(np.square(error).mean() / want.var()) < 0.2


@pytest.mark.parametrize("name", ["qwen3.5", "falcon h1"])
def test_adapters_change_all_projections(family: Family, tmp_path: Path, name: str) -> None:
    only = ("q_proj", "o_proj", "in_proj", "in_proj_qkv", "in_proj_a", "in_proj_b", "out_proj", "down_proj")
    model = AutoModelForCausalLM.from_pretrained(family(name), dtype=torch.float32)
    settings = {"lora": {"adapter": make_adapter(tmp_path / "adapter", model, rank=4, seed=1, only=only)}}
    plain, found = _logits(_runner(family(name), "torch")), []
    for runner in ("torch", "gpu"):
        options = runner_options(runner=runner, **OPTIONS, **settings, max_loras=1)
        loaded = load_model(str(family(name)), options, lambda *_: None)
        loaded.runner.set_adapter(0, loaded.adapters.find(AdapterRef(name="adapter")))
        found.append(_logits(loaded.runner, adapter=0))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=MAX_ERROR * np.abs(found[0]).max())
    assert np.abs(found[0] - plain).max() > 0.01


def test_the_runner_says_its_slots_and_drafts_nothing(family: Family) -> None:
    runner, torch_runner = (_runner(family("qwen3.5"), name) for name in ("gpu", "torch"))
    assert runner.state_sizes == torch_runner.state_sizes
    assert (runner.state_sizes.num_slots, runner.verifies_drafts) == (8, False)


def test_the_largest_step_writes_no_other_slot_than_the_first(family: Family) -> None:
    runner = _runner(family("granite hybrid"), "gpu")
    track = Track(TOKEN_IDS, [3, 17, 5], state=1)
    want = [logits_of_step(runner, [(track, count)])[0] for count in (12, 3)][1]
    again = Track(TOKEN_IDS, [3, 17, 5], state=1)
    logits_of_step(runner, [(again, 12)])
    runner.compile_eager_steps()
    np.testing.assert_array_equal(logits_of_step(runner, [(again, 3)])[0], want)


def test_a_step_without_states_is_an_error(family: Family) -> None:
    with pytest.raises(InvariantError, match="names no states"):
        _runner(family("lfm2"), "gpu").submit(plan_of([(Track([1, 2], [1]), 2)], rows_of(1)))


def test_lack_of_memory_within_a_step_shows_in_its_result(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine must know that the step may have written states."""
    runner = _runner(family("lfm2"), "gpu", enforce_eager=True)

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    plan = plan_of([(Track([5, 6, 7, 8], [1], state=0), 4)], rows_of(1, temperature=0.0))
    with monkeypatch.context() as patch:
        patch.setattr(runner._decoder, "logits", out_of_memory)
        failed = runner.submit(plan)
    with pytest.raises(MemoryError):
        failed.result()
    want = _runner(family("lfm2"), "torch").submit(plan).result().tokens
    assert runner.submit(plan).result().tokens.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"state_slots": 0}, r"state_slots is 0 but must be at least 1: the state of a sequence takes [\d,]+ bytes"),
        ({"tensor_parallel_size": 2}, "a model with recurrent layers.* is computed by one rank"),
        ({"cpu_offload_gib": 0.1}, "cpu_offload_gib needs layers of equal size, but recurrent layers differ"),
    ],
    ids=["slots", "ranks", "offload"],
)
def test_what_recurrent_layers_do_not_support_is_refused_by_name(
    family: Family, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_model(str(family("lfm2")), runner_options(runner="gpu", **OPTIONS | changes), lambda *_: None)


def _generations(folder: Path, runner: str) -> list[tuple[int, ...]]:
    """Return answers of two rounds of the same prompts, one of them with a grammar; the second round hits snapshots."""
    engine = Engine(
        EngineConfig(
            model=str(folder),
            runner=runner,
            dtype="float32",
            block_size=8,
            num_kv_blocks=24,
            max_num_seqs=3,
            max_num_batched_tokens=16,
            max_model_len=128,
            state_cache_gib=0.001,
        )
    )
    prompts = [prompt[:19] for prompt in mixed_prompts(engine, 3)]
    rules: list[dict[str, Any]] = [{"temperature": 0.0}, {"n": 2}, {"structured_outputs": {"regex": "[a-c]{3}x*"}}]
    params = [SamplingParams(**{"max_tokens": 6, "seed": i} | rules[i]) for i in range(3)]
    rounds = [engine.generate(prompts, params) for _ in range(2)]
    stats = engine.stats()
    engine.check_integrity()
    assert stats.state_hits > 0
    assert stats.state_slots_total * stats.state_slot_bytes <= 0.001 * 2**30
    return [choice.token_ids for generations in rounds for one in generations for choice in one.choices]


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_engine_generates_the_same_tokens_on_the_gpu_runner(family: Family, name: str) -> None:
    want, got = (_generations(family(name), runner) for runner in ("torch", "gpu"))
    assert got == want
    assert len(got) == 8


def test_a_dense_model_has_no_slots(tiny_model: Path) -> None:
    assert _runner(tiny_model, "gpu", state_slots=0).state_sizes == StateSizes()
