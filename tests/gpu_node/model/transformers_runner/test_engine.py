"""An engine over a module of transformers: everything that a request may ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.prompts import mixed_prompts
from fakes.ties import num_departures
from fixtures.small_transformers import quiet
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig

Folder = Callable[[str], Path]
MAX_ERROR = 1e-3


def engine_of(folder: Path, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"num_kv_blocks": 64, "dtype": "float32", "num_threads": 1, "max_num_batched_tokens": 64}
    with quiet():
        return Engine(EngineConfig(model=str(folder), **{"runner": "auto"} | settings | changes))


def alone(folder: Path) -> Any:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("architecture", "preemption"),
    [
        ("ArceeForCausalLM", "swap"),
        ("Gemma4ForCausalLM", "recompute"),
        ("BambaForCausalLM", "swap"),
        ("FalconForCausalLM", "recompute"),
    ],
)
def test_greedy_tokens_are_those_of_transformers_after_preemption_and_prefix_hits(
    class_folder: Folder, architecture: str, preemption: Any
) -> None:
    engine = engine_of(
        class_folder(architecture),
        runner="transformers",
        num_kv_blocks=40,
        num_swap_blocks=64,
        preemption=preemption,
        max_num_seqs=50,
    )
    prompts = [prompt[:200] for prompt in mixed_prompts(engine, 14)]
    generations = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    stats = engine.stats()
    assert min(stats.num_preemptions, stats.prefix_hit_tokens) > 0
    pairs = [(generation.prompt_token_ids, generation.choices[0].token_ids) for generation in generations]
    assert num_departures(alone(class_folder(architecture)), pairs) <= 1


def test_logprobs_scores_and_embeddings_are_those_of_the_module(class_folder: Folder) -> None:
    folder = class_folder("ArceeForCausalLM")
    engine, module = engine_of(folder), alone(folder)
    prompts = [prompt[:60] for prompt in mixed_prompts(engine, 5)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for generation in engine.generate(prompts, params):
        prompt, (choice,) = generation.prompt_token_ids, generation.choices
        with torch.inference_mode():
            wanted = module(torch.tensor([[*prompt, *choice.token_ids]])).logits[0].log_softmax(-1).numpy()
        said = [*generation.prompt_logprobs[1:], *choice.logprobs]
        tokens = [*prompt[1:], *choice.token_ids]
        assert len(said) == len(tokens)
        for entry, row, token in zip(said, wanted, tokens, strict=False):
            assert entry.token_ids[0] == token
            np.testing.assert_allclose(entry.values, row[list(entry.token_ids)], rtol=0, atol=MAX_ERROR)
    for pooling in ("mean", "last"):
        for found, prompt in zip(engine.embed(prompts, pooling=pooling), prompts, strict=True):
            with torch.inference_mode():
                states = module.model(torch.tensor([prompt])).last_hidden_state[0].numpy()
            state = states.mean(0) if pooling == "mean" else states[-1]
            np.testing.assert_allclose(found.values, state / np.linalg.norm(state), rtol=0, atol=MAX_ERROR)


def test_structured_outputs_hold_beside_other_sequences(class_folder: Folder) -> None:
    engine = engine_of(class_folder("ArceeForCausalLM"))
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    params = [
        SamplingParams(max_tokens=60, seed=1, structured_outputs={"json": {**schema, "additionalProperties": False}}),
        SamplingParams(max_tokens=20, seed=2, ignore_eos=True),
    ]
    held, free = engine.generate(["Say it: ", "Say it: "], params)
    assert isinstance(json.loads(held.choices[0].text)["a"], bool)
    assert len(free.choices[0].token_ids) == 20
