"""How long a loop is held, by the three clocks."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.runtime import loop_watch
from penstock.runtime.loop_watch import LoopWatch

HOLD_S = 0.1
INTERVAL_S = 0.005


@pytest.fixture
async def watch():
    watch = LoopWatch(interval_s=INTERVAL_S)
    watch.start()
    await asyncio.sleep(4 * INTERVAL_S)
    yield watch
    watch.stop()


def compute(for_s: float) -> None:
    until_s = time.thread_time() + for_s
    while time.thread_time() < until_s:
        pass


async def test_work_of_the_loop_is_in_all_three_clocks(watch):
    compute(HOLD_S)
    await asyncio.sleep(4 * INTERVAL_S)
    hold = watch.longest
    assert min(hold.wall_s, hold.runnable_s, hold.cpu_s) > 0.8 * HOLD_S
    assert sum(watch.delays_s.counts[4:]) >= 1 and watch.delays_s.total >= hold.wall_s


async def test_cpu_time_of_other_threads_is_no_work_of_the_loop(watch):
    time.sleep(HOLD_S)  # noqa: ASYNC251  as a wait for Python's lock
    await asyncio.sleep(4 * INTERVAL_S)
    hold = watch.longest
    assert hold.wall_s > HOLD_S - 2 * INTERVAL_S
    assert hold.cpu_s < HOLD_S / 2


async def test_much_work_in_small_pieces_holds_nothing(watch):
    for _ in range(200):
        compute(0.001)
        await asyncio.sleep(0)
    assert watch.longest.cpu_s < 0.05


async def test_old_hold_is_no_longer_reported(watch, monkeypatch):
    monkeypatch.setattr(loop_watch, "WINDOW_S", 0.02)
    watch._window_ends_s = asyncio.get_running_loop().time()
    compute(HOLD_S)
    await asyncio.sleep(0.1)
    assert watch.longest.cpu_s < HOLD_S / 2


async def test_stack_of_a_blocked_loop_is_logged(caplog):
    watch = LoopWatch(interval_s=INTERVAL_S, names_holders=True)
    watch.start()
    compute(3 * HOLD_S)
    await asyncio.sleep(4 * INTERVAL_S)
    watch.stop()
    (line,) = [record for record in caplog.records if record.message == "the event loop is blocked"]
    assert any("compute" in frame for frame in line.stack)
    assert line.held_ms >= 50
