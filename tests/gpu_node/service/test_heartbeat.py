"""Rates in the pressure record, and the record of an engine without any."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import PATIENCE_S, running_node
from fakes.waiting import until
from redis.asyncio import Redis

from penstock.gpu_node.engine import RankStats
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.service.heartbeat import RateEstimator, RecentGains, RecentRanks
from penstock.queue import keys


def test_a_rate_follows_the_counter_and_survives_idle_times() -> None:
    gauge = RateEstimator(0.0)
    assert gauge.update(100, 2.0) == pytest.approx(50)
    assert gauge.update(100, 60.0) == pytest.approx(50), "nothing gained, nothing learned"
    for second in range(61, 200):
        rate = gauge.update(100 + (second - 60) * 10, float(second))
    assert rate == pytest.approx(10, rel=0.01)


def test_rate_of_errors_fades_without_new_errors() -> None:
    gauge = RateEstimator(0.0, keeps=False)
    assert gauge.update(100, 2.0) == pytest.approx(50)
    assert gauge.update(100, 12.0) == pytest.approx(25), "half of it is gone after ten seconds"


def test_engine_time_of_the_last_minute_forgets_what_is_older() -> None:
    recent = RecentGains(0.0)
    assert recent.update((1.0, 0.0), 2.0) == (1.0, 0.0)
    assert recent.update((1.0, 3.0), 30.0) == (1.0, 3.0)
    assert recent.update((1.0, 3.0), 62.0) == (0.0, 3.0)
    assert recent.update((1.0, 3.0), 90.0) == (0.0, 0.0)
    assert RecentGains(0.0).update((), 2.0) == (), "an engine that does not count it"


def test_what_is_left_out_is_never_gained() -> None:
    """An update may come while the node measures its steps."""
    recent = RecentGains(0.0)
    recent.update((0.0, 10.0), 1.0)
    recent.update((0.0, 60.0), 2.0)
    recent.leave_out((0.0, 10.0), (0.0, 110.0))
    assert recent.update((40.0, 160.0), 3.0) == (40.0, 60.0)
    assert recent.update((40.0, 160.0), 62.0) == (40.0, 50.0), "the oldest update is the one within the measurement"


def _ranks(num_starts: int, num_steps: int, *, lost: str = "") -> RankStats:
    """Two stages of a rank each, after steps of 0.1 s, of which they wait 0.02 s and 0.05 s."""
    times = (0.02 * num_steps, 0.05 * num_steps), (0.001 * num_steps, 0.003 * num_steps)
    steps = {"num_steps": num_steps, "stepped_s": 0.1 * num_steps}
    return RankStats(2, num_starts, *times, 9, (5, 6), 2, lost=lost, **steps, kv_bytes=(1, 2))


def test_what_ranks_spend_is_that_of_the_last_minute_and_of_ranks_that_live() -> None:
    recent, held = RecentRanks(), {"rank_weight_bytes": (5, 6), "rank_kv_bytes": (1, 2)}
    assert recent.update(_ranks(1, 10), 2.0) == held
    spent = {"rank_exchange_ms": pytest.approx(2.0), "rank_wait_ms": pytest.approx(35.0), "stage_idle": (0.2, 0.5)}
    assert recent.update(_ranks(1, 20), 30.0) == held | spent
    assert recent.update(_ranks(1, 20), 62.0) == held | spent
    assert recent.update(_ranks(1, 20), 92.0) == held, "no step in the last minute"
    assert recent.update(_ranks(1, 20, lost="rank 1 ended"), 94.0) == held
    assert recent.update(_ranks(2, 3), 96.0) == held, "they count anew"
    assert recent.update(_ranks(2, 5), 98.0) == held | spent
    assert RecentRanks().update(RankStats(), 2.0) == {}


class SilentEngine(ReferenceEngine):
    """Gives no statistics before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_tell = threading.Event()

    def stats(self) -> EngineStats:
        assert self.may_tell.wait(PATIENCE_S)
        return super().stats()


async def test_node_joins_once_its_engine_has_statistics(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = SilentEngine()

    async def tell() -> None:
        await until(lambda: "the engine has not answered yet" in caplog.text)
        engine.may_tell.set()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        telling = group.create_task(tell())
        async with running_node(redis_url, engine, pool="silent"):
            assert telling.done()
    assert "redis is unreachable" not in caplog.text


async def test_the_end_of_a_silent_nodes_lease_is_noticed_at_once(redis: Redis, redis_url: str) -> None:
    lease_ms, nodes = 12_000, keys.nodes("silent")
    async with (
        running_node(redis_url, ReferenceEngine(), pool="silent", lease_ms=lease_ms) as node,
        asyncio.timeout(PATIENCE_S),
    ):
        first_ms = await redis.zscore(nodes, node.node_id)
        beat_ms = await until(lambda: redis.zscore(nodes, node.node_id), lambda seen: seen != first_ms)
        assert beat_ms is not None
        # The next heartbeat comes after 2 s, and the one behind it would after 4 s.
        ends_ms = beat_ms + 3000
        await redis.zadd(nodes, {"dead": ends_ms - lease_ms})
        await until(lambda: redis.zscore(nodes, "dead"), lambda seen: seen is None)
        seconds, us = await redis.time()
        assert 0 <= 1000 * seconds + us / 1000 - ends_ms < 600
