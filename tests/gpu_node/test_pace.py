"""How often what many streams gain leaves, and how long a token waits at most."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_node.pace import HURRY_S, MAX_CHUNKS_PER_S, MIN_INTERVAL_S, Pace

EPSILON_S = 1e-6
RUN_S = 3.0


def departures(pace: Pace, num_streams: int, step_s: float) -> list[float]:
    """When all that such an engine gained left, if each step's gain leaves as soon as it may."""
    left_at: list[float] = []
    now_s = 100.0
    while now_s < 100.0 + RUN_S:
        at_s = now_s + max(0.0, pace.until_all_s(num_streams, now_s))
        pace.note(at_s, all_left=True)
        left_at.append(at_s)
        now_s += step_s * (1 + (at_s - now_s) // step_s)
    return left_at


@given(num_streams=st.integers(2, 2000), step_s=st.floats(0.001, 0.2), max_interval_s=st.floats(0.02, 1.0))
def test_chunks_leave_at_a_bounded_rate_and_none_waits_longer_than_it_may(
    num_streams: int, step_s: float, max_interval_s: float
) -> None:
    left_at = departures(Pace(max_interval_s), num_streams, step_s)
    gaps = [after - before for before, after in pairwise(left_at)]
    assert all(gap <= max(max_interval_s, step_s) + step_s + EPSILON_S for gap in gaps)
    num_chunks = num_streams * len(gaps)
    assert num_chunks <= RUN_S * max(MAX_CHUNKS_PER_S, num_streams / max_interval_s) + 2 * num_streams
    assert len(gaps) <= RUN_S / min(MIN_INTERVAL_S, max_interval_s) + 2


@given(st.floats(0.001, 0.2))
def test_a_single_stream_gets_each_step_at_once(step_s: float) -> None:
    pace = Pace(max_interval_s=1.0)
    for i in range(5):
        now_s = i * step_s
        assert pace.until_all_s(1, now_s) <= 0
        pace.note(now_s, all_left=True)


def test_an_interval_of_nothing_sends_every_step() -> None:
    pace = Pace(max_interval_s=0.0)
    pace.note(5.0, all_left=True)
    assert pace.until_all_s(500, 5.001) <= 0


def test_first_tokens_gather_briefly_and_do_not_put_off_the_others() -> None:
    pace = Pace(max_interval_s=0.1)
    pace.note(5.0, all_left=True)
    assert 0 < pace.until_first_s(5.0 + HURRY_S / 2) < HURRY_S
    pace.note(5.02, all_left=False)
    assert pace.until_first_s(5.02 + HURRY_S + EPSILON_S) <= 0
    assert pace.until_all_s(100, 5.1 + EPSILON_S) <= 0
