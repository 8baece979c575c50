"""Ranks of the GPU runner: the logits of one rank, the same tokens at each, and the same exchanges in every graph."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.prompts import mixed_prompts
from fakes.runners.mended_rank import mended_ranks
from fakes.runners.runner_options import runner_options
from fakes.runners.turn_ranks import TurnTakingRunner
from fakes.ties import num_departures
from fakes.waiting import wait_until
from fixtures.plans import Track, logits_of_step, plan_of
from fixtures.random_adapters import make_adapter
from fixtures.random_families import make_family_model
from fixtures.sampling import rows_of
from fixtures.thread_ranks import ThreadRanks
from fixtures.turn_ranks import Call
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.graphs import GraphShapes, StepShape
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.torch_common.exchanges import Agreement, RankFailedError
from penstock.gpu_node.model.torch_common.ranked_runner import RankedRunner
from penstock.gpu_node.model.torch_common.ranks import BrokenExchangeError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are threads on the CPU")
OPTIONS: dict[str, Any] = {"num_kv_blocks": 12, "max_model_len": 64, "max_num_seqs": 4}


def _one(folder: Path, **options: Any) -> Any:
    return load_model(str(folder), runner_options(runner="gpu", **OPTIONS | options), lambda *_: None).runner


def _logits(runner: Any, adapter: int = -1) -> NDArray[np.float32]:
    """Return the logits of a sequence in chunks beside another one."""
    token_ids = random.Random(0).choices(range(300), k=9)
    one, other = Track(token_ids, [3, 5], adapter=adapter), Track(token_ids[::-1], [2, 4])
    return np.concatenate([logits_of_step(runner, [(one, count), (other, 2)])[0] for count in (5, 1, 3)])


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama", 2), ("llama", 4), ("olmo2", 2), ("gemma2", 2), ("falcon rw", 2), ("gpt-neox", 2), ("falcon 7b", 2)],
)
def test_logits_are_those_of_one_rank(name: str, size: int, tmp_path: Path) -> None:
    folder = make_family_model(tmp_path, name, num_hidden_layers=2)
    ranks = TurnTakingRunner(folder, size, **OPTIONS)
    np.testing.assert_allclose(_logits(ranks), _logits(_one(folder)), rtol=0, atol=1e-4)
    assert ranks.arithmetic.endswith(f"-tp{size}")


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_errors_of_quantized_formats_are_those_of_one_rank(quantization: str, tmp_path: Path) -> None:
    """The numbers differ, because each rank's activations have scales of their own: the arithmetic has another name."""
    folder = make_family_model(tmp_path, "llama", intermediate_size=128)
    want = _logits(_one(folder))
    runners = (_quantized(folder, quantization, size) for size in (1, 2))
    one, two = (float(np.sqrt(np.square(_logits(runner) - want).mean())) for runner in runners)
    assert 0.5 < two / one < 1.5


def _quantized(folder: Path, quantization: str, size: int) -> Any:
    options = OPTIONS | {"quantization": quantization}
    return _one(folder, **options) if size == 1 else TurnTakingRunner(folder, size, **options)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("llama", "int8"),
        ("llama", "fp8"),
        # Both ranks have the only key/value head.
        ("falcon 7b", "int8"),
        pytest.param("olmo2", "fp8", marks=pytest.mark.slow),
        pytest.param("gemma2", "int8", marks=pytest.mark.slow),
        pytest.param("gpt-neox", "fp8", marks=pytest.mark.slow),
    ],
)
def test_a_kv_cache_of_fewer_bits_is_that_of_one_rank(name: str, kept: str, tmp_path: Path) -> None:
    """Its scales are those of a key/value head, which no cut divides."""
    folder = make_family_model(tmp_path, name, num_hidden_layers=2)
    exact, options = _logits(_one(folder)), OPTIONS | {"kv_cache_dtype": kept}
    alone, ranks = _one(folder, **options), TurnTakingRunner(folder, 2, **options)
    one, two = _logits(alone), _logits(ranks)
    error, difference = (float(np.sqrt(np.square(one - other).mean())) for other in (exact, two))
    # A number at the middle between two of the cache may be rounded to the other one.
    assert difference < 0.1 * error
    held = [runner.held.kv_blocks for runner in (alone, *ranks.runners)]
    assert held[1:] == [held[0] // (1 if name == "falcon 7b" else 2)] * 2
    assert f"-kv-{kept}-tp2" in ranks.arithmetic


def test_adapters_are_cut(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path / "a", AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    options: dict[str, Any] = {"lora_dir": tmp_path, "max_loras": 1, **OPTIONS}
    adapter = load_model(str(tiny_model), runner_options(**options), lambda *_: None).adapters.find(
        AdapterRef(name="a")
    )
    logits, ranks = [], TurnTakingRunner(tiny_model, 2, **options)
    for runner in (_one(tiny_model, **options), ranks):
        runner.set_adapter(0, adapter)
        logits += [_logits(runner), _logits(runner, 0)]
    np.testing.assert_allclose(logits[2:], logits[:2], rtol=0, atol=1e-4)
    assert np.abs(logits[3] - logits[2]).max() > 0.1
    # One that a rank cannot load fails at both; so rank 0 knows.
    monkeypatch.setattr(ranks.runners[1]._adapters, "set", _lacking)
    loads = ranks.on_all(lambda rank: ranks.runners[rank].start_adapter(0, lambda: adapter))
    assert [type(load.exception()) for load in loads] == [RankFailedError, MemoryError]


def _lacking(*_given: Any) -> None:
    raise MemoryError("too large")


def test_an_error_in_a_step_ends_the_ranks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of the others would wait for an exchange that never comes."""
    ranks = TurnTakingRunner(tiny_model, 2, **OPTIONS)
    for rank, runner in enumerate(ranks.runners):
        monkeypatch.setattr(runner._pool, "copy", _lacking)
        with pytest.raises(BrokenExchangeError, match=f"a step failed at rank {rank}: too large"):
            runner.submit(plan_of([(Track([5, 6], [1]), 2)], rows_of(1)))


def test_every_graph_makes_the_same_exchanges_at_each_rank(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the capture of all graphs on a GPU records them."""
    shapes: list[StepShape] = GraphShapes(20, 70, has_adapters=False).all

    def capture(_device: Device, work: Callable[[], None], _pool: object) -> tuple[Callable[[], None], None]:
        work()
        return work, None

    monkeypatch.setattr(Device, "capture", capture)
    options = OPTIONS | {"max_num_seqs": 20, "max_num_batched_tokens": 70, "dtype": "bfloat16"}
    runner = TurnTakingRunner(tiny_model, 2, **options)
    first, second = (rank.calls for rank in runner.ranks[0])
    assert first == second
    assert list(first) == [call for shape in shapes for call in _exchanges_of(shape)]
    assert len(shapes) > 8


def _exchanges_of(shape: StepShape) -> list[Call]:
    """Return the exchanges of the tiny model's step: two layers, 64 channels, 384 tokens in two parts of 192."""
    of_all, of_samples = (("sum", (rows, 64), "bfloat16") for rows in (shape.num_tokens, shape.num_seqs))
    embedded = "sum", (shape.num_tokens, 64), "float32"
    return [embedded, of_all, of_all, of_samples, of_samples, ("all_gather", (shape.num_seqs, 192), "bfloat16")]


def test_an_engine_with_two_steps_in_flight_has_the_tokens_of_transformers(tiny_model: Path) -> None:
    settings: dict[str, Any] = {"num_kv_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    engine = Engine(EngineConfig(model=str(tiny_model), runner="gpu", dtype="float32", max_model_len=96, **settings))
    engine._runner = TurnTakingRunner(tiny_model, 2, max_model_len=96, **settings)
    prompts = [prompt[:20] for prompt in mixed_prompts(engine, 5)]
    generations = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    pairs = [(one.prompt_token_ids, one.choices[0].token_ids) for one in generations]
    assert num_departures(AutoModelForCausalLM.from_pretrained(tiny_model), pairs) <= 1


def test_processes_sample_by_what_messages_say_and_are_started_again(tiny_model: Path) -> None:
    """With two steps in flight. Before the third time, the other rank is killed."""
    settings: dict[str, Any] = {"model": str(tiny_model), "runner": "gpu", "dtype": "float32", "max_model_len": 64}
    settings |= {"max_num_seqs": 4, "num_kv_blocks": 24, "max_num_batched_tokens": 32, "enforce_eager": True}
    one = Engine(EngineConfig(**settings))
    with mended_ranks():
        two = Engine(EngineConfig(**settings, tensor_parallel_size=2, rank_stall_s=60))
        assert isinstance(two._runner, RankedRunner)
        prompts: list[Any] = [[5, 6, 7]]
        penalties: dict[str, Any] = {
            "temperature": 0.9,
            "seed": 3,
            "top_p": 0.9,
            "presence_penalty": 0.5,
            "logit_bias": {7: 2.0},
        }
        masks: dict[str, Any] = {
            "temperature": 0.8,
            "seed": 1,
            "structured_outputs": {"regex": "[a-c]{2,5}-[0-9]{1,9}x"},
        }
        for params in (penalties, masks, penalties):
            given = SamplingParams(max_tokens=2, **params)
            want, got = ([done.choices[0].token_ids for done in each.generate(prompts, given)] for each in (one, two))
            assert got == want
            if params is masks:
                os.kill(two._runner.rank_pids[0], signal.SIGKILL)
                wait_until(two.has_work)  # The loss is noticed within milliseconds.
                assert two.step() == []
        assert two.stats().ranks.num_starts == 2
        two._runner.close()


def test_ranks_that_sample_different_tokens_are_noticed_and_stay_lost() -> None:
    def note(ranks: ThreadRanks) -> list[bool]:
        agreement, lost = Agreement(ranks, every=4), []
        for step in range(16):
            try:
                agreement.note(torch.tensor([step, 7 + (step == 5) * ranks.rank]))
                lost.append(False)
            except BrokenExchangeError:
                lost.append(True)
        return lost

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(note, ThreadRanks.group(2))) == [[False] * 7 + [True] * 9] * 2


def test_what_ranks_cannot_do_is_refused_by_name(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 3: num_heads 4 is not a multiple of it"):
        _one(tiny_model, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="deterministic needs tensor_parallel_size 1"):
        TurnTakingRunner(tiny_model, 2, deterministic=True, **OPTIONS)
