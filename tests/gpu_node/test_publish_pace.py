"""How often what many streams gain leaves, and how long a token waits at most."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_node.publish_pace import MAX_AHEAD_S, MAX_CHUNKS_PER_S, MAX_SHARE_S, MIN_INTERVAL_S, Pace

EPSILON_S = 1e-6
RUN_S = 3.0


def departures(pace: Pace, num_streams: int, step_s: float) -> list[float]:
    """When all that such an engine gained left, if each step's gain leaves as soon as it may."""
    left_at: list[float] = []
    now_s = 100.0
    while now_s < 100.0 + RUN_S:
        at_s = now_s + max(0.0, pace.until_next_s(num_streams, now_s))
        pace.note(at_s, num_streams=num_streams)
        left_at.append(at_s)
        now_s += step_s * (1 + (at_s - now_s) // step_s)
    return left_at


@given(num_streams=st.integers(1, 2000), step_s=st.floats(0.001, 0.2), max_interval_s=st.floats(0.02, 1.0))
def test_chunks_leave_at_a_bounded_rate_and_none_waits_longer_than_it_may(
    num_streams: int, step_s: float, max_interval_s: float
) -> None:
    left_at = departures(Pace(max_interval_s), num_streams, step_s)
    gaps = [after - before for before, after in pairwise(left_at)]
    assert all(gap <= max(max_interval_s, step_s) + step_s + EPSILON_S for gap in gaps)
    num_chunks = num_streams * len(gaps)
    assert num_chunks <= RUN_S * max(MAX_CHUNKS_PER_S, num_streams / max_interval_s) + 2 * num_streams
    assert len(gaps) <= RUN_S / min(MIN_INTERVAL_S, max_interval_s) + 2


def test_those_of_the_last_departure_count_until_all_are_owed_again() -> None:
    pace = Pace(max_interval_s=1.0)
    pace.note(5.0, num_streams=100)
    assert pace.until_next_s(1, 5.0) == pace.until_next_s(100, 5.0) > pace.until_next_s(50, 5.0) - EPSILON_S
    assert pace.until_next_s(200, 5.0) > pace.until_next_s(100, 5.0)
    pace.note(6.0, num_streams=1)
    assert pace.until_next_s(0, 6.0) < pace.until_next_s(50, 6.0)


def test_an_interval_of_nothing_sends_every_step() -> None:
    pace = Pace(max_interval_s=0.0)
    pace.note(5.0, num_streams=100)
    assert pace.until_next_s(500, 5.001) <= 0


@given(num_streams=st.integers(1, 2000), late_s=st.floats(0.0, 0.2))
def test_what_somebody_waits_for_does_not_put_off_the_others(num_streams: int, late_s: float) -> None:
    pace = Pace(max_interval_s=0.1)
    pace.note(5.0, num_streams=num_streams)
    interval_s = pace.until_next_s(num_streams, 5.0)
    assert pace.until_next_s(num_streams, 5.0, reader_waits=True) <= 0
    pace.note(5.0 + late_s, num_streams=None)
    assert pace.until_next_s(num_streams, 5.0 + late_s) == pytest.approx(interval_s - late_s)


@given(
    num_streams=st.integers(1, 2000),
    max_interval_s=st.floats(0.0, 1.0),
    waits_s=st.lists(st.floats(0.0, 0.05), min_size=30, max_size=200),
)
def test_what_somebody_waits_for_leaves_soon_and_of_many_streams_not_all_the_time(
    num_streams: int, max_interval_s: float, waits_s: list[float]
) -> None:
    pace = Pace(max_interval_s)
    now_s, left_at = 100.0, []
    for wait_s in waits_s:
        now_s += wait_s
        if pace.until_next_s(num_streams, now_s) <= 0:
            pace.note(now_s, num_streams=num_streams)
        awaited_s = max(0.0, pace.until_next_s(num_streams, now_s, reader_waits=True))
        assert awaited_s <= MAX_SHARE_S + EPSILON_S
        assert num_streams > 1 or awaited_s < 0.002
        if pace.until_next_s(num_streams, now_s + awaited_s) > 0:
            now_s += awaited_s
            pace.note(now_s, num_streams=None)
            left_at.append(now_s)
    for i, began_s in enumerate(left_at if num_streams >= 8 else []):
        within = [at_s for at_s in left_at[i:] if at_s < began_s + 1.0]
        assert len(within) <= (1.0 + MAX_AHEAD_S) / MAX_SHARE_S + 1


@pytest.mark.parametrize(("num_streams", "at_once"), [(2000, 8), (8, 8), (1, 57)])
def test_a_few_leave_at_once_and_many_do_not(num_streams: int, at_once: int) -> None:
    pace = Pace(max_interval_s=1.0)
    pace.note(5.0, num_streams=num_streams)
    pace.note(6.0, num_streams=num_streams)
    num_left = 1
    while pace.until_next_s(num_streams, 6.0 + EPSILON_S, reader_waits=True) <= 0 and num_left < 100:
        pace.note(6.0, num_streams=None)
        num_left += 1
    assert num_left == at_once
