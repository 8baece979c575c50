"""Workloads: the same requests on every run, with the shapes that the tables state."""

from __future__ import annotations

import itertools
import statistics

import pytest
from bench.workload import (
    FIRST_ORDINARY_TOKEN,
    LAST_ORDINARY_TOKEN,
    WARM_UP,
    WORKLOADS,
    BenchRequest,
    Workload,
    offline_mix,
    poisson,
)

MAX_MODEL_LEN = 8192


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    assert WORKLOADS[name]() == WORKLOADS[name]()


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_ordinary_tokens_and_fit_the_demo_model(name: str) -> None:
    workload = WORKLOADS[name]()
    assert workload.requests
    for request in workload.requests:
        assert all(FIRST_ORDINARY_TOKEN <= token < LAST_ORDINARY_TOKEN for token in request.prompt)
        assert 1 <= len(request.prompt) < len(request.prompt) + request.num_output <= MAX_MODEL_LEN


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_warm_up_leaves_no_prefix_of_the_workload_in_a_cache(name: str) -> None:
    warm = {tuple(request.prompt[:16]) for request in WARM_UP.requests}
    assert not warm & {tuple(request.prompt[:16]) for request in WORKLOADS[name]().requests}


def test_the_mix_has_the_asked_lengths_and_a_third_shares_a_prefix() -> None:
    requests = offline_mix()
    assert len(requests) == 64
    assert all(16 <= len(r.prompt) <= 512 and 16 <= r.num_output <= 256 for r in requests)
    # Log-uniform: the median is the bounds' geometric mean.
    assert 60 <= statistics.median(len(r.prompt) for r in requests) <= 130
    assert 45 <= statistics.median(r.num_output for r in requests) <= 90
    heads = [tuple(r.prompt[:16]) for r in requests]
    assert max(heads.count(head) for head in heads) == 22
    long = max(requests[::3], key=lambda r: len(r.prompt))
    other = next(r for r in requests[::3] if r is not long and len(r.prompt) > 128)
    assert long.prompt[:128] == other.prompt[:128]
    assert long.prompt[128] != other.prompt[128]


def test_poisson_arrivals_ascend_at_the_asked_rate() -> None:
    arrivals = [request.at_s for request in poisson(2000, per_s=4.0)]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    # Of exponential gaps the deviation is as large as the mean; of regular ones it would be none.
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.15)


@pytest.mark.parametrize(
    ("num_slots", "max_in_flight", "most"), [(64, None, 60), (2, None, 50), (64, 1, 30), (1, 2, 30)]
)
def test_a_cache_must_hold_the_longest_requests_that_run_at_once(
    num_slots: int, max_in_flight: int | None, most: int
) -> None:
    requests = [BenchRequest([1] * length, length) for length in (5, 15, 10)]
    assert Workload(requests, max_in_flight).most_tokens(num_slots) == most
