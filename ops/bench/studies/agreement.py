"""How far a runner's logits are from transformers', over many texts in mixed batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from fixtures.plans import Track, logits_of_step
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.source import ModelSource, OpenModel
from penstock.gpu_node.model.loading import load
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import LoadedModel

NUM_PROMPTS = 50
MAX_LENGTH = 160
BLOCK = 16


def prompts() -> list[list[int]]:
    """Texts of any length up to MAX_LENGTH, most of which go beyond every window and original length."""
    rng = random.Random(0)
    return [rng.choices(range(384), k=rng.randint(8, MAX_LENGTH)) for _ in range(NUM_PROMPTS)]


def wanted(model: Any, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """The logits of one of transformers' models."""
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0].numpy() for text in texts]


def measure(
    source: ModelSource, setting: tuple[str, str, str], texts: list[list[int]], want: list[NDArray[np.float32]]
) -> dict[str, Any]:
    """The largest error, the errors' size beside the logits' spread, and how often the best token is the same.

    setting: runner, dtype and quantization.
    """
    with _loaded(source, setting) as loaded:
        got, all_want = (np.concatenate(x) for x in (_logits_together(loaded.runner, texts), want))
    return {
        "arithmetic": loaded.arithmetic,
        "max_error": float(np.abs(got - all_want).max()),
        "rms_error": float(np.sqrt(np.square(got - all_want).mean()) / all_want.std()),
        "same_best": float((got.argmax(-1) == all_want.argmax(-1)).mean()),
    }


def cell(run: dict[str, Any]) -> str:
    """What `measure` found, for a table."""
    return f"{run['rms_error']:.2g}, {run['same_best']:.2%}"


@contextmanager
def _loaded(source: ModelSource, setting: tuple[str, str, str]) -> Iterator[LoadedModel]:
    runner, dtype, quantization = setting
    options = RunnerOptions(
        runner=runner,
        dtype=dtype,
        quantization=quantization,
        block_size=BLOCK,
        num_kv_blocks=NUM_PROMPTS * -(-MAX_LENGTH // BLOCK),
        max_num_seqs=NUM_PROMPTS,
        weight_cache=False,
    )
    # What a GGUF file says of config and tokenizer lies beside the model that it was made of.
    opened = OpenModel(source, None if source.gguf is None else GgufFile(source.gguf))
    with mock.patch.object(load, "open_model", lambda *_: opened):
        yield load.load_model(str(source.folder), options, lambda stage, fraction: None)


def _logits_together(runner: Any, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """Of all texts in mixed steps: each takes part in chunks of other sizes until it is read."""
    width = -(-MAX_LENGTH // BLOCK)
    tracks = [Track(text, range(1 + i * width, 1 + (i + 1) * width)) for i, text in enumerate(texts)]
    rng, parts = random.Random(1), [[] for _ in texts]
    while any(track.left for track in tracks):
        step = [(track, min(track.left, rng.choice((1, 7, 20)))) for track in tracks if track.left]
        for (track, _), logits in zip(step, logits_of_step(runner, step), strict=True):
            parts[next(i for i, one in enumerate(tracks) if one is track)].append(logits)
    return [np.concatenate(part) for part in parts]
