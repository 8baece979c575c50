"""Following many jobs over one connection: completions behind a cursor, and results as jobs end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from fakes.fake_node import MODEL, POOL, FakeNode
from redis.asyncio import Redis

from penstock.contract.errors import JobFailedError, NotFoundError, RequestError, ResultTimeoutError
from penstock.producer.client import AsyncClient, Client
from penstock.queue import keys
from penstock.queue.broker.completions import Completion
from tests.producer.client.conftest import node_on_thread

FEED = keys.ended(POOL, "default")


async def read(source: AsyncGenerator[tuple[str, Completion], None], count: int) -> list[tuple[str, Completion]]:
    """Return the next completions of a reader, and end it."""
    async with aclosing(source), asyncio.timeout(60):
        return [await anext(source) for _ in range(count)]


async def finished(client: AsyncClient, count: int, **options: Any) -> list[str]:
    """Return the ids of jobs that have ended one after another."""
    ids = []
    for _ in range(count):
        job = await client.submit("hello", model=MODEL, max_tokens=2, **options)
        await job.result()
        ids.append(job.id)
    return ids


async def test_completions_follow_a_cursor_that_was_taken_before(client: AsyncClient, node: FakeNode) -> None:
    before = await client.completions_cursor()
    ids = await finished(client, 3)
    found = await read(client.completions(before), 3)
    assert [done.job_id for _, done in found] == ids
    assert {done.state for _, done in found} == {"succeeded"}
    more = await finished(client, 1)
    rest = await read(client.completions(found[1][0]), 2)
    assert [done.job_id for _, done in rest] == [ids[2], *more]


async def test_completions_begin_now_without_a_cursor(client: AsyncClient, node: FakeNode) -> None:
    await finished(client, 1)
    reader, ids = client.completions(), list[str]()
    first = asyncio.ensure_future(anext(reader))
    async with asyncio.timeout(60):
        # It begins when Redis has its first call.
        while not first.done():
            ids += await finished(client, 1)
        assert (await first)[1].job_id in ids
    await reader.aclose()


async def test_completions_of_a_tag_a_pool_and_a_tenant(client: AsyncClient, redis: Redis, told_node: FakeNode) -> None:
    cursor = await client.completions_cursor()
    of_pool = await client.completions_cursor(pool=POOL)
    jobs = [await client.submit("hello", model=MODEL) for _ in range(2)]
    await redis.hset(keys.job(jobs[1].id), mapping={"tag1": "red", "tag2": "blue", "extra": 9})
    for job in jobs:
        await job.cancel()
    ((_, done),) = await read(client.completions(cursor, tag="blue"), 1)
    assert (done.job_id, done.state, done.tags) == (jobs[1].id, "cancelled", ("red", "blue"))
    assert [done.job_id for _, done in await read(client.completions(of_pool, pool=POOL), 2)] == [
        job.id for job in jobs
    ]
    rivals = await client.completions_cursor(tenant="rival")
    theirs = await client.submit("hello", model=MODEL, tenant="rival")
    await theirs.cancel()
    ((_, done),) = await read(client.completions(rivals, tenant="rival"), 1)
    assert done.job_id == theirs.id

    for wrong, param in (
        ({"after": rivals}, "after"),
        ({"after": of_pool}, "after"),
        ({"after": "nonsense"}, "after"),
        ({"tag": ""}, "tag"),
        ({"tag": "two words"}, "tag"),
        ({"tag": "x" * 65}, "tag"),
    ):
        with pytest.raises(RequestError) as caught:
            await anext(client.completions(**wrong))
        assert caught.value.param == param


async def test_a_gap_is_filled_from_the_job_list(
    client: AsyncClient, redis: Redis, node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    start = await client.completions_cursor()
    ids = await finished(client, 6)
    ((seen, _),) = await read(client.completions(start), 1)
    await redis.xtrim(FEED, maxlen=2, approximate=False)
    with caplog.at_level(logging.INFO, "penstock"):
        found = await read(client.completions(seen), 5)
    known = [done.job_id for _, done in found]
    # A job that ended in the millisecond at which the gap begins may come again.
    assert set(ids[1:4]) <= set(known) and len(set(known)) == 5 and set(known) <= set(ids)
    assert "completions are read from the job list" in caplog.text
    # A reader that ends within the gap fills it again.
    assert found[0][0] == seen


async def test_a_connected_reader_gets_each_job_once_although_redis_lost_writes(
    client: AsyncClient, redis: Redis, node: FakeNode
) -> None:
    reader = client.completions(await client.completions_cursor())
    async with aclosing(reader), asyncio.timeout(60):
        ids = await finished(client, 3)
        assert [(await anext(reader))[1].job_id for _ in range(3)] == ids
        newest: Any = await redis.xrevrange(FEED, count=1)
        await redis.xdel(FEED, newest[0][0])
        more = await finished(client, 2)
        assert sorted([(await anext(reader))[1].job_id for _ in range(2)]) == more


async def test_results_come_in_the_order_of_the_ends(client: AsyncClient, told_node: FakeNode) -> None:
    jobs = [await client.submit("hello", model=MODEL, max_tokens=3) for _ in range(3)]
    held = await told_node.take(3)
    results = client.as_completed(jobs)
    async with aclosing(results), asyncio.timeout(60):
        for job in (held[1], held[2], held[0]):
            await job.say(3)
            await job.finish()
            result = await anext(results)
            assert (result.job_id, result.outcome.state) == (job.id, "succeeded")
        with pytest.raises(StopAsyncIteration):
            await anext(results)


async def test_results_of_jobs_that_had_ended_before_and_of_ids(client: AsyncClient, node: FakeNode) -> None:
    early = await finished(client, 2)
    late = [await client.submit("hello", model=MODEL, max_tokens=2) for _ in range(3)]
    async with asyncio.timeout(60):
        results = [result async for result in client.as_completed([*early, *late])]
    assert {result.job_id for result in results} == {*early, *(job.id for job in late)}
    assert all(result.text and result.outcome.state == "succeeded" for result in results)
    assert [result async for result in client.as_completed([])] == []


async def test_a_job_that_fails_raises_its_error_unless_the_caller_asks_for_its_result(
    client: AsyncClient, told_node: FakeNode
) -> None:
    job = await client.submit("hello", model=MODEL)
    await job.cancel()
    with pytest.raises(JobFailedError):
        await anext(client.as_completed([job]))
    (result,) = [result async for result in client.as_completed([job.id], check=False)]
    assert result.outcome.state == "cancelled"


async def test_waiting_for_results_ends_at_the_timeout_and_with_wrong_jobs(
    client: AsyncClient, told_node: FakeNode
) -> None:
    job = await client.submit("hello", model=MODEL)
    with pytest.raises(ResultTimeoutError, match=r"1 of 1 jobs have not ended after 0\.2 s; they go on"):
        await anext(client.as_completed([job], timeout=0.2))
    other = await client.submit("hello", model=MODEL, tenant="rival")
    with pytest.raises(RequestError, match="jobs must belong to one tenant, and these belong to default, rival"):
        await anext(client.as_completed([job, other]))
    with pytest.raises(NotFoundError):
        await anext(client.as_completed([job.id[:-1] + ("0" if job.id[-1] != "0" else "1")]))
    with pytest.raises(NotFoundError):
        client.as_completed(["nonsense"])


async def test_jobs_that_redis_lost_are_submitted_again(client: AsyncClient, redis_url: str, redis: Redis) -> None:
    async with FakeNode(redis_url, auto=False):
        jobs = [await client.submit("hello", model=MODEL, max_tokens=2) for _ in range(3)]
        results = client.as_completed(jobs)
        first = asyncio.ensure_future(anext(results))
        await asyncio.sleep(0.2)
        await redis.flushall()
    async with FakeNode(redis_url), asyncio.timeout(60):
        found = [await first, *[result async for result in results]]
    assert {result.job_id for result in found} == {job.id for job in jobs}
    assert client.stats.resubmits == 3


def test_synchronous_client_follows_completions_too(redis_url: str) -> None:
    with node_on_thread(redis_url), Client(redis_url) as client:
        cursor = client.completions_cursor()
        jobs = [client.submit("hello", model=MODEL, max_tokens=2) for _ in range(3)]
        results = list(client.as_completed([jobs[0], jobs[1].id, jobs[2]], timeout=60))
        assert {result.job_id for result in results} == {job.id for job in jobs}
        reader = client.completions(cursor)
        found = [next(reader) for _ in jobs]
        assert {done.job_id for _, done in found} == {job.id for job in jobs}
        again = client.completions(found[1][0])
        assert next(again)[1] == found[2][1]
