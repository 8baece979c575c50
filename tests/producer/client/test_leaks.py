"""Closed clients and jobs leave no task, subscription, connection or key."""

from __future__ import annotations

import asyncio
import gc

import pytest
from fakes.fake_node import POOL, FakeNode
from fakes.waiting import until
from redis.asyncio import Redis

from penstock.contract.output import Chunk
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from tests.producer.client.conftest import QUICK
from tests.producer.client.reading import read_all, read_some


def our_tasks() -> set[asyncio.Task[object]]:
    """Return all tasks except those in which redis-py sends a command of the fake node."""
    return {task for task in asyncio.all_tasks() if "_send_packed_command" not in repr(task)}


JOBS_A_ROUND = 300
OBJECTS_OF_A_JOB = 3
"""Fewer than the handle of a job alone holds; thousands of jobs lie between the counts that are compared."""
OF_A_JOB = (b":job:", b":log:", b":request:")
TTL_MS = 10_000
"""Of an ended job. A caller that this process holds up for longer would not find its job any more."""
NO_TTL = -1
CONNECTIONS_WITHOUT_CLIENT = 3
"""Ours, and two of the fake node, for its steps and its heartbeats."""


async def connections_are_closed(redis: Redis) -> bool:
    """Whether Redis has noticed that all of the client's connections are closed."""
    channels, connections = await redis.pubsub_channels(keys.echo_channel("*")), await redis.client_list()
    return not channels and len(connections) <= CONNECTIONS_WITHOUT_CLIENT


async def use(client: AsyncClient, number: int) -> None:
    """Use one job in one of the ways in which callers abandon jobs."""
    job = await client.submit("hello", max_tokens=10, background=number % 2 == 0)
    match number % 6:
        case 0:
            await read_all(job.stream())
        case 1:
            await job.result()
        case 2:
            await read_some(job.stream(), 2)
        case 3:
            await job.cancel()
        case 4:
            pass
        case 5:
            reading = asyncio.create_task(read_all(job.stream()))
            await asyncio.sleep(0.01)
            reading.cancel()


@pytest.mark.parametrize("rounds", [1, pytest.param(34, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_jobs_by_hundreds_leave_nothing_behind(redis_url: str, redis: Redis, rounds: int) -> None:
    tasks_before = our_tasks()
    async with FakeNode(redis_url, result_ttl_ms=TTL_MS, log_ttl_ms=TTL_MS, reattach_grace_ms=50) as node:
        tasks_with_node = our_tasks()
        # So many jobs at once may hold this process up for longer than quick echoes may stay away. Requests of the last
        # half minute would be kept for a fail-over.
        settings = QUICK.model_copy(update={"echo_interval_s": 2.0, "failover_keep_s": 0.0})
        async with AsyncClient(redis_url, settings=settings) as client:
            sizes = []
            for _ in range(rounds):
                await asyncio.gather(*(use(client, number) for number in range(JOBS_A_ROUND)))
                await until(lambda: redis.scard(f"penstock:{{{POOL}}}:open"), lambda seen: not node.jobs and not seen)
                gc.collect()
                await until(lambda: not list(client.servers.directory.inbox._feeds))
                assert len(await redis.pubsub_channels(keys.echo_channel("*"))) == 1
                sizes.append(len(gc.get_objects()))
            assert sizes[-1] - sizes[rounds // 2] < OBJECTS_OF_A_JOB * JOBS_A_ROUND
            assert client.stats.log_reads == 0
        assert our_tasks() == tasks_with_node
        await until(lambda: connections_are_closed(redis))
    assert our_tasks() == tasks_before
    left = [key async for key in redis.scan_iter("penstock:*") if any(part in key for part in OF_A_JOB)]
    assert max([await redis.pttl(key) for key in left], default=0) <= TTL_MS
    assert {await redis.pttl(key) for key in left} & {NO_TTL} == set()
    assert await redis.keys(f"penstock:{{{POOL}}}:queue:*") == []


async def test_closing_in_the_middle_leaves_nothing_behind(redis_url: str, redis: Redis) -> None:
    tasks_before = our_tasks()
    async with FakeNode(redis_url, step_s=0.01, reattach_grace_ms=50) as node:
        tasks_with_node = our_tasks()
        client = await AsyncClient(redis_url).connect()
        jobs = [await client.submit("hello", max_tokens=2000, background=False) for _ in range(50)]
        readings = [asyncio.create_task(read_all(job.stream())) for job in jobs]
        await asyncio.sleep(0.1)
        await client.close()
        await asyncio.wait(readings)
        assert {type(reading.exception()).__name__ for reading in readings} == {"UnavailableError"}
        assert our_tasks() == tasks_with_node
        await until(lambda: connections_are_closed(redis))
        await until(lambda: not node.jobs)  # they have no reader: they are cancelled
    assert our_tasks() == tasks_before


def num_chunks() -> int:
    """Return the chunks in the process, found by type: some of torch's objects warn on attribute access."""
    gc.collect()
    return sum(type(thing) is Chunk for thing in gc.get_objects())


async def test_handles_whose_result_was_read_keep_no_chunks(redis_url: str) -> None:
    num_before = num_chunks()
    async with FakeNode(redis_url) as node, AsyncClient(redis_url) as client:
        jobs = [await client.submit("hello", max_tokens=100) for _ in range(20)]
        assert {len((await job.result()).choices[0].token_ids) for job in jobs} == {100}
        await until(lambda: not node.jobs)
        assert num_chunks() - num_before < len(jobs)
        assert len(await read_all(jobs[0].stream())) == 101
