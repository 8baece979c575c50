"""A process dies at a crash point; each job's stream, log and outcome stay the same."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Any

import pytest
from fakes.processes.node_process import NodeProcess
from fakes.waiting import until
from faults.tools.http_reader import HttpReading, http_client
from faults.tools.processes import GatewayProcess, ReaderProcess
from faults.tools.work import KINDS, PROMPT, Work, check_logs, check_settled, holder, new_work, statuses
from redis.asyncio import Redis

from penstock.producer.client import AsyncClient

POOL = "crash"
STEP_S = 0.01
SETTINGS: dict[str, Any] = {"pool": POOL, "lease_ms": 3000, "drain_s": 0.1, "stream_interval_ms": 0}
"""Each step's tokens leave at once, or there would be few messages to die at."""


def mostly_slow(points: Sequence[str], *, quick: str) -> list[object]:
    """Return all points, all but one marked slow."""
    assert quick in points
    return [point if point == quick else pytest.param(point, marks=pytest.mark.slow) for point in points]


def new_works(count: int, num_tokens: int = 60, **options: Any) -> list[Work]:
    return [new_work(POOL, num_tokens, **KINDS[number % len(KINDS)], **options) for number in range(count)]


async def read_all(client: AsyncClient, works: Sequence[Work]) -> None:
    """Submit the jobs and read them concurrently."""

    async def read(work: Work) -> None:
        await work.read((await client.submit(PROMPT, **work.options)).chunks())

    await asyncio.gather(*(read(work) for work in works))


async def check_all(redis: Redis, works: Sequence[Work]) -> None:
    """Assert that every job is done, once, and left no state."""
    for work in works:
        work.check()
    assert {(s.state, s.outcome and s.outcome.code) for s in await statuses(redis, works)} == {("succeeded", "")}
    await check_logs(redis, works)
    await check_settled(redis, POOL)


# Nodes -------------------------------------------------------------------------------------------

NODE_POINTS = (
    *(
        f"{when} {what} 1"
        for when in ("before", "after")
        for what in ("join", "heartbeat", "take", "preparation", "finish")
    ),
    *(f"{when} {what} 3" for when in ("before", "after") for what in ("heartbeat", "sweep", "take", "finish")),
    *(f"{when} emit {count}" for when in ("before", "after") for count in (1, 70)),
    *(f"after step {count}" for count in (1, 70)),
)
STOPPED_NODE_POINTS = tuple(f"{when} {what} 1" for when in ("before", "after") for what in ("give_back", "leave"))


async def kill_a_node(redis: Redis, url: str, point: str, *, is_stopped: bool = False) -> None:
    """Kill a node at the point. Another node continues its jobs."""
    works = new_works(5, 150)
    with closing(NodeProcess(url, step_s=STEP_S, name="dying", dies=f"{point} kill", **SETTINGS)) as dying:
        if await asyncio.to_thread(dying.next_event) is None:
            reading = None
        else:
            client = await AsyncClient(url).connect()
            reading = asyncio.create_task(read_all(client, works))
            await until(lambda: holder(redis, works[0].id), lambda seen: not dying.is_running or seen)
            if is_stopped:
                dying.signal(signal.SIGTERM)
        with NodeProcess(url, step_s=STEP_S, name="living", **SETTINGS):
            if reading is None:
                client = await AsyncClient(url).connect()
                reading = asyncio.create_task(read_all(client, works))
            await reading
            await client.close()
            assert await asyncio.to_thread(dying.wait) == -signal.SIGKILL, "it came to the point"
    await check_all(redis, works)


@pytest.mark.parametrize("point", mostly_slow(NODE_POINTS, quick="before preparation 1"))
async def test_a_node_may_die_at_any_moment(redis: Redis, redis_url: str, point: str) -> None:
    await kill_a_node(redis, redis_url, point)


@pytest.mark.slow
@pytest.mark.parametrize("point", STOPPED_NODE_POINTS)
async def test_a_node_may_die_while_it_drains(redis: Redis, redis_url: str, point: str) -> None:
    await kill_a_node(redis, redis_url, point, is_stopped=True)


# Clients -----------------------------------------------------------------------------------------

CLIENT_POINTS = (
    *(f"{when} submit {count}" for when in ("before", "after") for count in (1, 4)),
    *(f"{when} reader_heartbeat {count}" for when in ("before", "after") for count in (1, 2)),
    *(f"before dispatch {count}" for count in (1, 5, 40)),
)
RETURNED_CLIENT_POINTS = (
    *(f"{when} attach {count}" for when in ("before", "after") for count in (1, 4)),
    "after log 1",
)


def read_in_process(works: Sequence[Work], url: str, *, dies: str = "", num_events: int = sys.maxsize) -> int:
    """Read in a client process that continues after the previous one. Return its exit status."""
    by_id = {work.id: work for work in works if not work.end}
    jobs: list[dict[str, Any]] = [{"options": {"prompt": PROMPT, **work.options}} for work in by_id.values()]
    for job, work in zip(jobs, by_id.values(), strict=True):
        job |= {"after": work.last_index} if work.num_seen else {}
    with closing(ReaderProcess(url, jobs, dies=dies, reader_heartbeat_interval_s=0.3)) as reader:
        while (event := reader.next_event()) is not None:
            if event["event"] == "chunk":
                by_id[event["job"]].see(*event["chunk"])
                num_events -= 1
                if num_events == 0:
                    reader.kill()
        return reader.wait()


async def kill_a_client(redis: Redis, url: str, point: str, *, has_returned: bool = False) -> None:
    """Kill a client at the point. Another client continues to read."""
    works = new_works(5)
    with NodeProcess(url, step_s=STEP_S, **SETTINGS):
        read = partial(asyncio.to_thread, read_in_process, works, url)
        if has_returned:
            assert await read(num_events=100) == -signal.SIGKILL
        assert await read(dies=f"{point} kill") == -signal.SIGKILL, "it came to the point"
        assert await read() == 0
        await check_all(redis, works)


@pytest.mark.parametrize("point", mostly_slow(CLIENT_POINTS, quick="before dispatch 5"))
async def test_a_client_may_die_at_any_moment(redis: Redis, redis_url: str, point: str) -> None:
    await kill_a_client(redis, redis_url, point)


@pytest.mark.slow
@pytest.mark.parametrize("point", RETURNED_CLIENT_POINTS)
async def test_a_reattached_client_may_die_at_any_moment(redis: Redis, redis_url: str, point: str) -> None:
    await kill_a_client(redis, redis_url, point, has_returned=True)


# Gateways ----------------------------------------------------------------------------------------

GATEWAY_POINTS = (
    *(f"{when} submit {count}" for when in ("before", "after") for count in (1, 4)),
    *(f"{when} reader_heartbeat {count}" for when in ("before", "after") for count in (1, 2)),
    *(f"{when} sweep 2" for when in ("before", "after")),
    *(f"before dispatch {count}" for count in (1, 40)),
    *(f"after event {count}" for count in (1, 100)),
)
LEFT_GATEWAY_POINTS = tuple(f"{when} detach 1" for when in ("before", "after"))


async def kill_a_gateway(redis: Redis, url: str, point: str, *, leaves: bool = False) -> None:
    """Kill a gateway at the point. The same idempotency keys at another gateway return the same jobs."""
    works = new_works(5, 150)
    first, second = [HttpReading() for _ in works], [HttpReading() for _ in works]
    async with AsyncExitStack() as stack:
        stack.enter_context(NodeProcess(url, step_s=STEP_S, abandon_after_ms=5000, **SETTINGS))
        living = stack.enter_context(GatewayProcess(url))
        with GatewayProcess(url, dies=f"{point} kill") as dying:
            http = await stack.enter_async_context(http_client())
            for base, readings, max_events in ((dying.url, first, 3 if leaves else None), (living.url, second, None)):
                asking = [
                    reading.read(http, base, work, key=f"key {i}", max_events=max_events)
                    for i, (work, reading) in enumerate(zip(works, readings, strict=True))
                ]
                await asyncio.gather(*asking)
            assert await asyncio.to_thread(dying.wait) == -signal.SIGKILL, "it came to the point"
        for work, one, other in zip(works, first, second, strict=True):
            other.check(work)
            assert one.is_part_of(other)
            assert one.job_id in ("", other.job_id)
        await check_settled(redis, POOL)


@pytest.mark.parametrize("point", mostly_slow(GATEWAY_POINTS, quick="after event 100"))
async def test_a_gateway_may_die_at_any_moment(redis: Redis, redis_url: str, point: str) -> None:
    await kill_a_gateway(redis, redis_url, point)


@pytest.mark.slow
@pytest.mark.parametrize("point", LEFT_GATEWAY_POINTS)
async def test_a_gateway_may_die_while_its_readers_leave(redis: Redis, redis_url: str, point: str) -> None:
    await kill_a_gateway(redis, redis_url, point, leaves=True)
