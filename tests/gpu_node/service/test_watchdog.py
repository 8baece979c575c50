"""When an engine counts as hung."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.processes.reference_engine import ReferenceEngine

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.service.health import Watchdog

IDLE = ReferenceEngine().stats()
BUSY = replace(IDLE, num_running=1)


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(stall_after_s=10.0, max_look_s=2.0, now_s=0.0)


def look_until(watchdog: Watchdog, stats: EngineStats | None, until_s: int, *, may_step: bool = True) -> None:
    for now_s in range(1, until_s + 1):
        watchdog.look(stats, may_step=may_step, now_s=float(now_s))


@pytest.mark.parametrize("stats", [BUSY, replace(IDLE, num_waiting=1), replace(IDLE, num_swapped=1), None])
def test_no_step_or_no_answer_for_long_is_a_hang(watchdog: Watchdog, stats: EngineStats | None) -> None:
    watchdog.look(BUSY, may_step=True, now_s=0.0)
    look_until(watchdog, stats, 10)
    with pytest.raises(InvariantError, match="no step for 11 s"):
        watchdog.look(stats, may_step=True, now_s=11.0)


@pytest.mark.parametrize("stats", [IDLE, BUSY])
def test_idle_or_paused_engine_is_no_hang(watchdog: Watchdog, stats: EngineStats) -> None:
    look_until(watchdog, stats, 100, may_step=stats is IDLE)


def test_a_long_start_of_ranks_is_no_hang(watchdog: Watchdog) -> None:
    for now_s in range(100):
        watchdog.look(None, may_step=True, now_s=float(now_s), starts_ranks=True)
    watchdog.look(None, may_step=True, now_s=101.0)
    assert watchdog.stalled_s == 2.0


def test_occasional_steps_are_no_hang(watchdog: Watchdog) -> None:
    for now_s in range(100):
        watchdog.look(replace(BUSY, steps=now_s // 9), may_step=True, now_s=float(now_s))


def test_pause_of_the_whole_process_is_no_hang_of_the_engine(watchdog: Watchdog) -> None:
    watchdog.look(BUSY, may_step=True, now_s=1.0)
    watchdog.look(BUSY, may_step=True, now_s=1000.0)
    watchdog.look(replace(BUSY, steps=1), may_step=True, now_s=1001.0)
