"""Stored bytes count for a tenant: exactly, until they expire, and the limit refuses only that tenant's jobs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from fakes.queue.harness import POOL, FakeNode, P, Queue, chunks_of, new_job
from redis.asyncio import Redis

from penstock.contract.errors import BusyError, NotFoundError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Choice, Outcome, Usage
from penstock.contract.tenant import UNLIMITED, Terms
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.job_lists import DeadLetters
from penstock.queue.broker.node import Emission, Taken
from penstock.queue.broker.producer import LARGE_RESULT_BYTES, Submission
from penstock.queue.job_cost import estimate_output_bytes
from penstock.queue.results import encode_result

RECORD_BYTES, WIDE_RECORD_BYTES, KEY_BYTES = 1120, 5184, 256
LOG_TTL_MS, RESULT_TTL_MS, DEAD_LIFE_MS = 120_000, 86_400_000, 604_800_000


@pytest.fixture
async def small(redis: Redis) -> AsyncIterator[None]:
    """A Redis of 64 MB."""
    await redis.config_set("maxmemory", "64mb")
    yield
    await redis.config_set("maxmemory", "512mb")


async def kept(queue: Queue) -> dict[str, int]:
    found = await cast(Any, queue.redis.hgetall(keys.stored(POOL)))
    return {tenant.decode(): int(size) for tenant, size in found.items()}


async def reserved(queue: Queue) -> dict[str, int]:
    found = await cast(Any, queue.redis.hgetall(keys.reserved(POOL)))
    return {tenant.decode(): int(size) for tenant, size in found.items()}


async def end(node: FakeNode, taken: Taken, result: bytes) -> None:
    last = Emission(taken.job_id, taken.lease, 0, chunks_of(taken.job_id, 0, 2))
    assert await node.broker.finish(last, Outcome("succeeded"), result, usage=Usage(3, 2)) == "OK"


def result_of(num_bytes: int) -> bytes:
    return encode_result((Choice(0, "x" * num_bytes, (), "stop"),), Usage(3, 2), [(0, 0, num_bytes)])


async def ended(queue: Queue, num_bytes: int, **fields: Any) -> str:
    """A job of tenant acme that ended with a result of about so many bytes."""
    node, job = await queue.node(f"n{len(await queue.keys('job:*'))}"), new_job(tenant="acme", **fields)
    await queue.producer.submit(Submission(job, 10), inbox="me")
    await end(node, await node.take_one(), result_of(num_bytes))
    return job.id


async def pass_time(queue: Queue, ms: int) -> None:
    """Expire what is due by then, and sweep."""
    for member in await queue.ids("expiry"):
        await queue.age("expiry", member, ms)
    await queue.sweep()


async def test_each_byte_of_a_job_counts_once_and_is_released_once(queue: Queue) -> None:
    node, job = await queue.node(), new_job(tenant="acme")
    await queue.producer.submit(Submission(job, 10))
    held = RECORD_BYTES + int(await queue.redis.strlen(keys.request(job.id)))
    assert (await kept(queue), await reserved(queue)) == ({"acme": held}, {}), "a queued job reserves no output"
    taken = await node.take_one()
    output = estimate_output_bytes(job, 0)
    assert (await kept(queue), await reserved(queue)) == ({"acme": held}, {"acme": output})

    await node.emit(taken, 0, 40)
    logged = sum(map(len, await queue.log(job.id)))
    assert await kept(queue) == {"acme": held + logged}, "what is written is no longer reserved"
    assert await reserved(queue) == {"acme": max(output - logged, logged, 4096)}
    await node.emit(taken, 40, 2)
    assert await kept(queue) == {"acme": held + logged}, "counted every 12 chunks"
    await node.give_back(taken)
    logged = sum(map(len, await queue.log(job.id)))
    assert (await kept(queue), await reserved(queue)) == ({"acme": held + logged}, {})
    taken = await (await queue.node("other")).take_one()
    assert await reserved(queue) == {"acme": max(output - logged, 4096)}

    last = Emission(taken.job_id, taken.lease, 42, ())
    other = FakeNode(queue.redis, "other", "r1")
    assert await other.broker.finish(last, Outcome("succeeded"), b"r" * 100, usage=Usage(3, 2)) == "OK"
    assert await reserved(queue) == {}


async def test_stored_bytes_of_an_ended_job_are_released_as_its_keys_expire(queue: Queue) -> None:
    node, job = await queue.node(), new_job(tenant="acme")
    await queue.producer.submit(Submission(job, 10))
    taken = await node.take_one()
    await node.emit(taken, 0, 2)
    await end(node, taken, b"r" * 100)
    log = KEY_BYTES + sum(map(len, await queue.log(job.id)))
    assert await kept(queue) == {"acme": RECORD_BYTES + 100 + log}

    await pass_time(queue, LOG_TTL_MS - 1000)
    assert await kept(queue) == {"acme": RECORD_BYTES + 100 + log}
    await pass_time(queue, 1000)
    assert await kept(queue) == {"acme": RECORD_BYTES + 100}
    await pass_time(queue, RESULT_TTL_MS)
    assert await kept(queue) == {}
    assert await queue.ids("expiry") == set()


async def test_a_large_result_goes_with_the_log_once_it_was_fetched(queue: Queue) -> None:
    job_id = await ended(queue, 10 * LARGE_RESULT_BYTES)
    assert await queue.redis.pttl(keys.result(job_id)) > RESULT_TTL_MS - 5000
    for _ in range(2):
        assert await queue.producer.result(job_id, "acme") is not None
        assert LOG_TTL_MS - 5000 < await queue.redis.pttl(keys.result(job_id)) <= LOG_TTL_MS
    size = (await kept(queue))["acme"]
    assert size > 10 * LARGE_RESULT_BYTES
    (member,) = [name for name in await queue.ids("expiry") if name.endswith(f" result:{job_id}")]
    await queue.age("expiry", member, 60_000)
    due_ms = await queue.redis.zscore(f"{P}:expiry", member)
    assert await queue.producer.result(job_id, "acme") is not None
    assert await queue.redis.zscore(f"{P}:expiry", member) == due_ms, "a later fetch does not lengthen its life"

    await queue.redis.delete(keys.result(job_id), keys.log(job_id))  # as if by their ends of life
    await queue.change(job_id, result_until=1)
    await pass_time(queue, LOG_TTL_MS)
    assert await kept(queue) == {"acme": RECORD_BYTES}
    with pytest.raises(NotFoundError) as caught:
        await queue.producer.result(job_id, "acme")
    assert caught.value.code == "result_expired"
    assert await audit(AdminBroker(queue.redis), POOL) == []


@pytest.mark.parametrize(("background", "size", "life_ms"), [
    (False, 2 * LARGE_RESULT_BYTES, LOG_TTL_MS),
    (True, 2 * LARGE_RESULT_BYTES, RESULT_TTL_MS),
    (False, LARGE_RESULT_BYTES // 2, RESULT_TTL_MS),
])  # fmt: skip
async def test_a_large_result_that_was_pushed_to_a_waiting_caller_goes_with_the_log(
    queue: Queue, background: bool, size: int, life_ms: int
) -> None:
    await queue.note_sweep()
    job_id = await ended(queue, size, background=background)
    assert life_ms - 5000 < await queue.redis.pttl(keys.result(job_id)) <= life_ms


async def test_small_results_are_kept_after_delivery_and_other_tenants_cannot_fetch_them(queue: Queue) -> None:
    job_id = await ended(queue, 100)
    assert await queue.producer.result(job_id, "acme") is not None
    assert await queue.redis.pttl(keys.result(job_id)) > RESULT_TTL_MS - 5000
    with pytest.raises(NotFoundError):
        await queue.producer.result(job_id, "rival")


async def test_delivery_by_another_tenant_changes_no_expiry(queue: Queue) -> None:
    job_id = await ended(queue, 2 * LARGE_RESULT_BYTES, background=True)
    assert await scripts.call(queue.redis, "shorten_result", POOL, job_id, "rival") == b"NOT_FOUND"
    assert await queue.redis.pttl(keys.result(job_id)) > RESULT_TTL_MS - 5000


async def dead_letter(queue: Queue) -> str:
    """A job with a request of 5,000 bytes that three nodes died of, after its log's life."""
    for number in range(3):
        node = await queue.node(f"n{number}")
        taken = await (queue.running(node, prompt="x" * 5000) if number == 0 else node.take_one())
        await queue.kill(node)
    await pass_time(queue, LOG_TTL_MS)
    return taken.job_id


async def test_a_dead_letters_request_counts_until_it_is_purged(queue: Queue) -> None:
    job_id = await dead_letter(queue)
    assert (await kept(queue))["default"] > WIDE_RECORD_BYTES + 5000 + KEY_BYTES
    assert await DeadLetters(queue.redis).purge([job_id, job_id]) == 1
    assert await kept(queue) == {"default": WIDE_RECORD_BYTES}
    assert await queue.ids("dead_letters") == set()


async def test_a_dead_letter_whose_request_has_expired_is_purged_without_its_bytes(queue: Queue) -> None:
    job_id = await dead_letter(queue)
    members = [member.decode() for member in cast("list[bytes]", await queue.redis.zrange(f"{P}:expiry", 0, -1))]
    (member,) = [one for one in members if " request:" in one]
    await queue.redis.zadd(f"{P}:expiry", {member: 1})
    await pass_time(queue, 0)
    assert await kept(queue) == {"default": WIDE_RECORD_BYTES}
    assert await DeadLetters(queue.redis).purge([job_id]) == 1
    assert await kept(queue) == {"default": WIDE_RECORD_BYTES}


async def attack(queue: Queue, node: FakeNode, terms: Terms = UNLIMITED) -> tuple[int, BusyError]:
    """Submit jobs with unread results of 3 MB until the attacker is refused."""
    result = b"x" * (3 << 20)
    for num_stored in range(100):
        try:
            await queue.producer.submit(Submission(new_job(tenant="attacker"), 10, terms=terms))
        except BusyError as error:
            return num_stored, error
        await end(node, await node.take_one(), result)
    raise AssertionError("never refused")


@pytest.mark.usefixtures("small")
async def test_only_a_tenant_that_keeps_too_many_bytes_is_refused(queue: Queue) -> None:
    node = await queue.node()
    num_stored, error = await attack(queue, node)
    assert num_stored == 10, "almost half of 64 MB, and the one that it was not known of"
    assert error.code == "memory_share_exceeded"
    assert re.search("may now take (3[5-9]|4[0-9]) %", error.message)
    assert error.retry_after_ms > 60_000, "nothing of it goes for a day but logs"
    assert (await queue.redis.info("memory"))["used_memory"] < 40 << 20
    for _ in range(100):
        await queue.submit(tenant="neighbour")
    for taken in (await node.take()).jobs:
        await end(node, taken, b"small")
    # Once it has expired there is memory again, without a sweep. A fifth is far below what the attacker stores.
    fifth = Terms(memory_percent=20)
    with pytest.raises(BusyError):
        await queue.producer.submit(Submission(new_job(tenant="attacker"), 10, terms=fifth))
    for member in await queue.ids("expiry"):
        await queue.age("expiry", member, RESULT_TTL_MS)
    await queue.producer.submit(Submission(new_job(tenant="attacker"), 10, terms=fifth))


@pytest.mark.usefixtures("small")
async def test_memory_limit_of_a_tenant_comes_from_its_key_or_its_pool(queue: Queue) -> None:
    node = await queue.node(tenant_memory_percent=20)
    num_stored, error = await attack(queue, node, Terms(memory_percent=10))
    assert num_stored == 2 and re.search("may now take [89] %", error.message)
    num_more, error = await attack(queue, node)
    assert num_more == 2 and re.search("may now take 1[5-9] %", error.message)


async def test_audit_finds_and_repairs_wrong_counts(queue: Queue) -> None:
    await ended(queue, 100)
    gone = await ended(queue, 100)
    right = await kept(queue)
    broker = AdminBroker(queue.redis)
    assert {f.key for f in await audit(broker, POOL)} & {"expiry", "stored"} == set()
    (member,) = [m for m in await queue.ids("expiry") if f" job:{gone} " in m]
    await queue.redis.zrem(keys.expiry(POOL), member)
    await queue.redis.zadd(keys.expiry(POOL), {f"77 acme out:{gone}": await queue.now_ms() + RESULT_TTL_MS})
    found = await audit(broker, POOL, repair=True)
    assert {f.name for f in found if f.key == "expiry"} == {"missing", "stray"}
    await audit(broker, POOL, repair=True)
    assert await kept(queue) == right
    await queue.redis.hincrby(keys.stored(POOL), "acme", 5)
    assert ("wrong_sum", "stored") in {(f.name, f.key) for f in await audit(broker, POOL, repair=True)}
    assert await kept(queue) == right


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("background", [False, True])
async def test_however_many_tenants_take_all_they_get_another_one_is_served(queue: Queue, background: bool) -> None:
    """Each tenant stores requests until it is refused. Every later one gets less, and none gets nothing."""
    await queue.node()
    stored: list[int] = []
    for tenant in range(5):
        num_stored = 0
        with pytest.raises(BusyError) as caught:
            for _ in range(10_000):
                job = new_job(tenant=f"greedy-{tenant}", prompt="x" * 10_000, background=background)
                await queue.producer.submit(Submission(job, 10))
                num_stored += 1
        assert caught.value.code == "memory_share_exceeded", "Redis is not full"
        stored.append(num_stored)
    assert stored == sorted(stored, reverse=True) and stored[-1] > 0
    await queue.producer.submit(Submission(new_job(tenant="victim", background=background), 10))


DELAYED_MS, NUM_DELAYED = 3_600_000, 1102


@pytest.mark.usefixtures("small")
async def test_delayed_jobs_of_one_tenant_refuse_nobody_else(queue: Queue) -> None:
    """1,102 delayed jobs of 25 kB in 64 MB took 46 % of memory and were counted twice."""
    await queue.node()
    for _ in range(NUM_DELAYED):
        job = new_job(tenant="attacker", prompt="x" * 25_000, not_before_ms=DELAYED_MS, background=True)
        await queue.producer.submit(Submission(job, 10))
    for _ in range(20):
        await queue.submit(tenant="victim")
    with pytest.raises(BusyError) as caught:
        for _ in range(NUM_DELAYED):
            job = new_job(tenant="attacker", prompt="x" * 25_000, not_before_ms=DELAYED_MS, background=True)
            await queue.producer.submit(Submission(job, 10))
    assert caught.value.code == "memory_share_exceeded"
    await queue.submit(tenant="victim")


@pytest.mark.usefixtures("small")
async def test_a_job_is_not_taken_while_its_output_has_no_memory(queue: Queue) -> None:
    node, long = await queue.node(), SamplingParams(max_tokens=120_000)
    for _ in range(3):
        await queue.producer.submit(Submission(new_job(tenant="acme", params=long), 10))
    other = await queue.submit(tenant="other")
    taken = await node.take()
    assert [job.tenant for job in taken.jobs] == ["acme", "acme", "other"], "two of 13 MB fit into a share of 32 MB"
    assert taken.jobs[-1].job_id == other
    await end(node, taken.jobs[0], b"small")
    assert [job.tenant for job in (await node.take()).jobs] == ["acme"]


async def test_a_returned_job_that_is_cancelled_releases_its_output_once(queue: Queue) -> None:
    node = await queue.node()
    for _ in range(2):
        await queue.submit(tenant="acme")
    returned, running = (await node.take()).jobs
    both = (await reserved(queue))["acme"]
    await node.give_back(returned)
    await queue.producer.cancel(returned.job_id, "acme")
    assert (await reserved(queue))["acme"] == both / 2
    await end(node, running, b"small")
    assert await reserved(queue) == {}
