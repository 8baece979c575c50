"""Every family against transformers: the same logits and tokens, however the prompt is split into chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.prompts import mixed_prompts
from fakes.runners.runner_options import runner_options
from fakes.ties import num_departures
from fixtures.plans import Track, logits_of_step
from fixtures.random_families import FAMILIES, GROWN_BY_LENGTH, LOGITS_ONLY, ORIGINAL_LENGTH, WHOLE_FAMILIES
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.loading.load import load_model

MAX_LOGIT_ERROR = 1e-4
LENGTH = 300
PREFIX = 160
"""Tokens whose blocks another sequence uses too."""
MAX_PROMPT = 200
"""Most of the prompts are longer than any window here, and than what scaled positions were made for."""
OPTIONS = runner_options(num_kv_blocks=60, max_model_len=LENGTH)

Folder = Callable[[str], Path]


def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@torch.inference_mode()
def _logits(model: Any, token_ids: list[int], *, one_by_one: bool) -> NDArray[np.float32]:
    if not one_by_one:
        return np.asarray(model(torch.tensor([token_ids])).logits[0])
    past, rows = None, []
    for token_id in token_ids:
        out = model(torch.tensor([[token_id]]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        rows.append(out.logits[0, -1])
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("name", FAMILIES | WHOLE_FAMILIES)
def test_logits_equal_transformers_in_one_step_in_chunks_and_after_a_prefix(family_folder: Folder, name: str) -> None:
    runner: Any = load_model(str(family_folder(name)), OPTIONS, lambda stage, fraction: None).runner
    whole, cut, other = (random.Random(seed).choices(range(384), k=LENGTH) for seed in (0, 0, 1))
    # Rotations that depend on how long a text has become are known for texts that grow token by token.
    want = _logits(_model(family_folder(name)), whole, one_by_one=name == "llama dynamic")
    blocks = [*range(1, 60)]
    random.Random(2).shuffle(blocks)
    tracks = Track(whole, blocks[:19]), Track(cut, blocks[19:38]), Track(other, blocks[38:57])
    (got,) = logits_of_step(runner, [(tracks[0], LENGTH)])
    np.testing.assert_allclose(got, want, rtol=0, atol=MAX_LOGIT_ERROR)
    after_prefix = Track(whole, [*blocks[: PREFIX // 16], *blocks[19:28]], done=PREFIX)
    (got,) = logits_of_step(runner, [(after_prefix, LENGTH - PREFIX)])
    np.testing.assert_allclose(got, want[PREFIX:], rtol=0, atol=MAX_LOGIT_ERROR)
    in_parts = [
        logits_of_step(runner, [(tracks[1], count), (tracks[2], 7 if count == 1 else 1)])[0]
        for count in (1, 130, 3, 160, *(1,) * 6)
    ]
    np.testing.assert_allclose(np.concatenate(in_parts), want, rtol=0, atol=MAX_LOGIT_ERROR)


EACH_RUN = ("llama", "mistral", "falcon 7b", "gpt-neox")
"""The native runner is tested so with every family, in tests/gpu_node/model/native/test_correctness.py."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EACH_RUN else pytest.mark.slow)
        for name in FAMILIES | WHOLE_FAMILIES
        if name not in (*GROWN_BY_LENGTH, *LOGITS_ONLY)
    ],
)
def test_greedy_tokens_of_a_batch_equal_transformers(family_folder: Folder, name: str) -> None:
    engine = Engine(
        EngineConfig(
            model=str(family_folder(name)),
            dtype="float32",
            num_kv_blocks=40,
            num_swap_blocks=64,
            preemption="swap",
            max_num_batched_tokens=96,
            max_num_seqs=50,
            num_threads=1,
        )
    )
    prompts = [prompt[:MAX_PROMPT] for prompt in mixed_prompts(engine, 14)]
    generations = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    stats = engine.stats()
    assert min(stats.num_swaps, stats.prefix_hit_tokens) > 0
    pairs = [(generation.prompt_token_ids, generation.choices[0].token_ids) for generation in generations]
    assert len({token for _, said in pairs for token in said}) >= 20
    assert num_departures(_model(family_folder(name)), pairs) <= 1


def test_longrope_takes_its_short_factors_where_no_text_grows_longer(family_folder: Folder) -> None:
    options = runner_options(num_kv_blocks=60, max_model_len=ORIGINAL_LENGTH)
    runner: Any = load_model(str(family_folder("phi3")), options, lambda stage, fraction: None).runner
    token_ids = random.Random(0).choices(range(384), k=ORIGINAL_LENGTH)
    (got,) = logits_of_step(runner, [(Track(token_ids, range(1, 8)), ORIGINAL_LENGTH)])
    want = _logits(_model(family_folder("phi3")), token_ids, one_by_one=False)
    np.testing.assert_allclose(got, want, rtol=0, atol=MAX_LOGIT_ERROR)
