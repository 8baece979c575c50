"""Adapters on the GPU runner give the torch runner's results, also in steps that mix them with rows without one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, logits_of_step, tokens_of_step
from fixtures.random_adapters import make_adapter
from fixtures.random_families import make_family_model
from fixtures.sampling import rows_of
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.protocol import NO_ADAPTER


def _runner(folder: Path, adapters: Path, runner: str) -> Any:
    options = {"block_size": 8, "num_kv_blocks": 20, "max_model_len": 128, "max_loras": 2, "max_lora_rank": 4}
    loaded = load_model(str(folder), runner_options(runner=runner, lora_dir=adapters, **options), lambda *_: None)
    for place, name in enumerate(("all", "some")):
        loaded.runner.set_adapter(place, loaded.adapters.find(AdapterRef(name=name)))
    return loaded.runner


def _tracks() -> list[Track]:
    rng = random.Random(0)
    return [
        Track(rng.choices(range(300), k=6), [3 + i, 10 + i], adapter=place)
        for i, place in enumerate((0, 1, NO_ADAPTER, 0))
    ]


def _said(runner: Any) -> tuple[np.ndarray, list[int]]:
    """Return logits after all tokens, and after the last token of prompts and of decoding sequences."""
    tracks, again, greedy = _tracks(), _tracks(), rows_of(4, temperature=0.0)
    parts = logits_of_step(runner, [(track, 3 + i % 2) for i, track in enumerate(tracks)])
    parts += logits_of_step(runner, [(track, 1) for track in tracks])
    decoded = tokens_of_step(runner, [(track, 1) for track in tracks], greedy)
    prompted = tokens_of_step(runner, [(track, 3 + i % 2) for i, track in enumerate(again)], greedy)
    return np.concatenate(parts), [*decoded.tolist(), *prompted.tolist()]


@pytest.mark.parametrize("name", ["llama", "falcon 7b"])
def test_logits_and_tokens_equal_those_of_the_torch_runner(name: str, tmp_path: Path) -> None:
    folder = make_family_model(tmp_path / "model", name)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    make_adapter(tmp_path / "adapters" / "all", base, rank=4, seed=1)
    make_adapter(tmp_path / "adapters" / "some", base, rank=2, seed=2, only="v_proj" if name == "llama" else "dense")
    want, got = (_said(_runner(folder, tmp_path / "adapters", runner)) for runner in ("torch", "gpu"))
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-4)
    assert got[1] == want[1]
