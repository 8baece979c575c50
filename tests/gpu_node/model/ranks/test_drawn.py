"""Engines of several ranks against one of one rank: families, formats, features and shapes as a seed draws them.

Other tests have each family, each format and each feature with ranks (the table in docs/RANKS.md). Here they meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.engine_runs import TORCH, check_idle
from fakes.runners.thread_ranks import ranks_as_threads
from fakes.runners.torch_threads import torch_ranks_as_threads
from fixtures.random_adapters import make_adapter
from fixtures.random_families import FAMILIES, GROWN_BY_LENGTH, LOGITS_ONLY
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, Generation
from penstock.gpu_node.engine.offline import Prompt

pytestmark = pytest.mark.slow

MakeEngine = Callable[..., Engine]
FamilyFolder = Callable[[str], Path]
ONE_KV_HEAD = "falcon 7b"
WITH_ADAPTERS = ("llama", "mistral", "qwen2", "qwen3")
NATIVE = [name for name in FAMILIES if name != ONE_KV_HEAD]
TORCH_FAMILIES = [name for name in FAMILIES if name not in (*LOGITS_ONLY, *GROWN_BY_LENGTH)]
"""Those whose greedy tokens can be compared at ties."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.4, "logit_bias": {"5": 3.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "grammar": {"temperature": 0.7, "structured_outputs": {"regex": "[a-f]{3,30}"}, "ignore_eos": False},
    "choices": {"temperature": 1.0, "n": 3},
    "beams": {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0.0},
}
PREEMPTIONS: dict[str, dict[str, Any]] = {
    "none": {"num_kv_blocks": 128},
    "swap": {"num_kv_blocks": 12, "num_swap_blocks": 40, "preemption": "swap"},
    "recompute": {"num_kv_blocks": 12, "preemption": "recompute"},
}


class Drawn:
    """What a seed draws: the engine's settings, and requests."""

    def __init__(self, rng: random.Random, families: list[str], kinds: dict[str, dict[str, Any]]) -> None:
        self.family = rng.choice(families)
        self.settings: dict[str, Any] = {
            "max_num_batched_tokens": rng.choice((16, 40, 256)),
            "max_num_seqs": rng.choice((6, 12)),
            "speculative": rng.choice(("ngram", "off")),
            **PREEMPTIONS[rng.choice(list(PREEMPTIONS))],
        }
        shared = rng.choices(range(3, 300), k=20)
        self.prompts: list[Prompt] = [
            (shared if rng.random() < 0.5 else []) + rng.choices(range(3, 12), k=rng.randrange(1, 30)) for _ in range(6)
        ]
        usual: list[dict[str, Any]] = [
            {"max_tokens": rng.randrange(4, 20), "ignore_eos": True, "seed": seed} for seed in range(6)
        ]
        self.params = [SamplingParams(**one | kinds[rng.choice(list(kinds))]) for one in usual]
        self.adapters: list[str | None] = [None] * 6
        if self.family in WITH_ADAPTERS and rng.random() < 0.7:
            self.adapters = [rng.choice((None, "a", "b")) for _ in range(6)]

    def with_folder(self, folder: Path, adapters: Path) -> dict[str, Any]:
        """Return the settings for a model, whose adapters are written to a folder."""
        settings = self.settings | {"model": str(folder)}
        if not any(self.adapters):
            return settings
        base = AutoModelForCausalLM.from_pretrained(folder)
        for seed, name in enumerate("ab"):
            make_adapter(adapters / name, base, seed=seed)
        return settings | {"lora_dir": adapters, "max_loras": 2}

    def answers(self, engine: Engine) -> tuple[list[Generation], list[Any]]:
        """Return what it answers, twice: then the prefix cache has the prompts. Also embeddings of the prompts."""
        found = [one for _ in range(2) for one in engine.generate(self.prompts, self.params, adapters=self.adapters)]
        embedded = [one.values for one in engine.embed(self.prompts)]
        check_idle(engine)
        return found, embedded


def _shown(found: list[Generation]) -> list[Any]:
    return [
        (one.prompt_logprobs, [(each.token_ids, each.text, each.logprobs, each.finish_reason) for each in one.choices])
        for one in found
    ]


@pytest.mark.parametrize("seed", range(24))
def test_the_native_runner_answers_as_one_rank_to_the_bit(
    make_engine: MakeEngine, family_folder: FamilyFolder, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    drawn = Drawn(rng, NATIVE, KINDS)
    settings = drawn.with_folder(family_folder(drawn.family), tmp_path / "adapters")
    settings["quantization"] = rng.choice(("none", "int8", "int8_group", "int4"))
    settings["kv_cache_dtype"] = rng.choice(("bfloat16", "float16", "int8"))
    want = drawn.answers(make_engine(**settings))
    with ranks_as_threads():
        ranks = make_engine(**settings, tensor_parallel_size=2, num_threads=rng.choice((2, 3)))
    found = drawn.answers(ranks)
    assert _shown(found[0]) == _shown(want[0]), drawn.__dict__
    np.testing.assert_array_equal(found[1], want[1])


@pytest.mark.parametrize("seed", range(16))
def test_the_torch_runner_answers_as_one_rank_but_for_ties(
    make_engine: MakeEngine, family_folder: FamilyFolder, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    shape = rng.choice(((2, 1), (1, 2), (2, 2)))
    # A beam's score is a sum, in which other beams may tie.
    drawn = Drawn(rng, TORCH_FAMILIES, {name: KINDS[name] for name in KINDS if name != "beams"})
    settings = TORCH | drawn.with_folder(family_folder(drawn.family), tmp_path / "adapters")
    want = drawn.answers(make_engine(**settings))
    with torch_ranks_as_threads():
        ranks = make_engine(**settings, tensor_parallel_size=shape[0], pipeline_parallel_size=shape[1])
    found = drawn.answers(ranks)
    pairs = [
        (mine.token_ids, theirs.token_ids)
        for one, other in zip(found[0], want[0], strict=True)
        for mine, theirs in zip(one.choices, other.choices, strict=True)
    ]
    assert sum(mine != theirs for mine, theirs in pairs) <= 1, drawn.__dict__
    np.testing.assert_allclose(found[1], want[1], atol=1e-4)
