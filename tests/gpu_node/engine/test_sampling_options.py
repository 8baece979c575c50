"""Sampling options in the engine: its tokens are the reference sampler's over transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, ResumedChoice
from penstock.kernels.reference.sampler import SamplingRow, sample_row

PROMPT = "the gate opens by pressure and the turbine never starves"
NUM_TOKENS = 40


def _said(engine: Engine, **options: Any) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    return list(engine.generate([PROMPT], params)[0].choices[0].token_ids)


def _said_by_reference(model: Any, prompt: list[int], **options: Any) -> list[int]:
    tokens = list(prompt)
    for position in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].numpy()
        seen = np.array(tokens, np.int32)
        row = SamplingRow(**options, position=position, seen=seen, num_seen_prompt=len(prompt))
        tokens.append(sample_row(logits, row))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    """The tiny model in transformers."""
    return AutoModelForCausalLM.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    """An engine on the same model."""
    return make_engine()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "presence_penalty": 2.0},
        {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": -0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": -2.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.5, "seed": 6, "min_p": 0.1},
        {"temperature": 1.5, "seed": 7, "min_p": 0.02, "top_k": 20, "top_p": 0.9, "frequency_penalty": 1.0},
    ],
)
def test_tokens_are_the_references(engine: Engine, model: Any, options: dict[str, Any]) -> None:
    prompt = engine.tokenizer.encode(PROMPT)
    assert _said(engine, **options) == _said_by_reference(model, prompt, **options)


def test_a_frequency_penalty_makes_a_text_repeat_less_and_a_negative_one_more(engine: Engine) -> None:
    different = [len(set(_said(engine, temperature=0.7, seed=1, frequency_penalty=f))) for f in (-2.0, 0.0, 2.0)]
    assert different[0] < different[1] < different[2]


def test_penalties_of_a_resumed_choice_count_what_it_said_before(engine: Engine) -> None:
    options = {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    whole = _said(engine, **options)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    logged = ResumedChoice(tuple(whole[:15]), engine.tokenizer.decode(whole[:15]), None)
    engine.add("resumed", engine.tokenizer.encode(PROMPT), params, seed=0, resume=[logged])
    rest: list[int] = []
    while engine.has_work():
        rest += [token for output in engine.step() for token in output.token_ids]
    assert rest == whole[15:]
