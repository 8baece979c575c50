"""`token_durability`: a reader is shown a token only once the replica of a real primary has it, or Redis's disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.fake_node import FakeNode, fake_tokens
from fakes.waiting import until
from faults.tools.redis_process import RedisProcess
from faults.tools.replica import ReplicatedRedis

from penstock.contract.durability import FSYNC, REPLICATED
from penstock.contract.errors import NotOnDiskError, NotReplicatedError, RequestError, UnsupportedDurabilityError
from penstock.contract.output import Chunk
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.wire import encode_chunk
from tests.producer.client.conftest import QUICK

NUM_TOKENS = 6
IMPATIENT = QUICK.model_copy(update={"outage_s": 0.3})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedRedis]:
    with ReplicatedRedis(tmp_path_factory.mktemp("pair")) as both:
        yield both


@pytest.fixture
async def node(pair: ReplicatedRedis) -> AsyncIterator[FakeNode]:
    async with FakeNode(pair.url, auto=False) as node:
        yield node


@pytest.fixture
async def reader(pair: ReplicatedRedis) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pair.url, settings=QUICK) as client:
        yield client


class Reading:
    """A reader of a job, and the tokens that it was shown."""

    def __init__(self, job: AsyncJob) -> None:
        self.tokens: list[int] = []
        self.chunks: list[Chunk] = []
        self.task = asyncio.create_task(self._read(job))

    async def _read(self, job: AsyncJob) -> None:
        async for chunk in job.chunks():
            self.chunks.append(chunk)
            self.tokens += chunk.token_ids

    async def until(self, num_tokens: int) -> None:
        await until(lambda: len(self.tokens) >= num_tokens)


def paused(pair: ReplicatedRedis, request: pytest.FixtureRequest) -> None:
    """Let the replica confirm nothing, until the test's end or `resume`."""
    pair.replica.pause()

    def end() -> None:
        pair.replica.resume()
        pair.wait_for_replica()

    request.addfinalizer(end)


async def test_no_token_end_or_result_is_shown_that_the_replica_lacks(
    pair: ReplicatedRedis, node: FakeNode, reader: AsyncClient, request: pytest.FixtureRequest
) -> None:
    job = await reader.submit("hello", max_tokens=NUM_TOKENS, token_durability=REPLICATED)
    async with AsyncClient(pair.url, settings=QUICK) as other:
        quick = Reading(await other.attach(job.id))
        safe = Reading(job)
        [run] = await node.take()
        await run.say(2)
        await safe.until(2)
        paused(pair, request)
        await run.say(NUM_TOKENS - 2)
        await run.finish()
        await quick.task
        assert quick.tokens == fake_tokens(job.id, NUM_TOKENS)
        result = asyncio.create_task(other.result(job.id, token_durability=REPLICATED))
        done, _ = await asyncio.wait((result, safe.task), timeout=0.3)
        assert not done and safe.tokens == fake_tokens(job.id, 2)
        pair.replica.resume()
        assert list((await result).choices[0].token_ids) == fake_tokens(job.id, NUM_TOKENS)
        await safe.task
    assert safe.tokens == fake_tokens(job.id, NUM_TOKENS)
    assert safe.chunks[-1].outcome is not None


async def test_a_reader_waits_for_its_patience_and_another_one_goes_on(
    pair: ReplicatedRedis, node: FakeNode, reader: AsyncClient, request: pytest.FixtureRequest
) -> None:
    async with AsyncClient(pair.url, settings=IMPATIENT) as impatient:
        job = await impatient.submit("hello", max_tokens=NUM_TOKENS, token_durability=REPLICATED)
        reading = Reading(job)
        [run] = await node.take()
        await run.say()
        await reading.until(1)
        paused(pair, request)
        await run.say()
        with pytest.raises(
            NotReplicatedError, match=r"token_durability: Redis did not confirm within 0\.3 s that a rep"
        ):
            await reading.task
        assert reading.tokens == fake_tokens(job.id, 1)
        pair.replica.resume()
        pair.wait_for_replica()
        last = reading.chunks[-1].index
        further = Reading(await reader.attach(job.id, after=last, token_durability=REPLICATED))
        await run.say(NUM_TOKENS - 2)
        await run.finish()
        await further.task
    assert reading.tokens + further.tokens == fake_tokens(job.id, NUM_TOKENS)


async def test_what_is_held_is_dropped_with_its_connection_and_the_log_is_read_again(
    pair: ReplicatedRedis, node: FakeNode, reader: AsyncClient, request: pytest.FixtureRequest
) -> None:
    job = await reader.submit("hello", max_tokens=NUM_TOKENS, token_durability=REPLICATED)
    reading = Reading(job)
    [run] = await node.take()
    await run.say()
    await reading.until(1)
    paused(pair, request)
    await run.say()
    redis = cast(Any, node.redis)
    # The same as a fail-over to a server that never got the second chunk, and where another one was made.
    held = run.chunks.pop()
    made = Chunk(job.id, held.index, 0, held.position, (7,), "seven")
    await redis.lset(keys.log(job.id), held.index, encode_chunk(made))
    run.chunks.append(made)
    await asyncio.sleep(0.2)
    assert len(reading.tokens) == 1
    await redis.client_kill_filter(_type="pubsub")
    await until(lambda: reader.stats.resubscribes >= 1)
    pair.replica.resume()
    await reading.until(2)
    assert reading.tokens == [fake_tokens(job.id, 1)[0], 7]
    reading.task.cancel()


async def test_without_a_replica_no_job_is_queued_and_no_job_is_read(redis_url: str) -> None:
    async with FakeNode(redis_url, auto=False), AsyncClient(redis_url, settings=QUICK) as client:
        message = "token_durability: no replica is connected to Redis; a repeated call may find one"
        with pytest.raises(NotReplicatedError, match=message):
            await client.submit("hello", token_durability=REPLICATED)
        assert not (await client.jobs()).jobs
        job = await client.submit("hello")
        with pytest.raises(NotReplicatedError):
            await client.attach(job.id, token_durability=REPLICATED)
        with pytest.raises(RequestError, match="token_durability must be one of memory, fsync, replicated, not 'disk'"):
            await client.attach(job.id, token_durability=cast(Any, "disk"))
    settings = QUICK.model_copy(update={"token_durability": FSYNC})
    async with FakeNode(redis_url, auto=False), AsyncClient(redis_url, settings=settings) as client:
        with pytest.raises(UnsupportedDurabilityError, match="token_durability: fsync is not possible") as caught:
            await client.submit("hello")
        assert caught.value.param == "token_durability"


async def test_with_appendfsync_always_tokens_come_as_long_as_the_setting_stands(tmp_path: Path) -> None:
    with RedisProcess(tmp_path, appendfsync="always") as server:
        async with FakeNode(server.url, auto=False) as node, AsyncClient(server.url, settings=IMPATIENT) as client:
            job = await client.submit("hello", max_tokens=NUM_TOKENS, token_durability=FSYNC)
            reading = Reading(job)
            [run] = await node.take()
            await run.say(3)
            await reading.until(3)
            redis = connect(server.url)
            # Where WAITAOF can be believed, a file that is not written any more tells the same.
            await redis.config_set("appendonly", "no")
            await redis.config_set("appendfsync", "everysec")
            await redis.aclose()
            await run.say()
            with pytest.raises(NotOnDiskError, match="its disk has the next tokens"):
                await reading.task
    assert reading.tokens == fake_tokens(job.id, 3)


async def test_readers_of_one_process_share_the_rounds_of_a_server(
    pair: ReplicatedRedis, node: FakeNode, reader: AsyncClient
) -> None:
    jobs = [await reader.submit(f"hello {n}", max_tokens=8, token_durability=REPLICATED) for n in range(20)]
    readings = [Reading(job) for job in jobs]
    runs = await node.take(len(jobs))
    before = (await node.redis.info("commandstats"))["cmdstat_wait"]["calls"]
    for _ in range(8):
        # As a node does: the chunks of all jobs in one message.
        await node.broker.emit([run.emission(run.next_chunks()) for run in runs])
        await asyncio.sleep(0.02)
    for reading in readings:
        await reading.until(8)
    after = (await node.redis.info("commandstats"))["cmdstat_wait"]["calls"]
    assert after - before <= 4 * 8
    for run in runs:
        await run.finish()
    for reading in readings:
        await reading.task
