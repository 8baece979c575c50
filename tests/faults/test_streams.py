"""HTTP streams stay open while Redis is down, end with their gateway, and share one job per idempotency key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from fakes.cover import FULL
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import running_node
from fakes.waiting import until
from faults.tools.http_reader import HttpReading, http_client
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess
from faults.tools.work import KINDS, check_settled, new_work
from redis.asyncio import Redis

from penstock.queue.broker.connection import connect

POOL = "http"
NUM_CALLERS = 100 if FULL else 40


def held_engine() -> ReferenceEngine:
    """An engine that ends no choice of these jobs before it is let go on."""
    engine = ReferenceEngine(step_s=0.01)
    engine.holds_at = 40
    return engine


async def under_way(readings: Sequence[HttpReading]) -> None:
    """Wait until each reader has some tokens, of which each one is a character."""
    await until(lambda: min(len(one.texts.get(0, "")) for one in readings) >= 20)


@pytest.mark.parametrize("outage_s", [2, pytest.param(25, marks=pytest.mark.slow)])
async def test_streams_stay_open_while_redis_is_unreachable(tmp_path: Path, outage_s: float) -> None:
    works = [new_work(POOL, 200, **kind) for kind in KINDS]
    readings = [HttpReading() for _ in works]
    engine = held_engine()
    with ExitStack() as stack:
        server = stack.enter_context(RedisProcess(tmp_path / "redis"))
        async with running_node(server.url, engine, pool=POOL), http_client() as http:
            gateway = stack.enter_context(GatewayProcess(server.url, keep_alive_s=1))
            reading = [
                asyncio.create_task(one.read(http, gateway.url, work, key=work.id))
                for one, work in zip(readings, works, strict=True)
            ]
            await under_way(readings)
            server.kill()
            engine.holds_at = None
            await asyncio.sleep(outage_s)
            assert not any(task.done() for task in reading)
            await asyncio.to_thread(server.start)
            await asyncio.gather(*reading)
        for one, work in zip(readings, works, strict=True):
            one.check(work)
        redis = connect(server.url)
        await check_settled(redis, POOL)
        await redis.aclose()


async def test_many_callers_with_one_key_get_one_generation(redis: Redis, redis_url: str) -> None:
    engine, work = ReferenceEngine(step_s=0.02), new_work(POOL, 100, n=2)
    readings = [HttpReading() for _ in range(NUM_CALLERS)]
    async with running_node(redis_url, engine, pool=POOL):
        with GatewayProcess(redis_url) as first, GatewayProcess(redis_url) as second:
            async with http_client() as http:
                urls = (first.url, second.url) * (NUM_CALLERS // 2)
                asking = (one.read(http, url, work, key="one key") for one, url in zip(readings, urls, strict=True))
                await asyncio.gather(*asking)
        await check_settled(redis, POOL)
    assert len(engine.callers) == 1
    assert len({one.job_id for one in readings}) == 1
    for one in readings:
        one.check(work)


async def test_streams_of_a_killed_gateway_continue_at_another_one(redis: Redis, redis_url: str) -> None:
    works = [new_work(POOL, 100, **kind) for kind in KINDS]
    readings = [HttpReading() for _ in works]

    async def read_all(url: str) -> None:
        both = zip(readings, works, strict=True)
        await asyncio.gather(*(reading.read(http, url, work, key=work.id) for reading, work in both))

    engine = held_engine()
    async with running_node(redis_url, engine, pool=POOL), http_client() as http:
        with GatewayProcess(redis_url) as first, GatewayProcess(redis_url) as second:
            reading = asyncio.create_task(read_all(first.url))
            await under_way(readings)
            first.kill()
            engine.holds_at = None
            await reading
            assert not any(one.is_whole for one in readings)
            await read_all(second.url)
        for one, work in zip(readings, works, strict=True):
            one.check(work)
        await check_settled(redis, POOL)
