"""`job.waiting()`: where a job is in the queue, and how far its prompt is computed, until its first chunk."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, cast

import pytest
from fakes.fake_node import FakeNode
from redis.asyncio import Redis

from penstock.contract.errors import UnavailableError
from penstock.contract.job import pool_of
from penstock.contract.output import PrefillProgress, QueuePosition, WaitEstimate
from penstock.contract.pool import NodePressure
from penstock.contract.priority import Priority
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.mailbox import REPEAT_S, WaitWatcher
from penstock.queue import keys
from penstock.queue.broker.jobs import QueuePositions
from penstock.queue.wire import encode_progress

PATIENCE_S = 60.0


async def updates_of(job: AsyncJob) -> list[QueuePosition | PrefillProgress]:
    return [update async for update in job.waiting()]


async def publish(redis: Redis, job: AsyncJob, *progress: PrefillProgress) -> None:
    """Send progress to the job's readers, as emit.lua does."""
    inbox = (await cast(Any, redis.hget(keys.job(job.id), "inboxes"))).decode()
    for one in progress:
        await redis.publish(keys.inbox_channel(pool_of(job.id), inbox), encode_progress(job.id, one))


async def test_positions_decrease_as_jobs_are_taken_and_end_with_the_first_chunk(
    client: AsyncClient, told_node: FakeNode
) -> None:
    # It holds two jobs of 200 tokens each, and completes 100 tokens a second.
    told_node.pressure = NodePressure(
        told_node.node_id, num_jobs=2, kv_blocks_total=62_500, kv_tokens_available=999_600, drain_cost_per_s=100.0
    )
    await told_node.heartbeat()
    told_node.slots = 1
    jobs = [await client.submit(f"{number}", max_tokens=100) for number in range(3)]
    positions = list[int]()
    async with asyncio.timeout(PATIENCE_S), aclosing(jobs[-1].waiting()) as updates:
        async for update in updates:
            assert isinstance(update, QueuePosition)
            # A job ahead counts as 101 tokens: its limit, and one of prompt.
            assert update.estimated_wait_ms == (2000 + 1010 * (update.position - 1) if update.position else 0)
            positions.append(update.position)
            if update.position:
                await told_node.take(1)
            else:
                await told_node.jobs[jobs[-1].id].say()
    assert positions == [3, 2, 1, 0]


async def test_progress_comes_in_order_and_positions_stop(
    client: AsyncClient, told_node: FakeNode, redis: Redis
) -> None:
    job = await client.submit("hello", return_progress=True)
    collected = asyncio.create_task(updates_of(job))
    (taken,) = await told_node.take(1)
    assert taken.request.return_progress
    parts = [PrefillProgress(90, 16, processed, processed) for processed in (32, 64, 90)]
    for part in parts:
        await publish(redis, job, part)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.6)  # the position is read twice in this time
    await taken.say()
    async with asyncio.timeout(PATIENCE_S):
        found = await collected
    assert found == parts
    assert (await anext(job.stream())).index == 0


async def test_the_last_progress_is_not_lost_when_the_first_chunk_follows_at_once(
    client: AsyncClient, told_node: FakeNode, redis: Redis
) -> None:
    job = await client.submit("hello", return_progress=True)
    collected = asyncio.create_task(updates_of(job))
    (taken,) = await told_node.take(1)
    whole = PrefillProgress(5, 0, 5, 1)
    await publish(redis, job, whole)
    await taken.say()
    async with asyncio.timeout(PATIENCE_S):
        assert await collected == [whole]


@pytest.mark.parametrize("how", ["ended", "begun", "cancelled"])
async def test_a_job_that_waits_no_longer_has_no_updates(client: AsyncClient, told_node: FakeNode, how: str) -> None:
    job = await client.submit("hello", max_tokens=2)
    if how == "cancelled":
        await job.cancel()
    else:
        (taken,) = await told_node.take(1)
        await taken.say(2 if how == "ended" else 1)
        if how == "ended":
            await taken.finish()
    async with asyncio.timeout(PATIENCE_S):
        assert await updates_of(job) == []


async def test_updates_end_when_the_client_closes(redis_url: str, told_node: FakeNode) -> None:
    client = await AsyncClient(redis_url).connect()
    job = await client.submit("hello")
    reading = [asyncio.create_task(updates_of(job)) for _ in range(2)]
    await asyncio.sleep(0.05)
    await client.close()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*reading)
        with pytest.raises(UnavailableError) as caught:
            await updates_of(job)
    assert caught.value.code == "client_closed"


async def test_updates_end_if_positions_cannot_be_read(
    client: AsyncClient, told_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(QueuePositions, "of", fail)
    job = await client.submit("hello")
    async with asyncio.timeout(PATIENCE_S):
        assert await updates_of(job) == []


async def test_status_of_a_queued_job_has_its_position(client: AsyncClient, told_node: FakeNode) -> None:
    first = await client.submit("one")
    urgent = await client.submit("two", priority=Priority.INTERACTIVE)
    late = await client.submit("three", not_before_s=600)
    status = await first.status()
    assert status.queue_position == QueuePosition(2)
    assert (status.num_waiting_ahead, (await urgent.status()).queue_position) == (1, QueuePosition(1))
    assert ((await late.status()).state, (await late.status()).queue_position) == ("scheduled", None)
    await told_node.take(2)
    assert (await first.status()).queue_position is None


async def test_positions_of_many_jobs_are_read_in_few_calls(client: AsyncClient, told_node: FakeNode) -> None:
    jobs = await asyncio.gather(*(client.submit(f"{number}") for number in range(300)))
    generators = [job.waiting() for job in jobs]
    before = await calls_of(told_node.redis)
    async with asyncio.timeout(PATIENCE_S):
        first = await asyncio.gather(*(anext(updates) for updates in generators))
    num_calls = await calls_of(told_node.redis) - before
    assert sorted(update.position for update in first if isinstance(update, QueuePosition)) == [*range(1, 301)]
    # Three reads of 128 jobs each, beside heartbeats and the pressure of the pool.
    assert num_calls < 60
    await asyncio.gather(*(updates.aclose() for updates in generators))


async def calls_of(redis: Redis) -> int:
    """Return how many script calls Redis has got."""
    return int((await redis.info("commandstats")).get("cmdstat_evalsha", {}).get("calls", 0))


def test_a_position_that_stays_is_repeated_only_with_another_estimate_and_after_a_while() -> None:
    async def deliver(*notes: tuple[QueuePosition, float]) -> list[QueuePosition | PrefillProgress]:
        watcher, found = WaitWatcher(), list[QueuePosition | PrefillProgress]()
        for position, now_s in notes:
            watcher.note_position(position, now_s)
            found += [*watcher._fresh.values()]
            watcher._fresh.clear()
        return found

    third, sooner = (QueuePosition(3, WaitEstimate(wait_ms, 5_000, 20_000)) for wait_ms in (9_000, 8_000))
    assert asyncio.run(deliver((third, 0.0), (third, 99.0), (sooner, 100.0))) == [third, sooner]
    soon = [(third, 0.0), (sooner, REPEAT_S / 2)]
    assert asyncio.run(deliver(*soon)) == [third]
