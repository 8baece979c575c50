"""Predicted lengths cover the promised share of outputs, for any distribution, also one that changes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.queue.job_cost import MAX_GROUPS, MAX_REPORTED, WINDOW, LengthPredictor

NUM_JOBS = 1000
LIMIT = 1 << 14
Lengths = Callable[[random.Random, int], float]

DISTRIBUTIONS: dict[str, Lengths] = {
    "log-uniform": lambda rng, i: 16 * 2 ** rng.uniform(0, 9),
    "geometric": lambda rng, i: rng.expovariate(1 / 300),
    "two kinds": lambda rng, i: rng.gauss(40, 9) if rng.random() < 0.7 else rng.gauss(2000, 300),
    "heavy tail": lambda rng, i: 20 * rng.paretovariate(1.1),
    "slow drift": lambda rng, i: (100 + i) * 2 ** rng.uniform(0, 3),
    "falling": lambda rng, i: (1100 - i) * 2 ** rng.uniform(0, 3),
    "sudden jump": lambda rng, i: (100 if i < NUM_JOBS // 2 else 250) * 2 ** rng.uniform(0, 3),
}


def drawn(name: str, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [max(1, min(LIMIT - 1, round(DISTRIBUTIONS[name](rng, i)))) for i in range(NUM_JOBS)]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("quantile", [0.5, 0.8, 0.9])
def test_coverage_of_a_thousand_jobs_is_within_five_points_of_nominal(name: str, quantile: float) -> None:
    for seed in range(3):
        predictor, num_covered = LengthPredictor(quantile), 0
        for length in drawn(name, seed):
            predicted = predictor.predict("t", 100, LIMIT) or LIMIT
            num_covered += length <= predicted
            predictor.ended("t", 100, LIMIT, length, predicted)
        assert abs(num_covered / NUM_JOBS - quantile) <= 0.05


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_coverage_holds_when_short_outputs_end_first(name: str) -> None:
    """32 run at a time, a token each step; they are predicted when they start and known when they end."""
    predictor, num_covered, now = LengthPredictor(0.9), 0, 0
    running: list[tuple[int, int, int]] = []
    for length in drawn(name, 1):
        if len(running) == 32:
            now, ended, predicted = heapq.heappop(running)
            num_covered += ended <= predicted
            predictor.ended("t", 100, LIMIT, ended, predicted)
        heapq.heappush(running, (now + length, length, predictor.predict("t", 100, LIMIT) or LIMIT))
    assert abs(num_covered / (NUM_JOBS - 32) - 0.9) <= 0.05


def learned(predictor: LengthPredictor, tenant: str, num_prompt_tokens: int, lengths: list[int]) -> LengthPredictor:
    for length in lengths:
        predicted = predictor.predict(tenant, num_prompt_tokens, 4000) or 4000
        predictor.ended(tenant, num_prompt_tokens, 4000, length, predicted)
    return predictor


LENGTHS = random.Random(0).choices(range(1, 100), k=200)


def test_each_tenant_and_class_of_prompt_has_its_own_prediction() -> None:
    predictor = LengthPredictor(0.8)
    learned(predictor, "brief", 10, LENGTHS)
    learned(predictor, "brief", 1000, [10 * length for length in LENGTHS])
    learned(predictor, "long", 10, [30 * length for length in LENGTHS])
    predicted = [predictor.predict(*kind, 4000) or 0 for kind in (("brief", 10), ("brief", 1000), ("long", 10))]
    assert [60 <= length / scale <= 99 for length, scale in zip(predicted, (1, 10, 30), strict=True)] == [True] * 3


def test_unknown_tenant_gets_the_prediction_of_all_tenants() -> None:
    predictor = LengthPredictor(0.9)
    assert predictor.predict("new", 10, 4000) is None
    learned(predictor, "old", 10, LENGTHS)
    known = predictor.predict("old", 10, 4000)
    assert predictor.predict("new", 10, 4000) == predictor.predict("new", 10, 3000) == known, "limits of one magnitude"
    assert predictor.predict("new", 10, 300) is predictor.predict("new", 100, 4000) is None
    learned(predictor, "new", 10, [3])
    assert (predictor.predict("new", 10, 4000) or 0) > 3, "one is not enough for a ninth decile"


def test_after_many_outputs_longer_than_predicted_there_is_no_prediction() -> None:
    assert learned(LengthPredictor(0.9), "t", 10, list(range(1, 100))).predict("t", 10, 4000) is None


def test_reported_predictions_are_those_of_a_new_tenant() -> None:
    predictor = LengthPredictor(0.9)
    for number in range(600):
        prompt, limit = 1 << number % 20, 100 << number % 3
        predictor.ended("ab"[number % 2], prompt, limit, 10 + number % 7, 50)
    told = predictor.of_all_tenants()
    assert len(told) == MAX_REPORTED
    for prompt_bits, limit_bits, tokens in told:
        assert tokens == predictor.predict("new", (1 << prompt_bits) - 1, (1 << limit_bits) - 1) is not None


def test_a_limit_is_never_exceeded() -> None:
    predictor = learned(LengthPredictor(0.5), "t", 10, [3500] * 20)
    assert predictor.predict("t", 10, 3000) == 3000


def test_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    predictor = LengthPredictor(0.5)
    for number in range(2 * MAX_GROUPS):
        learned(predictor, f"tenant-{number}", 10, [3])
    assert len(predictor._windows) == MAX_GROUPS
    learned(predictor, "t", 10, [400] * WINDOW + [5] * WINDOW)
    assert predictor.predict("t", 10, 4000) == 5


@given(
    mine=st.lists(st.integers(1, 60), max_size=20),
    others=st.lists(st.integers(1, 60), max_size=20),
    limit=st.integers(32, 63),
)
def test_the_remaining_length_shrinks_with_each_token_until_earlier_outputs_are_outlived(
    mine: list[int], others: list[int], limit: int
) -> None:
    predictor = LengthPredictor(0.5)
    for tenant, lengths in (("t", mine), ("u", others)):
        for length in lengths:
            predictor.ended(tenant, 10, limit, length, predictor.predict(tenant, 10, limit) or limit)
    remaining = [predictor.remaining("t", 10, limit, done) for done in range(limit)]
    ends = [done + more for done, more in enumerate(remaining)]
    assert min(remaining) >= 1 and max(ends) <= limit
    for done in range(1, limit):
        assert ends[done] >= ends[done - 1]
        if done < ends[done - 1] and ends[done] > ends[done - 1]:
            assert done in mine + others, "the estimate grows only where an earlier output ended"


def test_a_choice_longer_than_all_earlier_outputs_is_assumed_to_be_halfway() -> None:
    predictor = learned(LengthPredictor(0.5), "t", 10, [20] * 9)
    assert [predictor.remaining("t", 10, 4000, done) for done in (0, 19, 300, 3000)] == [20, 1, 300, 1000]
    assert [LengthPredictor(0.5).remaining("new", 10, 4000, done) for done in (0, 255, 256)] == [256, 1, 256]
