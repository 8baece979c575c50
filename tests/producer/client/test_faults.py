"""Streams stay complete when messages, connections, logs or jobs are lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from fakes.fake_node import POOL, FakeJob, FakeNode, Say, fake_tokens
from fakes.waiting import until
from redis.asyncio import Redis

from penstock.contract.errors import JobFailedError, NotFoundError, StreamDivergedError, UnavailableError
from penstock.contract.output import Chunk
from penstock.producer.client import AsyncClient, ClientSettings, mailbox
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.producer import ProducerBroker
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.producer.client.conftest import QUICK
from tests.producer.client.reading import check_whole, read_all, read_some

PATIENCE_S = 60.0


async def kill_subscriptions(redis: Redis) -> None:
    await redis.client_kill_filter(_type="pubsub")


async def test_lost_messages_are_read_from_the_log(client: AsyncClient, told_node: FakeNode) -> None:
    job = await client.submit("hello", max_tokens=100)
    reading = asyncio.create_task(read_all(job.stream()))
    [run] = await told_node.take()
    for how in (Say.PUBLISHED, Say.LOGGED) * 5:
        await run.say(10, how)
    await run.finish()
    check_whole(await reading, job, 100)
    assert 1 <= client.stats.log_reads <= 5
    assert client.stats.gaps == client.stats.log_reads


async def test_doubled_messages_are_dropped(client: AsyncClient, node: FakeNode) -> None:
    node.how = Say.TWICE
    job = await client.submit("hello", max_tokens=50, n=2)
    check_whole(await read_all(job.stream()), job, 50, num_choices=2)
    assert client.stats.chunks > 101
    assert client.stats.log_reads == 0


async def test_malformed_messages_on_the_inbox_are_ignored(client: AsyncClient, node: FakeNode, redis: Redis) -> None:
    node.step_s = 0.01
    job = await client.submit("hello", max_tokens=20)
    [channel] = await redis.pubsub_channels(keys.inbox_channel("*", "*"))
    for nonsense in (
        b"",
        b"\xff\xff",
        b"\x93\x01",
        b"\x81\xa1j\x01",
        b"\xc0",
        b"\xc0x",
        b"\xc0\xff",
        b"\xc0" + b"9" * 5000,
    ):
        await redis.publish(channel, nonsense)
    check_whole(await read_all(job.stream()), job, 20)
    assert client.stats.bad_messages >= 6
    assert client.is_alive


async def test_a_client_is_alive_from_connect_to_close(redis_url: str) -> None:
    client = AsyncClient(redis_url)
    assert not client.is_alive
    async with client:
        assert client.is_alive
    assert not client.is_alive


async def test_slow_reader_continues_from_the_log(redis_url: str, told_node: FakeNode) -> None:
    settings = ClientSettings(max_queued_chunks=10)
    async with AsyncClient(redis_url, settings=settings) as client:
        slow, fast = await client.submit("hello", max_tokens=200), await client.submit("hello", max_tokens=200)
        stream = slow.stream()
        others = fast.stream()
        runs = {run.id: run for run in await told_node.take(2)}
        await runs[slow.id].say(5)
        seen = await read_some(stream, 3)
        kept_up = []
        for _ in range(39):
            await runs[slow.id].say(5)
            await runs[fast.id].say(5)
            kept_up += await read_some(others, 5)
        await runs[fast.id].say(5)
        await runs[slow.id].finish()
        await runs[fast.id].finish()
        check_whole(kept_up + await read_all(others), fast, 200)
        reads_before = client.stats.log_reads
        assert reads_before == 0
        check_whole(seen + await read_all(stream), slow, 200)
        assert client.stats.log_reads - reads_before == 1


@pytest.mark.parametrize(("most", "num_reads"), [(64 << 20, 0), (700 * mailbox.MIN_QUEUED_CHUNKS, 1)])
async def test_slow_readers_of_one_client_share_a_bound_of_bytes(
    redis_url: str, told_node: FakeNode, monkeypatch: pytest.MonkeyPatch, most: int, num_reads: int
) -> None:
    monkeypatch.setattr(mailbox, "MAX_QUEUED_BYTES", most)
    async with AsyncClient(redis_url) as client:
        job = await client.submit("hello", max_tokens=100)
        stream = job.stream()
        [run] = await told_node.take()
        await run.say(5)
        seen = await read_some(stream, 3)
        for _ in range(19):
            await run.say(5)
        await run.finish()
        await asyncio.sleep(0.1)
        check_whole(seen + await read_all(stream), job, 100)
        assert client.stats.log_reads == num_reads


async def test_slow_reader_gets_the_rest_from_the_result_once_the_log_has_expired(
    redis_url: str, told_node: FakeNode, redis: Redis
) -> None:
    async with AsyncClient(redis_url, settings=ClientSettings(max_queued_chunks=10)) as client:
        job = await client.submit("hello", max_tokens=50, n=2)
        stream = job.stream()
        [run] = await told_node.take()
        await run.say(2)
        seen = await read_some(stream, 3)
        await run.say(48)
        await run.finish()
        await until(lambda: redis.exists(keys.log(job.id)), lambda seen: not seen)
        check_whole(seen + await read_all(stream), job, 50, num_choices=2)


async def test_killed_subscriptions_are_renewed(quick_client: AsyncClient, node: FakeNode, redis: Redis) -> None:
    node.step_s = 0.005
    jobs = [await quick_client.submit("hello", max_tokens=150) for _ in range(10)]
    readings = [asyncio.create_task(read_all(job.stream())) for job in jobs]
    for number in range(1, 4):
        await kill_subscriptions(redis)
        await until(lambda least=number: quick_client.stats.resubscribes >= least)
    for job, reading in zip(jobs, readings, strict=True):
        check_whole(await reading, job, 150)


async def test_a_client_that_lost_its_rights_says_so(
    quick_client: AsyncClient, node: FakeNode, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await redis.execute_command("ACL", "SETUSER", "default", "-publish", "-subscribe")
    try:
        await kill_subscriptions(redis)
        await until(lambda: "redis refused" in caplog.text)
    finally:
        await redis.execute_command("ACL", "SETUSER", "default", "+publish", "+subscribe")
    assert "redis is unreachable" in caplog.text
    check_whole(await read_all((job := await quick_client.submit("hello", max_tokens=20)).stream()), job, 20)


async def test_the_last_message_may_be_lost_too(quick_client: AsyncClient, told_node: FakeNode, redis: Redis) -> None:
    job = await quick_client.submit("hello", max_tokens=10)
    reading = asyncio.create_task(read_all(job.stream()))
    [run] = await told_node.take()
    await run.say(3)
    await kill_subscriptions(redis)
    await run.say(7)
    await run.finish()
    check_whole(await asyncio.wait_for(reading, PATIENCE_S), job, 10)


async def test_silent_stream_reads_the_state_of_its_job(redis_url: str, told_node: FakeNode) -> None:
    async with AsyncClient(redis_url, settings=ClientSettings(silent_after_s=0.4)) as client:
        job = await client.submit("hello", max_tokens=6)
        stream = job.stream()
        [run] = await told_node.take()
        await run.say(6, Say.LOGGED)
        assert [chunk.index for chunk in await asyncio.wait_for(read_some(stream, 6), PATIENCE_S)] == list(range(6))
        assert client.stats.resubscribes == 0
        await run.finish()
        await read_all(stream)


async def test_open_subscription_that_receives_nothing_is_renewed(
    quick_client: AsyncClient, node: FakeNode, redis: Redis
) -> None:
    """The echo is what proves it: here messages go nowhere, as behind a half-dead proxy."""
    inbox = quick_client.servers.directory.inbox
    inbox._channel, channel = "penstock:echo:elsewhere", inbox._channel
    await until(lambda: quick_client.stats.resubscribes != 0)
    inbox._channel = channel
    assert (await (await quick_client.submit("hello")).result()).outcome.state == "succeeded"


async def test_a_reader_beyond_the_jobs_sixteen_follows_the_log(
    redis_url: str, told_node: FakeNode, redis: Redis
) -> None:
    async with AsyncClient(redis_url) as client:
        job = await client.submit("hello", max_tokens=20)
        for number in range(15):
            await ProducerBroker(redis).attach(job.id, "default", inbox=f"somebody-{number}")
        async with AsyncClient(redis_url) as late:
            reading = asyncio.create_task(read_all((await late.attach(job.id)).stream()))
            waiting = asyncio.create_task(late.result(job.id))
            [run] = await told_node.take()
            await run.say(20)
            await run.finish()
            check_whole(await asyncio.wait_for(reading, PATIENCE_S), job, 20)
            assert (await asyncio.wait_for(waiting, PATIENCE_S)).outcome.state == "succeeded"


# Redis loses what it had acknowledged ------------------------------------------------------------


async def forget(redis: Redis, job_id: str) -> None:
    """Delete the job, as in a fail-over to a replica that never received it."""
    for key in await redis.keys(f"*{job_id}*"):
        await redis.delete(key)
    for key in await redis.keys(f"penstock:{{{POOL}}}:*"):
        if await redis.type(key) == b"zset":
            await redis.zrem(key, job_id)
        elif await redis.type(key) == b"set":
            await redis.srem(key, job_id)


async def test_a_lost_queued_job_is_submitted_again(
    quick_client: AsyncClient, told_node: FakeNode, redis: Redis
) -> None:
    job = await quick_client.submit("hello", max_tokens=10)
    reading = asyncio.create_task(read_all(job.stream()))
    waiting = asyncio.create_task(job.result())
    await forget(redis, job.id)
    [run] = await told_node.take()
    assert run.id == job.id
    await run.say(10)
    await run.finish()
    check_whole(await asyncio.wait_for(reading, PATIENCE_S), job, 10)
    assert (await waiting).choices[0].token_ids == tuple(fake_tokens(job.id, 10))
    assert quick_client.stats.resubmits >= 1


async def test_of_too_many_requests_the_newest_are_kept_for_submitting_them_again(
    redis_url: str, told_node: FakeNode, redis: Redis
) -> None:
    settings = QUICK.model_copy(update={"max_kept_mib": 1})
    async with AsyncClient(redis_url, settings=settings) as client:
        # A tenant may keep a quarter of a MiB.
        jobs = [await client.submit(letter * 150_000, max_tokens=10) for letter in "ab"]
        other = await client.submit("c" * 150_000, max_tokens=10, tenant="other")
        readings = [asyncio.create_task(read_all(job.stream())) for job in (*jobs, other)]
        for job in (*jobs, other):
            await forget(redis, job.id)
        runs = await told_node.take(2)
        assert {run.id for run in runs} == {jobs[1].id, other.id}
        for run in runs:
            await run.say(10)
            await run.finish()
        for job, reading in zip((jobs[1], other), readings[1:], strict=True):
            check_whole(await asyncio.wait_for(reading, PATIENCE_S), job, 10)
        with pytest.raises(NotFoundError):
            await asyncio.wait_for(readings[0], PATIENCE_S)


async def test_lost_running_job_continues_after_the_delivered_tokens(
    quick_client: AsyncClient, told_node: FakeNode, redis: Redis
) -> None:
    job = await quick_client.submit("hello", max_tokens=10)
    stream = job.stream()
    [run] = await told_node.take()
    await run.say(4)
    seen = await read_some(stream, 4)
    await forget(redis, job.id)
    reading = asyncio.create_task(read_all(stream))
    [again] = await told_node.take()
    await again.say(10)
    await again.finish()
    check_whole(seen + await asyncio.wait_for(reading, PATIENCE_S), job, 10)


async def test_a_job_that_was_lost_with_its_pool_waits_for_the_nodes(
    quick_client: AsyncClient, told_node: FakeNode, redis: Redis
) -> None:
    job = await quick_client.submit("hello", max_tokens=10)
    reading = asyncio.create_task(read_all(job.stream()))
    await redis.flushall()
    await asyncio.sleep(0.7)
    await told_node.join()
    [run] = await told_node.take()
    await run.say(10)
    await run.finish()
    check_whole(await asyncio.wait_for(reading, PATIENCE_S), job, 10)


async def test_a_submission_waits_for_the_pool_that_redis_lost(
    quick_client: AsyncClient, told_node: FakeNode, redis: Redis
) -> None:
    await quick_client.submit("hello")
    await redis.flushall()
    submitting = asyncio.create_task(quick_client.submit("hello", max_tokens=1))
    await asyncio.sleep(0.05)
    assert not submitting.done()
    await told_node.join()
    [run] = await told_node.take()
    await run.say(1)
    await run.finish()
    assert len((await (await submitting).result()).token_ids) == 1


async def test_a_log_that_was_rolled_back_is_not_delivered_twice(
    quick_client: AsyncClient, told_node: FakeNode, redis: Redis
) -> None:
    job = await quick_client.submit("hello", max_tokens=10)
    stream = job.stream()
    [run] = await told_node.take()
    await run.say(6)
    seen = await read_some(stream, 6)
    await redis.ltrim(keys.log(job.id), 0, 2)
    del run.chunks[3:]
    run.said[0] = 3
    await run.say(7)
    await run.finish()
    check_whole(seen + await read_all(stream), job, 10)


async def test_a_log_with_other_tokens_than_those_delivered_is_refused(
    quick_client: AsyncClient, told_node: FakeNode, redis: Redis
) -> None:
    job = await quick_client.submit("hello", max_tokens=10)
    stream = job.stream()
    [run] = await told_node.take()
    await run.say(6)
    await read_some(stream, 6)
    await redis.ltrim(keys.log(job.id), 0, 2)
    del run.chunks[3:]
    other = Chunk(job.id, 3, 0, 3, (7,), "x")
    await told_node.emit([run.emission([other])], Say.PUBLISHED)
    with pytest.raises(StreamDivergedError):
        await asyncio.wait_for(read_all(stream), PATIENCE_S)


async def test_lost_job_of_another_process_is_not_found(
    quick_client: AsyncClient, told_node: FakeNode, redis: Redis, redis_url: str
) -> None:
    job = await quick_client.submit("hello")
    async with AsyncClient(redis_url, settings=QUICK) as other:
        stream = (await other.attach(job.id)).stream()
        await job.detach()
        await forget(redis, job.id)
        with pytest.raises(NotFoundError):
            await asyncio.wait_for(read_all(stream), PATIENCE_S)


async def test_job_that_lost_its_nodes_raises_node_lost(client: AsyncClient, told_node: FakeNode) -> None:
    job = await client.submit("hello")
    [run] = await told_node.take()
    await run.finish("failed", "node_lost")
    with pytest.raises(JobFailedError) as caught:
        await job.result()
    assert caught.value.code == "node_lost"


# Redis goes away ---------------------------------------------------------------------------------


async def test_short_outage_of_redis_is_waited_out() -> None:
    with EmbeddedRedis() as server:
        async with AsyncClient(server.url, settings=QUICK) as client, FakeNode(server.url, auto=False) as node:
            job = await client.submit("hello", max_tokens=10)
            reading = asyncio.create_task(read_all(job.stream()))
            [run] = await node.take()
            await run.say(5)
            await pause(node, 1.2)
            await run.say(5)
            await run.finish()
            check_whole(await asyncio.wait_for(reading, PATIENCE_S), job, 10)


async def pause(node: FakeNode, seconds: float) -> None:
    """Pause Redis: it runs, but answers no client."""
    await node.redis.client_pause(int(1000 * seconds))
    await asyncio.sleep(seconds)


async def test_outage_longer_than_the_limit_raises_unavailable() -> None:
    settings = QUICK.model_copy(update={"outage_s": 0.5})
    with EmbeddedRedis() as server:
        async with FakeNode(server.url, auto=False):
            client = await AsyncClient(server.url, settings=settings).connect()
            job = await client.submit("hello")
            reading = asyncio.create_task(read_all(job.stream()))
            await asyncio.sleep(0.05)
            server.stop()
            with pytest.raises(UnavailableError) as caught:
                await asyncio.wait_for(reading, PATIENCE_S)
            assert caught.value.code == "redis_away"
            with pytest.raises(UnavailableError):
                await client.submit("hello")
            await asyncio.wait_for(client.close(), PATIENCE_S)


async def test_a_submission_whose_answer_is_lost_is_one_job(
    quick_client: AsyncClient, told_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Callable[..., Awaitable[object]] = scripts.call
    calls: list[object] = []

    async def call_and_lose_the_answer(redis: Redis, name: str, *arguments: object) -> object:
        answer = await call(redis, name, *arguments)
        calls.extend([answer] if name == "submit" else [])
        if name == "submit" and len(calls) < 3:
            raise UnavailableError("connection lost", code="redis_away")
        return answer

    monkeypatch.setattr(scripts, "call", call_and_lose_the_answer)
    job = await quick_client.submit("hello", max_tokens=5)
    assert len(calls) == 3
    runs: list[FakeJob] = await told_node.take()
    assert [run.id for run in runs] == [job.id]
    await runs[0].say(5)
    await runs[0].finish()
    check_whole(await read_all(job.stream()), job, 5)


async def test_blocked_process_does_not_renew_its_subscription(client: AsyncClient, node: FakeNode) -> None:
    job = await client.submit("hello", max_tokens=100)
    chunks = []
    async for chunk in job.stream():
        chunks.append(chunk)
        if len(chunks) % 20 == 0:
            time.sleep(0.5)  # noqa: ASYNC251  longer than echoes may stay away
    check_whole(chunks, job, 100)
    assert client.stats.resubscribes == 0
