"""Each job that ends has one line: of its node, or of the process whose call ended it. A bulk action has one in all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes.queue.harness import LEASE_MS, POOL, Queue, new_job
from redis.asyncio import Redis

from penstock.contract.job import ResponseRecord
from penstock.contract.job_actions import JobChange, JobFilter
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.jobs import ResponseBroker
from penstock.queue.broker.producer import Submission
from penstock.queue.broker.steering import BulkRequest, Steering

CANCEL = JobChange("cancel")


async def by_cancel(queue: Queue) -> tuple[str, str, str]:
    job_id = await queue.submit()
    for _ in range(2):
        assert await queue.producer.cancel(job_id, "default") == "cancelled"
    return job_id, "cancelled", "cancelled"


async def by_change(queue: Queue) -> tuple[str, str, str]:
    job_id = await queue.submit()
    await Steering(queue.redis).change(job_id, "default", CANCEL)
    return job_id, "cancelled", "cancelled"


async def by_deleted_response(queue: Queue) -> tuple[str, str, str]:
    job = new_job()
    await queue.producer.submit(Submission(job, 10, response=ResponseRecord(b"r", keep_ms=600_000)))
    await ResponseBroker(queue.redis).delete(job.id, "default")
    return job.id, "cancelled", "cancelled"


async def by_heartbeat(queue: Queue) -> tuple[str, str, str]:
    """The node never got the job, and its caller has cancelled it."""
    node = await queue.node()
    taken = await queue.running(node)
    assert await queue.producer.cancel(taken.job_id, "default") == "cancelling"
    await node.heartbeat(held=[])
    return taken.job_id, "cancelled", "cancelled"


async def by_give_back(queue: Queue) -> tuple[str, str, str]:
    node = await queue.node()
    taken = await queue.running(node, deadline_ms=60_000)
    await queue.change(taken.job_id, deadline=await queue.now_ms() - 1)
    assert await node.give_back(taken) == "OK"
    return taken.job_id, "expired", "deadline_exceeded"


async def by_third_lost_rank(queue: Queue) -> tuple[str, str, str]:
    node = await queue.node(max_losses=1)
    taken = await queue.running(node)
    assert await node.give_back(taken, why="lost") == "OK"
    return taken.job_id, "dead", "node_lost"


async def by_audit(queue: Queue) -> tuple[str, str, str]:
    await queue.node()
    job_id = await queue.submit()
    await queue.redis.delete(keys.request(job_id))
    await audit(AdminBroker(queue.redis), POOL, repair=True)
    return job_id, "failed", "internal_error"


End = Callable[[Queue], Awaitable[tuple[str, str, str]]]


def lines_in(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.message == message]


@pytest.mark.parametrize(
    "end", [by_cancel, by_change, by_deleted_response, by_heartbeat, by_give_back, by_third_lost_rank, by_audit]
)
async def test_a_job_that_no_node_ended_has_one_line(queue: Queue, caplog: pytest.LogCaptureFixture, end: End) -> None:
    caplog.set_level("INFO")
    if end in (by_cancel, by_change, by_deleted_response):
        await queue.node()
    job_id, state, code = await end(queue)
    (line,) = lines_in(caplog, "job.ended")
    assert (line["job_id"], line["tenant"], line["finish_reason"], line["code"]) == (job_id, "default", state, code)


async def bulk(steering: Steering, ids: list[str], *, is_dry_run: bool, gives_up: bool = False) -> None:
    request = BulkRequest(CANCEL, JobFilter(tenant="default", pool=POOL, tag="a"), Terms())
    await steering.create(POOL, "bulk_1", "default", request, is_dry_run=is_dry_run)
    held = await steering.claim(POOL, "bulk_1", "me")
    assert held is not None
    assert await steering.step(held, ids[:1], cursor="", to="a")
    if gives_up:
        await steering.end(POOL, "bulk_1")
        await steering.end(POOL, "bulk_1")
    else:
        assert await steering.step(held, ids[1:], cursor="a", to="b", is_last=True)


@pytest.mark.parametrize(("gives_up", "ended"), [(False, ("ended", 3, 0)), (True, ("cancelled", 1, 0))])
async def test_a_bulk_action_has_one_line_for_all_its_jobs(
    queue: Queue, redis: Redis, caplog: pytest.LogCaptureFixture, gives_up: bool, ended: tuple[str, int, int]
) -> None:
    await queue.node()
    ids = await queue.submit_many(3)
    caplog.set_level("INFO")
    await bulk(Steering(redis), ids, is_dry_run=False, gives_up=gives_up)
    assert lines_in(caplog, "job.ended") == []
    (line,) = lines_in(caplog, "a bulk action has ended")
    assert (line["pool"], line["bulk_id"]) == (POOL, "bulk_1")
    assert (line["state"], line["num_changed"], line["num_failed"]) == ended


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_dry_run_ends_nothing_and_has_no_line(
    queue: Queue, redis: Redis, caplog: pytest.LogCaptureFixture, gives_up: bool
) -> None:
    await queue.node()
    ids = await queue.submit_many(3)
    caplog.set_level("INFO")
    await bulk(Steering(redis), ids, is_dry_run=True, gives_up=gives_up)
    assert lines_in(caplog, "a bulk action has ended") == lines_in(caplog, "job.ended") == []
    assert {await queue.state(job_id) for job_id in ids} == {"queued"}


async def test_the_sweep_of_a_lost_node_has_a_line_for_what_it_ends(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node = await queue.node(max_losses=1)
    taken = await queue.running(node)
    await queue.age("nodes", node.name, LEASE_MS + 1)
    await queue.note_sweep(LEASE_MS // 4)
    await node.broker.sweep()
    (line,) = lines_in(caplog, "job.ended")
    assert (line["job_id"], line["finish_reason"], line["code"]) == (taken.job_id, "dead", "node_lost")
