"""A Redis that is full, has lost its scripts, or is unreachable."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fakes.queue.harness import LEASE_MS, POOL, P, Queue, new_job
from redis import exceptions
from redis.asyncio import Redis

from penstock.contract.errors import BusyError, ConfigError, DamagedRecordError, InvariantError, UnavailableError
from penstock.queue.broker.connection import connect, translated
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.runtime.embedded_redis import EmbeddedRedis


@pytest.fixture
async def full(redis: Redis) -> AsyncIterator[None]:
    """A function that fills the server. After the test, memory is free again."""
    yield
    await redis.config_set("maxmemory", "512mb")


async def fill(redis: Redis) -> None:
    await redis.config_set("maxmemory", 1)
    with pytest.raises(exceptions.OutOfMemoryError):
        await redis.set("more", "x")


@pytest.mark.usefixtures("full")
async def test_full_redis_refuses_submits_and_nothing_else(queue: Queue) -> None:
    node, dying = await queue.node("n1"), await queue.node("dying")
    swept = await queue.running(dying)
    running, given, flagged = [await queue.running(node, inbox="me") for _ in range(3)]
    known = new_job()
    waiting, cancelled = await queue.submit(known), await queue.submit()
    await queue.age("nodes", "dying", LEASE_MS + 1)
    await queue.note_sweep(LEASE_MS // 4)
    await fill(queue.redis)

    with pytest.raises(BusyError) as caught:
        await queue.submit()
    assert caught.value.code == "redis_full"
    assert (await queue.producer.submit(Submission(known, 100), inbox="me")).existed

    assert await queue.run_sweep() == ["OK", 1, 1, 0]
    assert await node.emit(running, 0, 3) == "OK"
    assert await node.finish(running, 3, 2) == "OK"
    assert await node.give_back(given) == "OK"
    assert await queue.producer.cancel(cancelled, "default") == "cancelled"
    assert await queue.producer.cancel(flagged.job_id, "default") == "cancelling"
    assert (await queue.producer.attach(waiting, "default", inbox="me")).state == "queued"
    await queue.producer.detach(waiting, "me")
    await queue.producer.reader_heartbeat(POOL, "me")
    assert (await node.heartbeat([flagged.job_id])).cancelled == (flagged.job_id,)
    late = await queue.node("late")
    assert (await late.take()).jobs == (), "no memory for their output"
    await queue.redis.config_set("maxmemory", "512mb")
    assert {job.job_id for job in (await late.take()).jobs} == {waiting, given.job_id, swept.job_id}
    assert await late.broker.leave() == 3
    assert len(await queue.log(running.job_id)) == 6


async def test_forgotten_scripts_are_loaded_again(queue: Queue) -> None:
    node = await queue.node()
    job_id = await queue.submit(inbox="me")
    for step in range(2):
        await queue.redis.script_flush()
        taken = await node.take_one()
        await queue.redis.script_flush()
        assert await node.emit(taken, step, 1) == "OK"
        await queue.redis.script_flush()
        assert await node.give_back(taken) == "OK"
        await queue.change(job_id, avoid_until=0)
    await queue.redis.script_flush()
    assert await queue.producer.cancel(job_id, "default") == "cancelled"


async def test_unreachable_redis_is_unavailable() -> None:
    with EmbeddedRedis() as server:
        client = connect(server.url)
        broker = ProducerBroker(client)
        assert await broker.pools() == {}
    for call in (
        broker.pools(),
        broker.reader_heartbeat(POOL, "me"),
        broker.submit(Submission(new_job(), 1)),
        broker.pressure(POOL),
    ):
        with pytest.raises(UnavailableError) as caught:
            await call
        assert caught.value.code == "redis_away"
        assert caught.value.retry_after_ms > 0
    await client.aclose()


def test_wrong_url_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="redis_url: Redis URL must") as caught:
        connect("ftp://host")
    assert caught.value.param == "redis_url"
    with pytest.raises(ConfigError, match="redis_url: unknown option 'tls'"):
        connect("redis://host/0?tls=yes")


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (exceptions.ConnectionError("refused"), UnavailableError),
        (exceptions.TimeoutError("slow"), UnavailableError),
        (exceptions.BusyLoadingError("loading"), UnavailableError),
        (exceptions.ReadOnlyError("replica"), UnavailableError),
        (exceptions.ResponseError("MASTERDOWN Link with MASTER is down"), UnavailableError),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), UnavailableError),
        (exceptions.ResponseError("script: -READONLY You can't write against a replica"), UnavailableError),
        (ConnectionResetError("reset"), UnavailableError),
        (exceptions.OutOfMemoryError("command not allowed"), BusyError),
        (exceptions.ResponseError("@user_script: -OOM command not allowed"), BusyError),
        (exceptions.AuthenticationError("wrong password"), ConfigError),
        (exceptions.NoPermissionError("no ACL"), ConfigError),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), DamagedRecordError),
        (exceptions.ResponseError("WRONGTYPE Operation against a key script: 1a, on @user_script:1."), InvariantError),
    ],
)
async def test_errors_of_redis_are_translated(foreign: Exception, ours: type[Exception]) -> None:
    with pytest.raises(ours) as caught, translated():
        raise foreign
    # A user sees one traceback, unless the error is a bug.
    assert caught.value.__cause__ is (foreign if ours is InvariantError else None)
    assert caught.value.__suppress_context__


async def test_damaged_data_is_an_invariant_error_and_not_an_outage(queue: Queue) -> None:
    await queue.node()
    await queue.redis.set(f"{P}:readers", "no sorted set")
    with pytest.raises(InvariantError, match="WRONGTYPE"):
        await queue.producer.reader_heartbeat(POOL, "reader")
