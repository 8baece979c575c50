"""The record of a stored response lives and counts with its job, and is deleted with its log and result."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fakes.queue.harness import POOL, FakeNode, Queue, chunks_of, new_job
from redis.asyncio import Redis

from penstock.contract.errors import BusyError, ConflictError, NotFoundError
from penstock.contract.job import NO_RESPONSE, JobDef, ResponseRecord
from penstock.contract.output import Choice, Outcome, Usage
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.jobs import ResponseBroker
from penstock.queue.broker.node import Emission
from penstock.queue.broker.producer import LARGE_RESULT_BYTES, Submission
from penstock.queue.results import encode_result

RECORD = ResponseRecord(b"r" * 5000, keep_ms=600_000)
JOB_BYTES, KEY_BYTES = 1120, 256
LOG_TTL_MS, RESULT_TTL_MS = 120_000, 86_400_000


async def kept(queue: Queue) -> int:
    return int(await cast(Any, queue.redis.hget(keys.stored(POOL), "acme")) or 0)


async def life_ms(redis: Redis, key: str) -> int:
    return int(await redis.pttl(key))


async def submit(queue: Queue, record: ResponseRecord = RECORD, **fields: Any) -> JobDef:
    job = new_job(tenant="acme", **fields)
    await queue.producer.submit(Submission(job, 10, response=record), inbox="me")
    return job


async def end(node: FakeNode, *, state: Any = "succeeded", num_bytes: int = 100, has_result: bool = True) -> None:
    taken = await node.take_one()
    last = Emission(taken.job_id, taken.lease, 0, chunks_of(taken.job_id, 0, 2))
    choices = (Choice(0, "x" * num_bytes, (), "stop"),)
    result = encode_result(choices, Usage(3, 2), [(0, 0, num_bytes)]) if has_result else b""
    assert await node.broker.finish(last, Outcome(state), result, usage=Usage(3, 2)) == "OK"


async def findings(queue: Queue) -> list[Any]:
    """Return an audit's findings, except those about results that these tests invent."""
    return [found for found in await audit(AdminBroker(queue.redis), POOL) if found.name != "result_differs"]


async def test_a_record_is_stored_with_its_job_and_counts_for_its_tenant(queue: Queue) -> None:
    await queue.node()
    await submit(queue, NO_RESPONSE)
    alone = await kept(queue)
    job = await submit(queue)
    assert await kept(queue) == 2 * alone + len(RECORD.data) + KEY_BYTES
    assert await ResponseBroker(queue.redis).read(job.id, "acme") == RECORD.data
    assert await life_ms(queue.redis, keys.response(job.id)) == -1
    assert await findings(queue) == []


async def test_a_repeated_submit_stores_nothing_twice(queue: Queue) -> None:
    await queue.node()
    job = await submit(queue)
    before = await kept(queue)
    await queue.producer.submit(Submission(job, 10, response=ResponseRecord(b"other", 1)), inbox="me")
    assert await ResponseBroker(queue.redis).read(job.id, "acme") == RECORD.data
    assert await kept(queue) == before


async def test_a_refused_job_leaves_no_record(queue: Queue) -> None:
    await queue.node()
    job = await submit(queue)
    with pytest.raises(ConflictError, match="belongs to another request"):
        await queue.producer.submit(Submission(job.model_copy(update={"prompt": "another"}), 10, response=RECORD))
    other = new_job(tenant="acme")
    await queue.redis.hset(keys.config(POOL), "max_open_jobs", "1")
    with pytest.raises(BusyError, match="limit"):
        await queue.producer.submit(Submission(other, 10, response=RECORD), inbox="me")
    assert await queue.redis.exists(keys.response(other.id)) == 0


@pytest.mark.parametrize("num_bytes", [100, LARGE_RESULT_BYTES + 1])
async def test_record_and_result_live_as_long_as_the_response_is_kept(queue: Queue, num_bytes: int) -> None:
    node = await queue.node()
    job = await submit(queue, background=False)
    await end(node, num_bytes=num_bytes)
    assert await queue.producer.result(job.id, "acme")  # A delivered result is kept too.
    for key in (keys.response(job.id), keys.result(job.id), keys.job(job.id)):
        assert RECORD.keep_ms - 10_000 < await life_ms(queue.redis, key) <= RECORD.keep_ms
    assert 0 < await life_ms(queue.redis, keys.log(job.id)) <= LOG_TTL_MS
    assert await findings(queue) == []


async def test_without_a_result_the_log_is_kept_in_its_place(queue: Queue) -> None:
    node = await queue.node()
    job = await submit(queue)
    await end(node, state="cancelled", has_result=False)
    assert RECORD.keep_ms - 10_000 < await life_ms(queue.redis, keys.log(job.id)) <= RECORD.keep_ms
    assert await findings(queue) == []


async def test_an_ended_response_counts_until_it_expires(queue: Queue) -> None:
    node = await queue.node()
    job = await submit(queue)
    await end(node)
    log = sum(map(len, await queue.log(job.id)))
    result = int(await queue.redis.strlen(keys.result(job.id)))
    assert await kept(queue) == JOB_BYTES + result + log + len(RECORD.data) + 2 * KEY_BYTES
    for member in await queue.ids("expiry"):
        await queue.age("expiry", member, RECORD.keep_ms)
    await queue.sweep()
    assert await kept(queue) == 0


async def test_an_ended_response_is_deleted_with_log_and_result(queue: Queue) -> None:
    node, responses = await queue.node(), ResponseBroker(queue.redis)
    job = await submit(queue)
    await end(node, num_bytes=LARGE_RESULT_BYTES + 1)
    assert (await queue.producer.status(job.id, "acme")).first_words
    await responses.delete(job.id, "acme")
    assert await queue.redis.exists(keys.response(job.id), keys.result(job.id), keys.log(job.id)) == 0
    assert not (await queue.producer.status(job.id, "acme")).first_words
    assert await kept(queue) == JOB_BYTES
    assert await findings(queue) == []
    with pytest.raises(NotFoundError):
        await responses.delete(job.id, "acme")
    # A caller that waits for a replica calls again after a lost answer.
    assert await scripts.call(queue.redis, "delete_response", POOL, job.id, "acme", 1) == [b"OK", []]


@pytest.mark.parametrize("is_running", [False, True])
async def test_deleting_an_open_response_cancels_its_job(queue: Queue, is_running: bool) -> None:
    node, responses = await queue.node(), ResponseBroker(queue.redis)
    job = await submit(queue)
    taken = await node.take_one() if is_running else None
    await responses.delete(job.id, "acme")
    if taken is not None:
        assert await node.emit(taken, 0, 2) == "CANCEL"
        last = Emission(taken.job_id, taken.lease, 0, ())
        assert await node.broker.finish(last, Outcome("cancelled"), b"", usage=Usage(3, 2)) == "OK"
    assert (await queue.producer.status(job.id, "acme")).state == "cancelled"
    assert RESULT_TTL_MS - 60_000 < await life_ms(queue.redis, keys.job(job.id)) <= RESULT_TTL_MS
    assert not [name for name in await queue.ids("expiry") if f"response:{job.id}" in name]
    await asyncio.sleep(0)
    assert await findings(queue) == []
    with pytest.raises(NotFoundError):
        await responses.read(job.id, "acme")


async def test_other_tenants_have_no_such_response(queue: Queue) -> None:
    await queue.node()
    responses, job = ResponseBroker(queue.redis), await submit(queue)
    with pytest.raises(NotFoundError):
        await responses.read(job.id, "rival")
    with pytest.raises(NotFoundError):
        await responses.delete(job.id, "rival")
    assert await responses.read(job.id, "acme") == RECORD.data
