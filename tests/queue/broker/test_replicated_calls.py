"""Writes with the durability `replicated`: answered once a replica has them, on a real primary and its real replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from fakes.queue.harness import FakeNode, new_job
from faults.tools.replica import ReplicatedRedis
from redis.asyncio import Redis

from penstock.contract.durability import REPLICATED
from penstock.contract.errors import NotFoundError, NotReplicatedError, UnavailableError, UnsupportedDurabilityError
from penstock.contract.job import JobDef, ResponseRecord
from penstock.contract.tenant import UNLIMITED
from penstock.queue import keys
from penstock.queue.broker import durable_calls
from penstock.queue.broker.connection import Patience, connect
from penstock.queue.broker.jobs import ResponseBroker
from penstock.queue.broker.producer import ProducerBroker, Submission, Submitted
from penstock.queue.tenants.key_store import KeyStore

MIB = 1 << 20
QUICK_S, LONG_S = 0.3, 60.0
"""Time-outs of a confirmation in these tests."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedRedis]:
    with ReplicatedRedis(tmp_path_factory.mktemp("pair")) as both:
        yield both


@pytest.fixture
async def redis(pair: ReplicatedRedis) -> AsyncIterator[Redis]:
    """A connection to the primary, whose only pool has a node."""
    client = connect(pair.url)
    await client.flushall()
    node = FakeNode(client, "n1", "r1")
    await node.join()
    await node.heartbeat([])
    yield client
    await client.aclose()


@pytest.fixture
async def broker(redis: Redis) -> AsyncIterator[ProducerBroker]:
    patience = Patience(5.0)
    patience.is_open = True
    one = ProducerBroker(redis, patience)
    yield one
    await one.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", QUICK_S)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what waits for a confirmation wait for as long as a test lasts."""
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", LONG_S)


@pytest.fixture
def paused(pair: ReplicatedRedis, redis: Redis) -> Iterator[ReplicatedRedis]:
    """A replica that is connected and confirms nothing."""
    pair.replica.pause()
    yield pair
    pair.replica.resume()
    pair.wait_for_replica()


@pytest.fixture
def without_replica(pair: ReplicatedRedis, redis: Redis) -> Iterator[ReplicatedRedis]:
    """A primary whose replica was killed."""
    pair.replica.kill()
    pair.wait_for_loss()
    yield pair
    pair.replica.start()
    pair.wait_for_replica()


async def submit(broker: ProducerBroker, job: JobDef) -> Submitted:
    return await broker.submit(Submission(job, 10, durability=REPLICATED))


async def test_an_accepted_job_is_on_the_replica_and_so_is_its_repetition(
    pair: ReplicatedRedis, broker: ProducerBroker, redis: Redis
) -> None:
    for _ in range(20):
        job = new_job()
        assert not (await submit(broker, job)).existed
        assert pair.replica_has(keys.job(job.id))
    assert (await submit(broker, job)).existed
    await redis.script_flush()
    assert not (await submit(broker, new_job())).existed


@pytest.mark.usefixtures("quick")
async def test_a_replica_that_does_not_confirm_is_told_with_the_jobs_id(
    paused: ReplicatedRedis, broker: ProducerBroker, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await redis.script_flush()
    job = new_job(idempotency_key="k")
    again = job.model_copy(update={"id": new_job().id})
    for one in (job, again):
        started_s = time.monotonic()
        with pytest.raises(NotReplicatedError, match=f"job {job.id} is queued, but .*a replica has it") as caught:
            await submit(broker, one)
        assert QUICK_S <= time.monotonic() - started_s < 5  # by default, it waits for 5 s
        assert (caught.value.job_id, caught.value.code, caught.value.status) == (job.id, "not_replicated", 503)
    paused.replica.resume()
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", LONG_S)
    assert (await submit(broker, again)).job_id == job.id
    assert paused.replica_has(keys.job(job.id))


@pytest.mark.usefixtures("patient")
async def test_calls_with_memory_do_not_wait_behind_it(paused: ReplicatedRedis, broker: ProducerBroker) -> None:
    waiting = asyncio.create_task(submit(broker, new_job()))
    async with asyncio.timeout(30):
        await broker.submit(Submission(new_job(), 10))
        await broker.pools()
    assert not waiting.done()
    paused.replica.resume()
    assert (await waiting).state == "queued"


async def test_what_a_slow_replica_has_yet_to_be_sent_takes_no_memory_from_jobs(
    paused: ReplicatedRedis, broker: ProducerBroker, redis: Redis
) -> None:
    for _ in range(24):
        await redis.set("large", b"x" * MIB)
    await redis.delete("large")
    memory = await redis.info("memory")
    assert memory["mem_not_counted_for_evict"] > MIB
    await redis.config_set("maxmemory", memory["used_memory"])
    try:
        assert (await broker.submit(Submission(new_job(), 10))).state == "queued"
    finally:
        await redis.config_set("maxmemory", 0)


@pytest.mark.usefixtures("patient")
async def test_without_a_connected_replica_nothing_is_written_and_the_answer_comes_at_once(
    without_replica: ReplicatedRedis, broker: ProducerBroker, redis: Redis
) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(
            NotReplicatedError, match="no replica is connected to Redis, so nothing was written"
        ) as caught:
            await submit(broker, new_job())
    assert caught.value.job_id == ""
    assert await redis.exists(keys.open_jobs("m")) == 0
    assert (await broker.submit(Submission(new_job(), 10))).state == "queued"


async def test_min_replicas_to_write_refuses_all_writes_while_the_replica_is_down(
    without_replica: ReplicatedRedis, broker: ProducerBroker, redis: Redis
) -> None:
    await redis.config_set("min-replicas-to-write", 1)
    impatient = ProducerBroker(redis, None)
    for durability in ("memory", REPLICATED):
        with pytest.raises(UnavailableError, match=r"NOREPLICAS|no replica is connected"):
            await impatient.submit(Submission(new_job(), 10, durability=durability))
    assert await broker.pools(), "reads go on"
    waiting = asyncio.create_task(broker.submit(Submission(new_job(), 10)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    without_replica.replica.start()
    assert (await waiting).state == "queued", "the client repeats the call until the replica is back"
    await redis.config_set("min-replicas-to-write", 0)
    await impatient.close()
    without_replica.replica.kill()


async def test_min_replicas_max_lag_bounds_what_is_accepted_while_the_replica_hangs(
    paused: ReplicatedRedis, redis: Redis
) -> None:
    """A replica confirms once a second, so the smallest lag that works is 2 s."""
    await redis.config_set("min-replicas-to-write", 1)
    await redis.config_set("min-replicas-max-lag", 2)
    impatient = ProducerBroker(redis, None)
    started_s, num_accepted = time.monotonic(), 0
    with pytest.raises(UnavailableError, match="NOREPLICAS"):
        async with asyncio.timeout(60):
            while True:
                await impatient.submit(Submission(new_job(), 10))
                num_accepted += 1
                await asyncio.sleep(0.05)
    assert num_accepted
    assert time.monotonic() - started_s < 9  # the lag is 10 s by default
    for name, value in (("min-replicas-to-write", 0), ("min-replicas-max-lag", 10)):
        await redis.config_set(name, value)
    await impatient.close()


async def test_a_server_that_becomes_a_replica_confirms_nothing(
    paused: ReplicatedRedis, broker: ProducerBroker, redis: Redis
) -> None:
    waiting = asyncio.create_task(submit(broker, new_job()))
    await asyncio.sleep(0.1)
    await redis.replicaof("127.0.0.1", "1")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await redis.replicaof("NO", "ONE")
    paused.replica.resume()
    paused.wait_for_replica()
    try:
        assert (await waiting).state == "queued"
    except NotReplicatedError:  # the call was repeated before the replica was back
        assert (await submit(broker, new_job())).state == "queued"


@pytest.mark.parametrize("taken", ["-wait", "-role"])
async def test_a_user_without_the_right_is_told_the_rule(pair: ReplicatedRedis, redis: Redis, taken: str) -> None:
    await cast(Any, redis).execute_command("ACL", "SETUSER", "gate", "on", ">gate", "~*", "&*", "+@all", taken)
    other = connect(pair.primary.url_of("gate"))
    broker = ProducerBroker(other)
    with pytest.raises(UnsupportedDurabilityError, match=r"replicated is not possible.*\+wait and \+role"):
        await submit(broker, new_job())
    assert await redis.exists(keys.open_jobs("m")) == 0
    await broker.close()
    await other.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_revocation_is_on_the_replica_or_is_told_and_may_be_repeated(
    paused: ReplicatedRedis, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(redis)
    _, key = await store.add("acme", ["infer"], UNLIMITED)
    with pytest.raises(NotReplicatedError, match=f"the API key {key.key_id} is changed, but"):
        await store.revoke(key.key_id, REPLICATED)
    assert (await store.all())[key.key_id].is_revoked
    paused.replica.resume()
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", LONG_S)
    await store.revoke(key.key_id, REPLICATED)
    replica = connect(paused.replica.url)
    assert (await KeyStore(replica).all())[key.key_id].is_revoked
    await replica.aclose()
    with pytest.raises(NotFoundError):
        await store.revoke("0" * 16, REPLICATED)


@pytest.mark.usefixtures("quick")
async def test_a_deleted_response_is_gone_from_the_replica_or_that_is_told_and_may_be_repeated(
    paused: ReplicatedRedis, broker: ProducerBroker, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = new_job(tenant="acme"), new_job(tenant="acme")
    await broker.submit(Submission(job, 10, response=ResponseRecord(b"record", keep_ms=600_000)))
    await broker.submit(Submission(other, 10))
    responses = ResponseBroker(redis)
    with pytest.raises(NotReplicatedError, match="the response is deleted, but"):
        await responses.delete(job.id, "acme", REPLICATED)
    with pytest.raises(NotFoundError):
        await responses.read(job.id, "acme")
    paused.replica.resume()
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", LONG_S)
    await responses.delete(job.id, "acme", REPLICATED)
    assert not paused.replica_has(keys.response(job.id))
    assert paused.replica_has(keys.job(job.id))
    for wrong in ((job.id, "rival"), (other.id, "acme")):
        with pytest.raises(NotFoundError):
            await responses.delete(*wrong, REPLICATED)
    with pytest.raises(NotFoundError):
        await responses.delete(job.id, "acme")
