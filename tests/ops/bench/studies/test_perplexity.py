"""Perplexities are of the stated text, another grid computes the same function, and an aborted run resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.studies import grids
from bench.studies.perplexity import chunks_of, merged, score, settings, transformers_reader, windows_of
from bench.studies.perplexity_report import (
    BF16,
    CHUNK,
    NUM_WINDOWS,
    QUANTIZED,
    REFERENCE,
    STORED,
    WINDOW,
    Setting,
    verdicts,
)
from fixtures.tiny_model import make_tiny_model
from safetensors.torch import load_file
from torch import Tensor

IDS = np.arange(3, 63, dtype=np.int32)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def logits_of(folder: Path, tensors: grids.Tensors, **changes: Any) -> Tensor:
    """In float32: rounding to bfloat16 would hide whether the function is the same."""
    from transformers import AutoConfig, LlamaForCausalLM

    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder, **changes))
    model.load_state_dict(tensors)
    with torch.inference_mode():
        return model.eval()(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0]


@pytest.mark.parametrize("grid", grids.GRIDS)
def test_another_grid_has_other_weights_but_the_same_function(grid: str, tiny_model: Path) -> None:
    before = {name: tensor.float() for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    before.setdefault("lm_head.weight", before["model.embed_tokens.weight"])
    after = dict(before)
    grids.GRIDS[grid](after, json.loads((tiny_model / "config.json").read_text()))
    theirs = logits_of(tiny_model, before, tie_word_embeddings=False)
    torch.testing.assert_close(logits_of(tiny_model, after, tie_word_embeddings=False), theirs, rtol=1e-3, atol=1e-3)
    same = {name for name, tensor in after.items() if tensor.ndim == 2 and tensor.equal(before[name])}
    assert same <= {"model.embed_tokens.weight"}


def test_a_model_on_another_grid_is_a_folder_that_loads(tiny_model: Path, tmp_path: Path) -> None:
    exact = grids.make(tiny_model, "rotated", tmp_path / "exact")
    coarse = grids.make(tiny_model, "rotated", tmp_path / "coarse", "int4")
    logits = []
    for folder in (tiny_model, exact, coarse):
        with transformers_reader(str(folder), "float32") as (read, _):
            logits.append(read(IDS))
    off = [float((one - logits[0]).norm() / logits[0].norm()) for one in logits]
    assert 0 < off[1] < 0.1 < off[2] < 1


@pytest.mark.parametrize("name", QUANTIZED)
def test_rounding_errs_by_half_a_step_and_finds_its_own_grid_again(name: str) -> None:
    weights = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    rounded = grids.ROUNDINGS[name](weights)
    spread = float(weights.amax() - weights.amin())
    step = spread / (15 if name == "int4" else 127)
    assert 0 < float((rounded - weights).abs().max()) <= 0.51 * step
    torch.testing.assert_close(grids.ROUNDINGS[name](rounded), rounded, rtol=0, atol=2e-3 * step)


def test_windows_begin_as_the_tokenizer_begins_and_do_not_overlap() -> None:
    text = list(range(NUM_WINDOWS * WINDOW + 5))
    windows = windows_of(text, [7])
    assert len(windows) == NUM_WINDOWS
    assert all(len(ids) == WINDOW and ids[0] == 7 for ids in windows)
    inner = np.concatenate([ids[1:] for ids in windows])
    assert len(set(inner.tolist())) == len(inner)
    with pytest.raises(ValueError, match="too few"):
        windows_of(text[:WINDOW], [])


def test_chunks_read_a_window_once_in_order_into_their_own_blocks() -> None:
    ids = np.arange(CHUNK * 2 + 10, dtype=np.int32)
    plans = list(chunks_of(ids))
    assert [len(plan.token_ids) for plan in plans] == [CHUNK, CHUNK, 10]
    assert np.array_equal(np.concatenate([plan.token_ids for plan in plans]), ids)
    assert np.array_equal(np.concatenate([plan.positions for plan in plans]), ids)
    assert [int(plan.context_lens[0]) for plan in plans] == [CHUNK, 2 * CHUNK, len(ids)]
    blocks = plans[-1].block_tables[0].tolist()
    assert 0 not in blocks
    assert len(set(blocks)) == len(blocks) == math.ceil(len(ids) / 16)


def test_a_score_is_the_cross_entropy_and_differs_from_the_reference_by_what_was_changed(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(len(IDS), 80, generator=random)
    reference = score(lambda ids: logits, [IDS], tmp_path / "grid", is_reference=True)
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(IDS[1:].astype(np.int64)))
    assert reference.nll == [pytest.approx(float(expected), rel=1e-5)]
    assert (reference.kl, reference.top1) == (0.0, 1.0)

    flat = score(lambda ids: torch.zeros_like(logits), [IDS], tmp_path / "grid", is_reference=False)
    assert flat.nll == [pytest.approx(math.log(80), rel=1e-5)]
    entropy = torch.distributions.Categorical(logits=logits[:-1]).entropy().mean()
    assert flat.kl == pytest.approx(math.log(80) - float(entropy), rel=1e-4)
    assert flat.top1 < 0.2


def run_of(setting: Setting, perplexity: float) -> dict[str, Any]:
    nll = [math.log(perplexity) + 0.01 * i for i in (-1, 0, 1)]
    return {**vars(setting), "nll": nll, "kl": 0.0, "top1": 1.0}


def test_what_was_measured_is_kept_and_only_the_rest_is_run(tmp_path: Path) -> None:
    path = tmp_path / "perplexity.json"
    wanted, asked = settings(is_gguf=True), []
    assert len({setting.name for setting in wanted}) == len(wanted)

    def run(setting: Setting) -> dict[str, Any]:
        asked.append(setting)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return run_of(setting, 10.0)

    about = {
        "command": "here",
        "machine": {"date": "today", "cpu": "one", "python": "3"},
        "text": {"source": "words", "scored": 3},
    }
    with pytest.raises(KeyboardInterrupt):
        merged(path, wanted, run, about)
    assert list(json.loads(path.read_text())["runs"]) == [setting.name for setting in wanted[:3]]
    merged(path, wanted, run, about)
    assert asked == [*wanted[:4], *wanted[3:]]
    assert "## Within 1% of bfloat16's perplexity?" in path.with_suffix(".md").read_text()


def test_a_verdict_compares_with_bfloat16_on_the_same_grid() -> None:
    given = {
        REFERENCE: 10.0,
        Setting(STORED, *BF16): 10.0,
        Setting(STORED, "native", "int4", "bfloat16"): 10.05,
        Setting("scaled", *BF16): 20.0,
        Setting("scaled", "native", "int4", "bfloat16"): 21.0,
        Setting("rotated", "native", "int4", "bfloat16"): 99.0,
    }
    found = verdicts({setting.name: run_of(setting, perplexity) for setting, perplexity in given.items()})
    assert found["int4", "bfloat16"] == {STORED: pytest.approx(1.005), "scaled": pytest.approx(1.05)}
