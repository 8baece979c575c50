"""How often the tokens of many streams leave, what that costs, and how long a token waits at most."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_node.publishing.sending import (
    BUSY_SHARE,
    CHUNK_S,
    FREE_SHARE,
    MAX_AHEAD_S,
    MAX_RATIO,
    MAX_SHARE_S,
    SEND_S,
    Pace,
    SendCost,
    max_interval_s,
)

EPSILON_S = 1e-6
RUN_S = 3.0


def times_of_sends(pace: Pace, num_streams: int, step_s: float, cpu_s: float, began_s: float = 100.0) -> list[float]:
    """Return when the tokens of such an engine leave, if each send takes `cpu_s` and leaves as soon as it may."""
    left_at: list[float] = []
    now_s = began_s
    while now_s < began_s + RUN_S:
        at_s = now_s + max(0.0, pace.until_next_s(num_streams, now_s))
        pace.note(at_s, num_streams=num_streams)
        pace.cost.note(num_streams, cpu_s)
        left_at.append(at_s)
        now_s += step_s * (1 + (at_s - now_s) // step_s)
    return left_at


@given(
    num_streams=st.integers(1, 2000),
    step_s=st.floats(0.001, 0.2),
    longest_s=st.floats(0.001, 1.0),
    cpu_s=st.floats(0.00005, 0.05),
    share=st.sampled_from([BUSY_SHARE, FREE_SHARE]),
)
def test_no_token_waits_longer_than_the_number_of_streams_allows(
    num_streams: int, step_s: float, longest_s: float, cpu_s: float, share: float
) -> None:
    left_at = times_of_sends(Pace(longest_s, max_cpu_share=share), num_streams, step_s, cpu_s)
    gaps = [after - before for before, after in pairwise(left_at)]
    assert all(gap <= max(min(longest_s, max_interval_s(num_streams)), step_s) + step_s + EPSILON_S for gap in gaps)


@pytest.mark.parametrize(("num_streams", "longest_s"), [(1, 0.02), (16, 0.02), (64, 0.05), (144, 0.1)])
def test_few_streams_wait_20_ms_at_most_and_64_wait_50_ms(num_streams: int, longest_s: float) -> None:
    assert max_interval_s(num_streams) == pytest.approx(longest_s)
    pace = Pace(longest_interval_s=1.0, max_cpu_share=BUSY_SHARE)
    for _ in range(500):
        pace.cost.note(num_streams, 1.0)  # far more than any send takes
    pace.note(5.0, num_streams=num_streams)
    assert pace.until_next_s(num_streams, 5.0) == pytest.approx(longest_s)


@pytest.mark.parametrize("share", [BUSY_SHARE, FREE_SHARE])
@pytest.mark.parametrize(("num_streams", "cpu_s"), [(1, 0.0001), (1, 0.0003), (16, 0.0004), (64, 0.001)])
def test_sends_take_no_more_than_their_share_of_a_core(num_streams: int, cpu_s: float, share: float) -> None:
    pace = Pace(longest_interval_s=1.0, max_cpu_share=share)
    times_of_sends(pace, num_streams, 0.0001, cpu_s)  # it has learned the cost
    left_at = times_of_sends(pace, num_streams, 0.0001, cpu_s, 200.0)
    assert (len(left_at) - 1) * cpu_s / (left_at[-1] - left_at[0]) <= share * 1.02
    assert pace.interval_s() == pytest.approx(cpu_s / share, rel=0.02)


@pytest.mark.parametrize(("share", "step_s"), [(BUSY_SHARE, 0.022), (FREE_SHARE, 0.004)])
def test_a_stream_leaves_at_every_step_where_that_costs_less_than_its_share(share: float, step_s: float) -> None:
    left_at = times_of_sends(Pace(longest_interval_s=0.1, max_cpu_share=share), 1, step_s, SEND_S + CHUNK_S)
    gaps = [after - before for before, after in pairwise(left_at)]
    assert gaps == pytest.approx([step_s] * len(gaps))


def test_one_slow_send_does_not_change_the_pace_much() -> None:
    cost = SendCost()
    before_s = cost.of(1)
    cost.note(1, 10.0)
    assert cost.of(1) < before_s * (1 + MAX_RATIO * 0.06)


def test_streams_of_the_last_send_count_until_all_have_tokens_again() -> None:
    pace = Pace(longest_interval_s=1.0, max_cpu_share=BUSY_SHARE)
    pace.note(5.0, num_streams=100)
    assert pace.until_next_s(1, 5.0) == pace.until_next_s(100, 5.0) > pace.until_next_s(50, 5.0) - EPSILON_S
    assert pace.until_next_s(200, 5.0) > pace.until_next_s(100, 5.0)
    pace.note(6.0, num_streams=1)
    assert pace.until_next_s(0, 6.0) < pace.until_next_s(50, 6.0)


def test_a_longest_interval_of_zero_sends_every_step() -> None:
    pace = Pace(longest_interval_s=0.0, max_cpu_share=BUSY_SHARE)
    pace.note(5.0, num_streams=100)
    assert pace.until_next_s(500, 5.001) <= 0


@given(num_streams=st.integers(1, 2000), late_s=st.floats(0.0, 0.2))
def test_first_tokens_and_ends_do_not_delay_other_tokens(num_streams: int, late_s: float) -> None:
    pace = Pace(longest_interval_s=0.1, max_cpu_share=BUSY_SHARE)
    pace.note(5.0, num_streams=num_streams)
    interval_s = pace.until_next_s(num_streams, 5.0)
    assert pace.until_next_s(num_streams, 5.0, reader_waits=True) <= 0
    pace.note(5.0 + late_s, num_streams=None)
    assert pace.until_next_s(num_streams, 5.0 + late_s) == pytest.approx(interval_s - late_s)


@given(
    num_streams=st.integers(1, 2000),
    longest_s=st.floats(0.0, 1.0),
    waits_s=st.lists(st.floats(0.0, 0.05), min_size=30, max_size=200),
)
def test_first_tokens_and_ends_leave_soon_but_those_of_many_streams_in_groups(
    num_streams: int, longest_s: float, waits_s: list[float]
) -> None:
    pace = Pace(longest_s, max_cpu_share=BUSY_SHARE)
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
def test_a_few_first_tokens_leave_at_once_and_many_do_not(num_streams: int, at_once: int) -> None:
    pace = Pace(longest_interval_s=1.0, max_cpu_share=BUSY_SHARE)
    pace.note(5.0, num_streams=num_streams)
    pace.note(6.0, num_streams=num_streams)
    num_left = 1
    while pace.until_next_s(num_streams, 6.0 + EPSILON_S, reader_waits=True) <= 0 and num_left < 100:
        pace.note(6.0, num_streams=None)
        num_left += 1
    assert num_left == at_once
