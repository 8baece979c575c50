"""Beams equal those of transformers in float32, except for the order of beams with equal scores."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.engine_runs import TORCH, check_idle
from transformers import AutoModelForCausalLM

from penstock.contract.sampling import SamplingParams
from penstock.gpu_node.engine import Engine

NUM_PROMPTS, PROMPT_LENGTH, MAX_TOKENS = 20, 19, 12
END_IDS = [*range(40, 72)]
"""So many that beams of a random model end within a few tokens."""
TOLERANCE = 1e-4
"""Scores that differ by less count as equal: float32 adds up logits in another order."""


@cache
def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(44)
    return [[rng.randrange(3, 250) for _ in range(PROMPT_LENGTH)] for _ in range(NUM_PROMPTS)]


def of_transformers(folder: Path, width: int, **options: Any) -> list[list[tuple[int, ...]]]:
    """Return the beams of each prompt, without the padding after their end."""
    ids = torch.tensor(prompts())
    given = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": END_IDS}
    widths = {"num_beams": width, "num_return_sequences": width}
    found = model_of(folder).generate(ids, attention_mask=torch.ones_like(ids), **given, **widths, **options)
    rows = [tuple(row[PROMPT_LENGTH:]) for row in found.tolist()]
    cut = [row[: next((at + 1 for at, one in enumerate(row) if one in END_IDS), MAX_TOKENS)] for row in rows]
    return [cut[at : at + width] for at in range(0, len(cut), width)]


def score(folder: Path, prompt: list[int], beam: tuple[int, ...], length_penalty: float) -> float:
    ids = torch.tensor([[*prompt, *beam]])
    with torch.inference_mode():
        values = model_of(folder)(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    total = float(values.gather(1, ids[0, len(prompt) :, None]).sum())
    divisor: float = len(beam) ** length_penalty
    return total / divisor


@pytest.mark.parametrize(
    ("width", "options"),
    [
        (2, {}),
        (4, {}),
        (8, {}),
        (4, {"early_stopping": True, "length_penalty": 0.5}),
        (4, {"early_stopping": "never", "length_penalty": 2.0}),
        (2, {"early_stopping": "never", "length_penalty": -1.0}),
    ],
)
def test_beams_equal_those_of_transformers(
    make_engine: Callable[..., Engine], tiny_model: Path, width: int, options: dict[str, Any]
) -> None:
    """In a batch in which searches wait for blocks and are preempted."""
    engine = make_engine(**TORCH, num_kv_blocks=60, max_num_batched_tokens=48, max_num_seqs=16, block_size=8)
    params = SamplingParams(
        n=width, use_beam_search=True, max_tokens=MAX_TOKENS, ignore_eos=True, stop_token_ids=END_IDS, **options
    )
    generations = engine.generate(prompts(), params)
    num_equal = num_ended = 0
    for prompt, got, want in zip(prompts(), generations, of_transformers(tiny_model, width, **options), strict=True):
        beams = [choice.token_ids for choice in got.choices]
        assert len(set(beams)) == width
        num_ended += sum(choice.finish_reason == "stop" for choice in got.choices)
        num_equal += beams == want
        penalty = options.get("length_penalty", 1.0)
        for ours, theirs in zip(beams, want, strict=True):
            if ours != theirs:
                scores = [score(tiny_model, prompt, one, penalty) for one in (ours, theirs)]
                assert scores[0] == pytest.approx(scores[1], abs=TOLERANCE)
    assert num_equal >= NUM_PROMPTS - 1
    assert num_ended > 0
    check_idle(engine)
