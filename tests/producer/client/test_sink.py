"""Chunks that a sink takes as they arrive, and those that still go to the reader."""

from __future__ import annotations

import asyncio

import pytest
from fakes.fake_node import FakeJob, FakeNode, Say
from fakes.waiting import until

from penstock.contract.output import Chunk
from penstock.producer.client import AsyncClient, AsyncJob
from tests.producer.client.reading import check_whole

NUM_TOKENS = 60


class NoteSink:
    """Records the chunks that it takes and those that the reader gets, in one list."""

    def __init__(self) -> None:
        self.is_ready = True
        self.chunks: list[Chunk] = []
        self.num_taken = 0

    def take(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.num_taken += 1

    async def read(self, job: AsyncJob) -> None:
        async for batch in job.batches(self):
            self.chunks += batch

    async def until(self, num_chunks: int) -> None:
        await until(lambda: len(self.chunks) >= num_chunks)


class FailingSink(NoteSink):
    def take(self, chunk: Chunk) -> None:
        raise ValueError("a bug of the sink")


async def start(client: AsyncClient, node: FakeNode, sink: NoteSink) -> tuple[AsyncJob, FakeJob, asyncio.Task[None]]:
    """Start a job with a reader that has its first chunk."""
    job = await client.submit("hello", max_tokens=NUM_TOKENS)
    reading = asyncio.create_task(sink.read(job))
    [run] = await node.take()
    await run.say()
    await sink.until(1)
    return job, run, reading


async def test_a_sink_takes_plain_chunks_and_the_reader_gets_the_others(
    client: AsyncClient, told_node: FakeNode
) -> None:
    sink = NoteSink()
    job, run, reading = await start(client, told_node, sink)
    for said in range(2, NUM_TOKENS + 1):
        await run.say()
        await sink.until(said)
    await run.finish()
    await reading
    check_whole(sink.chunks, job, NUM_TOKENS)
    # All but the first chunk, the one with the finish reason and the one with the outcome.
    assert sink.num_taken == NUM_TOKENS - 2


async def test_a_sink_that_is_not_ready_takes_nothing_and_the_order_stays(
    client: AsyncClient, told_node: FakeNode
) -> None:
    sink = NoteSink()
    job, run, reading = await start(client, told_node, sink)
    for said in range(2, NUM_TOKENS + 1):
        sink.is_ready = said % 3 == 0
        await run.say()
        await sink.until(said)
    await run.finish()
    await reading
    check_whole(sink.chunks, job, NUM_TOKENS)
    assert 0 < sink.num_taken <= NUM_TOKENS / 3


async def test_lost_and_doubled_messages_do_not_reach_a_sink(client: AsyncClient, told_node: FakeNode) -> None:
    sink = NoteSink()
    job, run, reading = await start(client, told_node, sink)
    for how in (Say.LOGGED, Say.PUBLISHED, Say.TWICE) * 6:
        await run.say(3, how)
    await run.say(NUM_TOKENS - 55)
    await run.finish()
    await reading
    check_whole(sink.chunks, job, NUM_TOKENS)
    assert client.stats.gaps


async def test_a_failing_sink_ends_its_own_reader_alone(client: AsyncClient, told_node: FakeNode) -> None:
    good = NoteSink()
    _, bad_run, bad_reading = await start(client, told_node, FailingSink())
    job, run, reading = await start(client, told_node, good)
    await bad_run.say()
    with pytest.raises(ValueError, match="a bug of the sink"):
        await bad_reading
    await run.say(NUM_TOKENS - 1)
    await run.finish()
    await reading
    check_whole(good.chunks, job, NUM_TOKENS)
