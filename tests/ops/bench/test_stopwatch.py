"""Latencies from arrival times, with a clock that the test advances. Drivers send exactly the workload."""

from __future__ import annotations

import asyncio

import pytest
from bench.drive import Saw, drive, drive_streams
from bench.stopwatch import Stopwatch, WrongCountError, percentile
from bench.workload import BenchRequest, Workload
from hypothesis import given
from hypothesis import strategies as st
from numpy import percentile as reference


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(reference(values, percent)), rel=1e-9, abs=1e-6)


def test_percentile_of_nothing_is_zero() -> None:
    assert percentile([], 99) == 0.0


def test_latencies_count_from_when_a_request_was_due() -> None:
    clock = Clock()
    watch = Stopwatch(Workload([BenchRequest([1], 3, at_s=1.0), BenchRequest([1], 2, at_s=2.0)]), clock=clock)
    for at_s, i, num_tokens in ((1.1, 0, 1), (1.14, 0, 1), (1.18, 0, 1), (2.5, 1, 1), (2.51, 1, 1)):
        clock.now_s = 100.0 + at_s
        if at_s in (1.1, 2.5):
            watch.asked(i)
        watch.saw(i, num_tokens)

    found = watch.measured()

    assert found["output_tokens"] == 5
    assert found["wall_s"] == pytest.approx(2.51)
    assert found["tokens_per_s"] == pytest.approx(5 / 2.51)
    assert found["ttft_p50_ms"] == pytest.approx(300)
    assert found["itl_p50_ms"] == pytest.approx(40)
    assert found["itl_mean_ms"] == pytest.approx(25)
    # The second request's first token took 500 ms.
    assert found["goodput"] == 0.5


def test_in_a_closed_loop_a_request_counts_from_when_it_was_sent() -> None:
    clock = Clock()
    watch = Stopwatch(Workload([BenchRequest([1], 1), BenchRequest([1], 1)], max_in_flight=1), clock=clock)
    for i in range(2):
        watch.asked(i)
        clock.now_s += 0.25
        watch.saw(i, 1)
    assert watch.measured()["ttft_p99_ms"] == pytest.approx(250)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_another_number_of_tokens_than_asked_is_no_result(num_tokens: int) -> None:
    watch = Stopwatch(Workload([BenchRequest([1], 2)]))
    watch.asked(0)
    watch.saw(0, num_tokens)
    with pytest.raises(WrongCountError):
        watch.measured()


def test_finished_requests_are_counted_once() -> None:
    heard: list[int] = []
    watch = Stopwatch(Workload([BenchRequest([1], 2)] * 3), on_finished=heard.append)
    for i in range(3):
        watch.asked(i)
        watch.saw(i, 0)
        watch.told(i, 2)
    assert heard == [1, 2, 3]
    assert watch.num_open == 0


class OneTokenAStep:
    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.most = 0

    def add(self, i: int, request: BenchRequest) -> None:
        self.left[i] = request.num_output
        self.most = max(self.most, len(self.left))

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self, saw: Saw) -> None:
        for i in list(self.left):
            saw(i, 1)
            self.left[i] -= 1
            if not self.left[i]:
                del self.left[i]


@pytest.mark.parametrize(("max_in_flight", "most"), [(None, 10), (3, 3), (1, 1)])
def test_a_stepped_engine_is_given_all_requests_but_no_more_at_once_than_allowed(
    max_in_flight: int | None, most: int
) -> None:
    workload = Workload([BenchRequest([1], 1 + i % 3) for i in range(10)], max_in_flight)
    engine, watch = OneTokenAStep(), Stopwatch(workload)
    drive(engine, workload, watch)
    assert (watch.num_finished, engine.most) == (10, most)


def test_a_request_is_not_sent_before_it_is_due() -> None:
    workload = Workload([BenchRequest([1], 1), BenchRequest([1], 1, at_s=0.02)])
    engine, watch = OneTokenAStep(), Stopwatch(workload)
    drive(engine, workload, watch)
    assert engine.most == 1
    assert watch.measured()["wall_s"] >= 0.02


@pytest.mark.parametrize("max_in_flight", [None, 2])
async def test_streams_run_together_but_no_more_than_allowed(max_in_flight: int | None) -> None:
    workload = Workload([BenchRequest([1], 2) for _ in range(8)], max_in_flight)
    most = 0

    async def ask(i: int, request: BenchRequest, watch: Stopwatch) -> None:
        nonlocal most
        most = max(most, watch.num_open)
        await asyncio.sleep(0)
        watch.saw(i, request.num_output)

    watch = Stopwatch(workload)
    await drive_streams(ask, workload, watch)
    assert (watch.num_finished, most) == (8, max_in_flight or 8)
