"""The native runner's hidden states after the final norm: the checkpoint's, and the same bits in any step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.transformers_logits import bfloat16_model
from fixtures.plans import Track, plan_of
from fixtures.sampling import rows_of
from numpy.typing import NDArray

from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import PooledTokens

LoadNative = Callable[..., NativeRunner]
MOST = {"none": 0.005, "int8": 0.02}
"""Largest 1 - cosine similarity, by quantization. The weights of these models are random."""
SHAPES: list[dict[str, Any]] = [
    {},
    {"hidden_size": 40, "intermediate_size": 33},
    {"hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 1},
    {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
]


def _hidden(runner: NativeRunner, token_ids: list[int], cuts: list[int]) -> NDArray[np.float32]:
    """Return the hidden states of a prompt that is computed in chunks beside another one, which samples."""
    track, other = Track(token_ids, range(1, 10)), Track(token_ids[::-1], range(20, 30))
    parts = []
    for end in cuts:
        count = end - track.done
        plan = plan_of([(other, 1), (track, count)], rows_of(2, temperature=0.0))
        tokens = np.arange(1, 1 + count, dtype=np.int32)
        result = runner.submit(replace(plan, pooled=PooledTokens(tokens, np.ones_like(tokens)))).result()
        assert result.hidden is not None
        parts.append(result.hidden)
        track.done, other.done = end, other.done + 1
    return np.concatenate(parts)


@pytest.mark.parametrize("quantization", MOST)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hidden_states_equal_those_of_the_checkpoint(
    llama: Callable[..., Path], load_native: LoadNative, shape: dict[str, Any], quantization: str
) -> None:
    folder, token_ids = llama(**shape), random.Random(0).choices(range(131), k=50)
    with torch.inference_mode():
        want = bfloat16_model(folder).model(torch.tensor([token_ids])).last_hidden_state[0].numpy()
    runner = load_native(folder, quantization=quantization)
    got = _hidden(runner, token_ids, [50])
    cosines = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
    assert 1 - cosines.mean() < MOST[quantization]
    # The lengths as well: the norm's weights are in the states of a rotated model too.
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1).mean(), np.linalg.norm(want, axis=-1).mean(), rtol=0.02)
    np.testing.assert_array_equal(_hidden(runner, token_ids, [7, 8, 40, 49, 50]), got)


def test_hidden_states_of_a_model_with_layer_norms(family: Callable[..., Path], load_native: LoadNative) -> None:
    folder, token_ids = family("falcon 7b"), random.Random(0).choices(range(131), k=50)
    with torch.inference_mode():
        want = bfloat16_model(folder).transformer(torch.tensor([token_ids])).last_hidden_state[0].numpy()
    got = _hidden(load_native(folder), token_ids, [50])
    np.testing.assert_allclose(got, want, rtol=0, atol=0.05 * np.abs(want).max())


def test_tokens_are_the_same_with_and_without_hidden_states(
    llama: Callable[..., Path], load_native: LoadNative
) -> None:
    runner, token_ids = load_native(llama()), random.Random(0).choices(range(131), k=40)
    plan = plan_of([(Track(token_ids, range(1, 4)), 40)], rows_of(1, temperature=0.0))
    tokens = np.array([0, 38, 39], np.int32)
    pooled = replace(plan, pooled=PooledTokens(tokens, np.zeros_like(tokens)))
    assert runner.submit(plan).result().tokens.tolist() == runner.submit(pooled).result().tokens.tolist()
