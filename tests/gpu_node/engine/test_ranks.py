"""The engine on a model that several ranks compute together: the tokens are those of one rank, with every feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from fakes.cover import each_value
from fakes.engine_runs import TORCH, check_idle
from fakes.prompts import mixed_prompts
from fakes.runners.torch_threads import torch_ranks_as_threads
from fakes.ties import num_departures
from fixtures.random_adapters import make_adapter, merge
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.offline import Prompt
from penstock.gpu_node.engine.records import Generation
from penstock.gpu_node.engine.speculative.drafts import DraftBudget

MakeEngine = Callable[..., Engine]
Shape: TypeAlias = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((2, 1), (1, 2), (2, 2))
"""Ranks of a stage, and stages."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    with torch_ranks_as_threads():
        yield


def _sizes(shape: Shape) -> dict[str, int]:
    return dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), shape, strict=True))


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two adapters of the tiny model."""
    folder = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for seed, name in enumerate("ab"):
        make_adapter(folder / name, base, seed=seed)
    return folder


@pytest.fixture(scope="module")
def references(tiny_model: Path, adapters: Path) -> dict[str | None, Any]:
    """The tiny model in transformers, without an adapter and with each."""
    models = {name: AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32) for name in (None, "a", "b")}
    return {name: model if name is None else merge(model, adapters / name) for name, model in models.items()}


@pytest.mark.parametrize(("shape", "preemption"), each_value(SHAPES, ("swap", "recompute")))
def test_a_batch_with_chunks_prefixes_preemption_and_adapters_has_the_tokens_of_transformers(
    make_engine: MakeEngine, references: dict[str | None, Any], adapters: Path, shape: Shape, preemption: str
) -> None:
    engine = make_engine(
        **TORCH,
        **_sizes(shape),
        num_kv_blocks=30,
        num_swap_blocks=64 if preemption == "swap" else 0,
        preemption=preemption,
        max_num_batched_tokens=48,
        max_num_seqs=16,
        lora_dir=adapters,
        max_loras=2,
    )
    prompts = mixed_prompts(engine, 16)
    wanted = [(None, "a", "b")[i % 3] for i in range(len(prompts))]
    generations = engine.generate(prompts, GREEDY, adapters=wanted)
    stats = engine.stats()
    assert min(stats.num_preemptions, stats.prefix_hit_tokens) > 0
    assert bool(stats.num_swaps) == (preemption == "swap")
    for name, model in references.items():
        pairs = [
            (one.prompt_token_ids, one.choices[0].token_ids)
            for one, its in zip(generations, wanted, strict=True)
            if its == name
        ]
        assert num_departures(model, pairs) <= 1
    check_idle(engine)


@pytest.fixture(scope="module")
def engines(make_engine: MakeEngine) -> dict[Shape, Engine]:
    """Engines of one rank and of several."""
    # Three sequences with eight drafted tokens each are more than a usual step has.
    settings = {**TORCH, "speculative": "ngram", "max_num_batched_tokens": 16, "max_num_seqs": 8}
    return {shape: make_engine(**settings, **_sizes(shape)) for shape in ((1, 1), *SHAPES)}


PROMPTS: list[Prompt] = ["the gate opens by pressure " * 3, "a", list(range(70))]


@pytest.fixture(scope="module")
def by_one_rank(engines: dict[Shape, Engine]) -> Callable[[str], list[Generation]]:
    """Return what one rank generates from PROMPTS by parameters in JSON."""

    @cache
    def generated(params: str) -> list[Generation]:
        return engines[1, 1].generate(PROMPTS, SamplingParams.model_validate_json(params))

    return generated


@pytest.fixture
def _free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cost nothing, so that it does not depend on times whether there are some."""
    monkeypatch.setattr(DraftBudget, "needs", lambda self, num, most: [0.0] * min(most, num * self.max_draft_tokens))


@pytest.mark.usefixtures("_free_drafts")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "seed": 3, "top_p": 0.9, "n": 2, "presence_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.8, "seed": 1, "structured_outputs": {"regex": "[a-c]{2,5}-[0-9]{1,9}x"}},
        {"temperature": 0.0, "use_beam_search": True, "n": 3},
        {"temperature": 1.0, "seed": 2, "logit_bias": {"6": 60.0, "7": 57.0}, "ignore_eos": True},
    ],
    ids=["sampled", "logprobs", "structured", "beams", "drafts"],
)
def test_requests_of_each_kind_have_the_choices_of_one_rank(
    engines: dict[Shape, Engine], by_one_rank: Callable[[str], list[Generation]], params: dict[str, Any], shape: Shape
) -> None:
    given = SamplingParams(max_tokens=16, **params)
    generated = engines[shape].generate(PROMPTS, given), by_one_rank(given.model_dump_json())
    got, want = ([one.choices for one in generations] for generations in generated)
    for mine, theirs in zip(got, want, strict=True):
        assert [choice.token_ids for choice in mine] == [choice.token_ids for choice in theirs]
        values = [[entry.logprob or 0.0 for choice in some for entry in choice.logprobs] for some in (mine, theirs)]
        np.testing.assert_allclose(values[0], values[1], atol=1e-4)
    if "logit_bias" in params:
        assert engines[shape].stats().accepted_tokens > 0, "texts of two tokens repeat themselves"


@pytest.mark.parametrize("shape", SHAPES)
def test_embeddings_are_those_of_one_rank(engines: dict[Shape, Engine], shape: Shape) -> None:
    prompts: list[Prompt] = ["a gate", list(range(50))]
    got, want = ([one.values for one in engines[each].embed(prompts)] for each in (shape, (1, 1)))
    assert engines[shape].revision == engines[1, 1].revision, "nodes of all shapes continue each other's jobs"
    np.testing.assert_allclose(got, want, atol=1e-5)
