"""The engine on a model that two ranks compute together: the tokens are those of one rank, with every feature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.engine_runs import TORCH, check_idle
from fakes.prompts import mixed_prompts
from fakes.runners.remote_rank import two_processes
from fakes.ties import num_departures
from fixtures.random_adapters import make_adapter, merge
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two adapters of the tiny model."""
    folder = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for seed, name in enumerate("ab"):
        make_adapter(folder / name, base, seed=seed)
    return folder


def test_a_batch_with_chunks_prefixes_swaps_and_adapters_has_the_tokens_of_transformers(
    make_engine: MakeEngine, tiny_model: Path, adapters: Path
) -> None:
    engine = make_engine(
        **TORCH,
        tensor_parallel_size=2,
        num_kv_blocks=30,
        num_swap_blocks=64,
        preemption="swap",
        max_num_batched_tokens=48,
        max_num_seqs=16,
        lora_dir=adapters,
        max_loras=2,
    )
    prompts = mixed_prompts(engine, 16)
    wanted = [(None, "a", "b")[i % 3] for i in range(len(prompts))]
    generations = engine.generate(prompts, GREEDY, adapters=wanted)
    stats = engine.stats()
    assert min(stats.num_swaps, stats.prefix_hit_tokens) > 0
    for name in (None, "a", "b"):
        model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        pairs = [
            (one.prompt_token_ids, one.choices[0].token_ids)
            for one, its in zip(generations, wanted, strict=True)
            if its == name
        ]
        assert num_departures(model if name is None else merge(model, adapters / name), pairs) <= 1
    check_idle(engine)


@pytest.fixture(scope="module")
def engines(make_engine: MakeEngine) -> list[Engine]:
    """Engines of one rank and of two."""
    return [make_engine(**TORCH, tensor_parallel_size=size, speculative="ngram") for size in (1, 2)]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "seed": 3, "top_p": 0.9, "n": 2, "presence_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.8, "seed": 1, "structured_outputs": {"regex": "[a-c]{2,5}-[0-9]{1,9}x"}},
        {"temperature": 0.0, "use_beam_search": True, "n": 3},
    ],
    ids=["sampled", "logprobs", "structured", "beams"],
)
def test_requests_of_each_kind_have_the_choices_of_one_rank(engines: list[Engine], params: dict[str, Any]) -> None:
    prompts = ["the gate opens by pressure " * 3, "a", list(range(70))]
    given = SamplingParams(max_tokens=16, **params)
    want, got = ([one.choices for one in engine.generate(prompts, given)] for engine in engines)
    for mine, theirs in zip(got, want, strict=True):
        assert [choice.token_ids for choice in mine] == [choice.token_ids for choice in theirs]
        values = [[entry.logprob for choice in some for entry in choice.logprobs] for some in (mine, theirs)]
        np.testing.assert_allclose(*values, atol=1e-4)


def test_embeddings_are_those_of_one_rank(engines: list[Engine]) -> None:
    got, want = ([one.values for one in engine.embed(["a gate", list(range(50))])] for engine in engines)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_ranks_in_two_processes_have_the_tokens_of_one(
    make_engine: MakeEngine, tiny_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**TORCH, "num_kv_blocks": 40, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    one, two = make_engine(**settings), make_engine(**settings)
    prompts = mixed_prompts(one, 6)
    want = one.generate(prompts, GREEDY)
    with two_processes(tiny_model, tmp_path, num_kv_blocks=40, max_num_batched_tokens=48) as runner:
        two._runner = runner
        got = two.generate(prompts, GREEDY)
    assert [each.choices[0].token_ids for each in got] == [each.choices[0].token_ids for each in want]
