"""The native sampler chooses what the reference chooses."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.cover import examples
from fakes.single_kernels import Floats, Single
from fixtures.sampling import SamplingCase, level_draws, row_of, rows_of
from fixtures.sampling_cases import sampling_cases
from hypothesis import given, settings
from numpy.typing import NDArray

from penstock.kernels.reference.sampler import FAILED_TOKEN, SamplingRow, logprobs_of, sample_row

RULES: dict[str, dict[str, float]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}


def _tokens(kernels: Single, case: SamplingCase) -> NDArray[np.int32]:
    chosen = [kernels.sample_row(logits, row_of(case.rows, i)) for i, logits in enumerate(case.logits)]
    return np.array(chosen, np.int32)


@settings(max_examples=examples(80))
@given(sampling_cases())
def test_tokens_equal_those_of_the_reference(kernels: Single, case: SamplingCase) -> None:
    assert case.disagreements(_tokens(kernels, case)) == []


def test_a_row_draws_the_number_that_every_sampler_draws(kernels: Single) -> None:
    case, want = level_draws()
    assert _tokens(kernels, case).tolist() == want


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 49152])
@pytest.mark.parametrize("rules", RULES)
def test_vocabularies_of_every_size(kernels: Single, vocab: int, rules: str) -> None:
    rng = np.random.default_rng(vocab)
    count = 6
    logits = (rng.standard_normal((count, vocab)) * 3).astype(np.float32)
    seen = [rng.integers(0, vocab, 30).astype(np.int32) for _ in range(count)]
    rows = rows_of(count, seed=np.arange(count), num_seen_prompt=10, seen=seen, **RULES[rules])
    case = SamplingCase(logits, rows)
    assert case.disagreements(_tokens(kernels, case)) == []


@pytest.mark.parametrize("rules", ["top_k", "top_p", "all"])
def test_logits_may_differ_by_denormal_numbers(kernels: Single, rules: str) -> None:
    logits = np.zeros((4, 40), np.float32)
    logits[:, ::3] = -np.float32(1e-44)
    case = SamplingCase(logits, rows_of(4, seed=np.arange(4), **RULES[rules]))
    assert case.disagreements(_tokens(kernels, case)) == []


def test_penalties_are_two_rounded_steps(kernels: Single) -> None:
    """Fused into one, or the other way around, another token would win by the last bit."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        logits = rng.standard_normal(2).astype(np.float32)
        presence, frequency = (np.float32(penalty) for penalty in rng.uniform(-2, 2, 2))
        count = int(rng.integers(1, 9))
        stepwise = np.float32(np.float32(logits[0] - np.float32(frequency * np.float32(count))) - presence)
        row = SamplingRow(
            temperature=0.0,
            presence_penalty=float(presence),
            frequency_penalty=float(frequency),
            seen=np.zeros(count, np.int32),
        )
        for other, want in ((np.nextafter(stepwise, np.float32(np.inf)), 1), (stepwise, 0)):
            logits[1] = other
            assert kernels.sample_row(logits, row) == sample_row(logits, row) == want


@pytest.mark.parametrize("vocab", [3, 16, 50])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_can_choose_nothing_fails(kernels: Single, vocab: int, temperature: float) -> None:
    for place in (0, vocab // 2, vocab - 1):
        for odd in (np.nan, np.inf):
            logits = np.zeros(vocab, np.float32)
            logits[place] = odd
            row = SamplingRow(temperature=temperature)
            assert kernels.sample_row(logits, row) == FAILED_TOKEN
            banned = SamplingRow(temperature=temperature, banned=np.array([place], np.int32))
            assert kernels.sample_row(logits, banned) == FAILED_TOKEN
    everything = SamplingRow(temperature=temperature, banned=np.arange(vocab, dtype=np.int32))
    assert kernels.sample_row(np.zeros(vocab, np.float32), everything) == FAILED_TOKEN
    assert kernels.sample_row(np.full(vocab, -np.inf, np.float32), SamplingRow()) == FAILED_TOKEN


def test_impossible_tokens_are_never_drawn(kernels: Single) -> None:
    logits = np.full(40, -np.inf, np.float32)
    logits[[3, 17, 39]] = 0
    rows = rows_of(500)
    drawn = {kernels.sample_row(logits, row_of(rows, i)) for i in range(500)}
    assert drawn == {3, 17, 39}


def test_a_rows_logits_may_overflow_through_a_penalty(kernels: Single) -> None:
    logits = np.array([0, 9, 1], np.float32)
    row = SamplingRow(temperature=0.0, seen=np.array([1], np.int32), repetition_penalty=1e-39)
    assert kernels.sample_row(logits, row) == sample_row(logits, row) == FAILED_TOKEN


def test_logits_beyond_the_last_are_not_read(kernels: Single) -> None:
    """The vocabulary ends inside a vector; what lies behind it is larger, and not finite."""
    for vocab in (1, 17, 31):
        block: Floats = np.full(vocab + 16, np.nan, np.float32)
        block[:vocab] = -1
        block[vocab - 1] = 5
        assert kernels.sample_row(block[:vocab], SamplingRow(temperature=0.0)) == vocab - 1


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 40, 1000, 49152])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_logprobs_equal_the_reference(kernels: Single, vocab: int, scale: float) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal(vocab) * scale).astype(np.float32)
    logits[rng.integers(0, vocab, vocab // 3)] = np.float32(scale)  # of equal ones the lowest come first
    if vocab > 1:
        logits[rng.integers(0, vocab)] = -np.inf
    for count in {0, 1, min(20, vocab)}:
        token = int(rng.integers(0, vocab))
        ids, values = kernels.logprobs(logits, token, count)
        want = logprobs_of(logits, token, count)
        np.testing.assert_allclose(values, [value for _, value in want], rtol=1e-6, atol=2e-6)
        sure = [i for i in range(1 + count) if i == 0 or np.isfinite(want[i][1])]
        assert [int(ids[i]) for i in sure] == [want[i][0] for i in sure]
