"""The reference sampler: each rule by numbers that can be checked by hand, and all of them against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.kernels.philox import sampling_uniform
from penstock.kernels.reference.sampler import FAILED_TOKEN, SamplingRow, choose, choose_each, sample_row

NUM_DRAWS = 2000
SHARES = (0.5, 0.3, 0.15, 0.05)


def _ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def _shares(logits: Any, **rules: Any) -> NDArray[np.float64]:
    """How often each token is chosen over evenly spaced random numbers: its probability, within 1 / NUM_DRAWS."""
    row, scores = SamplingRow(**rules), np.asarray(logits, np.float32)
    tokens = choose_each(scores, row, (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS)
    return np.bincount(tokens, minlength=len(scores)) / NUM_DRAWS


def _softmax(scores: Any) -> NDArray[np.float64]:
    weights = np.exp(np.asarray(scores, np.float64))
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, 4),
        ({"min_p": 0.31}, 2),
        ({"min_p": 0.29}, 3),
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.31, "temperature": 2.0}, 4),  # temperature first: the last is then 0.316 of the best
        ({"top_k": 3}, 3),
        ({"top_k": 9}, 4),
        ({"top_p": 0.49}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.81}, 3),
        ({"top_p": 1e-6}, 1),
        ({"top_p": 0.6}, 2),
        ({"top_p": 0.6, "top_k": 2}, 1),  # of the two that are left, the best holds 0.625
        ({"top_p": 0.6, "min_p": 0.5}, 1),
        ({"top_k": 3, "min_p": 0.5}, 2),
    ],
)
def test_limits_keep_the_best_tokens_and_renormalize_them(rules: dict[str, Any], kept: int) -> None:
    temperature = rules.get("temperature", 1.0)
    want = np.zeros(4)
    want[:kept] = _softmax(np.log(SHARES[:kept]) / temperature)
    np.testing.assert_allclose(_shares(np.log(SHARES), **rules), want, atol=1 / NUM_DRAWS)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [({"top_k": 1}, [0]), ({"top_k": 2}, [0, 1, 3]), ({"top_p": 0.5}, [0, 1, 3]), ({"min_p": 0.5}, [0, 1, 3])],
)
def test_tokens_that_tie_with_the_last_kept_one_are_kept(rules: dict[str, Any], kept: list[int]) -> None:
    logits = np.log(np.array([0.4, 0.25, 0.1, 0.25]))
    assert np.flatnonzero(_shares(logits, **rules)).tolist() == kept


def test_zero_temperature_takes_the_lowest_of_the_best() -> None:
    logits = np.array([1, 3, 2, 3], np.float32)
    assert sample_row(logits, SamplingRow(temperature=0.0)) == 1
    assert sample_row(logits, SamplingRow(temperature=0.0, banned=_ids(1))) == 3


def test_a_token_is_found_at_its_place_in_the_order_of_ids() -> None:
    logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    uniforms = (0.0, 0.249, 0.251, 0.749, 0.751, np.nextafter(1, 0))
    assert [choose(logits, SamplingRow(), uniform) for uniform in uniforms] == [0, 0, 1, 1, 2, 2]
    assert [choose(logits, SamplingRow(banned=_ids(0, 2)), uniform) for uniform in uniforms] == [1] * 6


def test_presence_and_frequency_count_the_output_and_not_the_prompt() -> None:
    rules = {"seen": _ids(0, 0, 1, 2, 2), "num_seen_prompt": 2}
    np.testing.assert_allclose(
        _shares([0.0] * 4, presence_penalty=0.5, **rules), _softmax([0, -0.5, -0.5, 0]), atol=1 / NUM_DRAWS
    )
    np.testing.assert_allclose(
        _shares([0.0] * 4, frequency_penalty=0.75, **rules), _softmax([0, -0.75, -1.5, 0]), atol=1 / NUM_DRAWS
    )
    np.testing.assert_allclose(
        _shares([0.0] * 4, presence_penalty=-0.5, frequency_penalty=-0.75, **rules),
        _softmax([0, 1.25, 2, 0]),
        atol=1 / NUM_DRAWS,
    )


def test_repetition_penalty_comes_first_and_counts_the_prompt_too() -> None:
    logits, rules = [2.0, 2.0, -1.0, 0.0], {"seen": _ids(0, 0, 1, 2), "num_seen_prompt": 2, "repetition_penalty": 2.0}
    np.testing.assert_allclose(_shares(logits, **rules), _softmax([1, 1, -2, 0]), atol=1 / NUM_DRAWS)
    np.testing.assert_allclose(
        _shares(logits, presence_penalty=1.0, **rules), _softmax([1, 0, -3, 0]), atol=1 / NUM_DRAWS
    )


def test_biases_come_before_the_penalties_as_in_transformers() -> None:
    logits = np.array([1.0, -0.5, 2.0, 0.0], np.float32)
    bias = {0: -2.0, 1: 3.0, 3: 0.25}
    processors = LogitsProcessorList(
        (
            SequenceBiasLogitsProcessor([[[token], added] for token, added in bias.items()]),
            RepetitionPenaltyLogitsProcessor(1.5),
        )
    )
    seen = _ids(0, 1, 2)
    want = processors(torch.from_numpy(seen)[None].long(), torch.from_numpy(logits)[None])[0]
    rules = {"biased": _ids(*bias), "biases": np.array([*bias.values()], np.float32)}
    got = _shares(logits, **rules, seen=seen, repetition_penalty=1.5)
    np.testing.assert_allclose(got, _softmax(want), atol=1 / NUM_DRAWS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_tokens_of_a_mask_are_chosen(temperature: float) -> None:
    logits = np.arange(70, dtype=np.float32)
    row = SamplingRow(temperature=temperature, mask=np.array([1 << 31 | 1, 0, 1 << 3], np.uint32))
    assert {choose(logits, row, uniform) for uniform in (0.01, 0.5, 0.999)} == {67}
    assert choose(logits, replace(row, banned=_ids(67)), 0.999) == 31
    assert choose(logits, replace(row, mask=np.zeros(3, np.uint32)), 0.5) == FAILED_TOKEN


def test_a_favoured_token_that_is_banned_stays_out() -> None:
    rules = {"seen": _ids(1, 1), "frequency_penalty": -2.0, "banned": _ids(1)}
    assert _shares([0.0, 0.0], **rules).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_can_choose_nothing_fails(temperature: float) -> None:
    row = SamplingRow(temperature=temperature)
    for odd in (np.nan, np.inf):
        assert sample_row(np.array([0, odd, 1], np.float32), row) == FAILED_TOKEN
        assert sample_row(np.array([0, odd, 1], np.float32), replace(row, banned=_ids(1))) == FAILED_TOKEN
    assert sample_row(np.full(3, -np.inf, np.float32), row) == FAILED_TOKEN
    assert sample_row(np.zeros(2, np.float32), replace(row, banned=_ids(0, 1))) == FAILED_TOKEN
    overflowing = replace(row, seen=_ids(1), repetition_penalty=1e-39)
    assert sample_row(np.array([0, 9, 1], np.float32), overflowing) == FAILED_TOKEN
    assert sample_row(np.array([0, -np.inf, 1], np.float32), replace(row, temperature=0.0)) == 2


def test_small_temperatures_do_not_break() -> None:
    logits = np.array([0.0, 3.0, 2.9, -1.0], np.float32)
    assert [sample_row(logits, SamplingRow(temperature=t, seed=7)) for t in (1e-40, 1e-30, 0.001)] == [1, 1, 1]


def test_a_row_draws_its_own_random_number() -> None:
    logits, row = np.zeros(1000, np.float32), SamplingRow(seed=1 << 63, choice=3, position=9)
    (uniform,) = sampling_uniform(np.array([1 << 63], np.uint64), np.array([3], np.int32), np.array([9], np.int32))
    assert sample_row(logits, row) == choose(logits, row, float(uniform)) == int(uniform * 1000)
    others = [replace(row, seed=5), replace(row, choice=4), replace(row, position=10)]
    assert sample_row(logits, row) not in [sample_row(logits, other) for other in others]


@given(
    seed=st.integers(0, 1 << 32),
    temperature=st.floats(0.2, 3),
    min_p=st.floats(0.001, 0.6),
    top_k=st.integers(1, 30),
    top_p=st.floats(0.1, 0.99),
    penalty=st.floats(0.5, 2),
    uniform=st.floats(0, 0.999),
)
def test_all_rules_together_equal_those_of_transformers(
    seed: int, temperature: float, min_p: float, top_k: int, top_p: float, penalty: float, uniform: float
) -> None:
    logits = np.random.default_rng(seed).standard_normal(60) * 3
    rules = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(penalty),
            TemperatureLogitsWarper(temperature),
            MinPLogitsWarper(min_p),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ]
    )
    scores = rules(torch.tensor([[5, 5, 9]]), torch.from_numpy(logits)[None])
    cumulative = torch.softmax(scores, -1)[0].cumsum(0).numpy()
    row = SamplingRow(
        temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seen=_ids(5, 5, 9)
    )
    token = choose(logits.astype(np.float32), row, uniform)
    # The reference's logits are float32, so a boundary between two tokens may lie a little elsewhere.
    before = cumulative[token - 1] if token else 0.0
    assert before - 1e-5 <= uniform <= cumulative[token] + 1e-5
