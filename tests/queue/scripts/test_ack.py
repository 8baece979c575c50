"""Acknowledged results: Redis frees them at once, and keeps what a repeated submission needs."""

from __future__ import annotations

import pytest
from fakes.queue.harness import POOL, FakeNode, P, Queue, chunks_of, new_job

from penstock.contract.errors import NotFoundError
from penstock.contract.job import ResponseRecord
from penstock.contract.output import Outcome
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.node import Emission
from penstock.queue.broker.producer import Submission
from penstock.queue.broker.submitting import MAX_SHARED_ITEMS

LARGE = b"x" * 100_000


async def ended(queue: Queue, node: FakeNode, result: bytes = b"result", **fields: object) -> str:
    taken = await queue.running(node, **fields)
    last = Emission(taken.job_id, taken.lease, 0, chunks_of(taken.job_id, 0, 3))
    assert await node.broker.finish(last, Outcome("succeeded"), result) == "OK"
    return taken.job_id


async def stored(queue: Queue) -> int:
    return int(await queue.redis.hget(f"{P}:stored", "default") or 0)


@pytest.mark.parametrize("result", [b"result", LARGE], ids=["small", "large"])
async def test_an_acknowledged_result_is_freed_and_its_job_stays_known(queue: Queue, result: bytes) -> None:
    node = await queue.node()
    job = new_job(idempotency_key="k")
    await queue.submit(job)
    taken = await node.take_one()
    last = Emission(taken.job_id, taken.lease, 0, chunks_of(taken.job_id, 0, 3))
    await node.broker.finish(last, Outcome("succeeded"), result)
    assert await stored(queue) > 1120 + len(result)
    assert (await queue.producer.status(job.id, "default")).first_words == "hello"

    assert await queue.producer.ack([job.id], "default") == 1
    assert await stored(queue) == 1120
    assert await queue.keys(f"*{job.id}") == {f"job:{job.id}"}
    status = await queue.producer.status(job.id, "default")
    assert (status.state, status.first_words) == ("succeeded", "")
    assert (await queue.producer.submit(Submission(job, 1))).existed
    with pytest.raises(NotFoundError, match="no longer kept"):
        await queue.producer.result(job.id, "default")
    assert await queue.producer.ack([job.id], "default") == 0
    assert await audit(AdminBroker(queue.redis), POOL) == []


async def test_only_ended_jobs_of_the_tenant_without_a_stored_response_are_freed(queue: Queue) -> None:
    node = await queue.node()
    open_job = await queue.submit(tenant="default")
    await node.take_one()
    other = await ended(queue, node, tenant="other")
    job = new_job()
    await queue.producer.submit(Submission(job, 1, response=ResponseRecord(b"record", 60_000)))
    taken = await node.take_one()
    await node.finish(taken, 0, 1)
    before = await queue.keys()
    unknown = new_job().id
    assert await queue.producer.ack([open_job, other, job.id, unknown], "default") == 0
    assert await queue.keys() == before


async def test_many_results_of_several_calls_are_freed(queue: Queue) -> None:
    node = await queue.node()
    ids = [await ended(queue, node) for _ in range(MAX_SHARED_ITEMS + 5)]
    assert await queue.producer.ack(ids, "default") == len(ids)
    assert await stored(queue) == 1120 * len(ids)
    assert await queue.keys("result:*") == await queue.keys("log:*") == set()
