"""Greedy tokens equal transformers' in float32, with every feature enabled that could change them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.engine_runs import TORCH
from fakes.prompts import mixed_prompts
from fakes.ties import num_departures
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig, EngineStats, Generation


def _pairs(generations: list[Generation]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(generation.prompt_token_ids, generation.choices[0].token_ids) for generation in generations]


def _all_was_on(stats: EngineStats) -> bool:
    return stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0


def test_tiny_model_generates_the_tokens_of_transformers(make_engine: Callable[..., Engine], tiny_model: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    engine = make_engine(**TORCH, num_kv_blocks=40, max_num_batched_tokens=48, max_num_seqs=16)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = mixed_prompts(engine, 24)
    generations = engine.generate(prompts, params)
    assert _all_was_on(engine.stats())
    different = 0
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        different += tuple(want[0, len(prompt) :].tolist()) != generation.choices[0].token_ids
    assert different == num_departures(model, _pairs(generations)) <= 1


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_that_of_transformers(
    make_engine: Callable[..., Engine], tiny_model: Path, penalty: float
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    engine = make_engine(**TORCH)
    prompt = engine.tokenizer.encode("the gate opens by pressure")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=penalty)
    ids = torch.tensor([prompt])
    want = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        repetition_penalty=penalty,
    )
    (generation,) = engine.generate([prompt], params)
    assert list(generation.choices[0].token_ids) == want[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.model
def test_demo_model_generates_the_tokens_of_transformers(demo_model: Path) -> None:
    engine = Engine(
        EngineConfig(
            model=str(demo_model), dtype="float32", kv_cache_tokens=640, max_num_batched_tokens=96, max_num_seqs=32
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    generations = engine.generate(mixed_prompts(engine, 50), params)
    assert _all_was_on(engine.stats())
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    assert num_departures(model, _pairs(generations)) <= 1
