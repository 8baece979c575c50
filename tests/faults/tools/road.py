"""A run that calls every script: jobs of all kinds, on nodes and clients in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import PATIENCE_S, running_node
from faults.tools.work import KINDS, PROMPT, Work, check_logs, check_settled, new_work, statuses
from redis.asyncio import Redis

from penstock.producer.client import AsyncClient, ClientSettings
from penstock.queue.broker.connection import with_retries

POOL = "road"
SETTINGS: dict[str, Any] = {"reattach_grace_ms": 100, "drain_s": 0.0}
QUICK = ClientSettings(echo_interval_s=0.3, silent_after_s=1.0, reader_heartbeat_interval_s=0.3)
STEP_S = 0.01
LONG_TOKENS = 2000
SCRIPTS = (
    *("submit", "attach", "detach", "cancel", "reader_heartbeat", "sweep"),
    *("join", "take", "emit", "finish", "give_back", "heartbeat", "leave"),
)
"""All that a walk calls."""


def new_works(num_tokens: int) -> list[Work]:
    """Return one job of each kind."""
    return [new_work(POOL, num_tokens, **kind) for kind in KINDS]


async def read(client: AsyncClient, work: Work) -> None:
    """Submit a job and read it to its end."""
    await work.read((await client.submit(PROMPT, **work.options)).chunks())


async def under_way(client: AsyncClient, works: list[Work], *watched: Work) -> list[asyncio.Task[None]]:
    """Start readers of all jobs. Return once the watched ones have tokens."""
    reading = [asyncio.create_task(read(client, work)) for work in works]
    while any(work.num_seen < 20 for work in watched):
        await asyncio.sleep(0.01)
    return reading


async def all_ended(redis: Redis, works: list[Work]) -> None:
    """Wait until all jobs have ended. If Redis lost an end, the job ends again in the same way."""
    while any(status.outcome is None for status in await statuses(redis, works)):
        await asyncio.sleep(0.05)
    for work in works:
        work.check()
    assert {(s.state, s.losses) for s in await statuses(redis, works)} == {("succeeded", 0)}
    await check_logs(redis, works)


async def read_twice(client: AsyncClient, work: Work) -> Work:
    """Return what a second reader gets that attaches to a job later."""
    while not work.num_seen:
        await asyncio.sleep(0.005)
    again = Work(work.options)
    await again.read((await client.attach(work.id)).chunks())
    return again


async def leave_two(client: AsyncClient) -> list[Work]:
    """Cancel one job, and disconnect the only reader of another."""
    works = [new_work(POOL, LONG_TOKENS, background=False) for _ in range(2)]
    jobs = [await client.submit(PROMPT, **work.options) for work in works]
    async with aclosing(jobs[0].chunks()) as chunks, aclosing(jobs[1].chunks()) as others:
        await anext(chunks)
        await anext(others)
        await jobs[0].cancel()
        async for chunk in chunks:
            works[0].see_chunk(chunk)
    return works


async def check_left(redis: Redis, works: list[Work]) -> None:
    """Assert that both end as canceled, the one without a reader after its grace time."""
    while any(status.outcome is None for status in await statuses(redis, works)):
        await asyncio.sleep(0.05)
    assert {status.state for status in await statuses(redis, works)} == {"cancelled"}


@asynccontextmanager
async def served(url: str, engine: ReferenceEngine | None = None) -> AsyncIterator[AsyncExitStack]:
    """Run a node until the stack closes."""
    engine = engine or ReferenceEngine(step_s=STEP_S)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_node(url, engine, pool=POOL, **SETTINGS))
        yield stack


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[AsyncClient]:
    """Return a client that waits for Redis when it starts."""
    client = AsyncClient(url, settings=QUICK)
    await with_retries(client.connect, PATIENCE_S)
    try:
        yield client
    finally:
        await client.close()


async def walk(redis: Redis, url: str, *, num_tokens: int = 100) -> None:
    """Read jobs of all kinds twice while nodes give them back to each other. `redis`: a connection without faults."""
    works = new_works(num_tokens)
    async with served(url) as first, connected(url) as client:
        reading = [asyncio.create_task(read(client, work)) for work in works]
        again = asyncio.create_task(read_twice(client, works[0]))
        left = await leave_two(client)
        async with served(url):
            await first.aclose()
            await asyncio.gather(*reading)
            await check_left(redis, left)
            for work in (*works, await again):
                work.check()
            await check_logs(redis, works)
            assert {(s.state, s.losses) for s in await statuses(redis, works)} == {("succeeded", 0)}
    await check_settled(redis, POOL)
