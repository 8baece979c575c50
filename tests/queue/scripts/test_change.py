"""Changes of accepted jobs: rescheduled, reclassed and canceled ones leave no trace of their former place."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.queue.harness import POOL, Queue, ids_of, new_job
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, NotFoundError, RequestError
from penstock.contract.job import Priority
from penstock.contract.job_actions import JobChange
from penstock.contract.tenant import Terms
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.producer import Submission
from penstock.queue.broker.steering import Steering
from penstock.queue.job_cost import RateTokens

HOUR_MS = 3_600_000
LATER = JobChange("reschedule", not_before_s=3600)
NOW = JobChange("reschedule", not_before_s=0)


async def level_of(queue: Queue, job_id: str) -> tuple[str, bool]:
    status = await queue.producer.status(job_id, "default")
    return status.priority.label, status.is_background


async def test_queued_job_is_scheduled_and_queued_again(queue: Queue, redis: Redis) -> None:
    node, steering = await queue.node(), Steering(redis)
    job_id = await queue.submit(tags=("a",))
    await steering.change(job_id, "default", LATER)
    status = await queue.producer.status(job_id, "default")
    assert (status.state, round((status.submitted_ms - await queue.now_ms()) / 1e5)) == ("scheduled", 36)
    assert ids_of(await node.take()) == []
    assert await audit(AdminBroker(redis), POOL) == []
    await steering.change(job_id, "default", JobChange("reschedule", not_before_s=7200))
    assert await audit(AdminBroker(redis), POOL) == []
    await steering.change(job_id, "default", NOW)
    assert ids_of(await node.take()) == [job_id]
    assert await audit(AdminBroker(redis), POOL) == []


async def test_scheduled_job_is_queued_now_at_the_next_take(queue: Queue, redis: Redis) -> None:
    node = await queue.node()
    job_id = await queue.submit(not_before_ms=HOUR_MS)
    await Steering(redis).change(job_id, "default", NOW)
    assert ids_of(await node.take()) == [job_id]
    again = await queue.submit()
    await Steering(redis).change(again, "default", NOW)
    assert (await queue.producer.status(again, "default")).state == "queued"


async def test_job_that_was_queued_again_can_be_scheduled(queue: Queue, redis: Redis) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.emit(taken, 0, 2)
    await node.give_back(taken)
    await Steering(redis).change(taken.job_id, "default", LATER)
    assert await audit(AdminBroker(redis), POOL) == []
    await Steering(redis).change(taken.job_id, "default", NOW)
    other = await queue.node("n2")
    assert (await other.take_one()).num_chunks == 2


@pytest.mark.parametrize("not_before_ms", [None, HOUR_MS])
async def test_class_and_kind_of_work_are_changed(queue: Queue, redis: Redis, not_before_ms: int | None) -> None:
    node, steering = await queue.node(), Steering(redis)
    job_id = await queue.submit(priority=Priority.STANDARD, not_before_ms=not_before_ms)
    for change, expected in (
        (JobChange("change_class", priority=Priority.BATCH), ("batch", False)),
        (JobChange("change_class", background=True), ("batch", True)),
        (JobChange("change_class", background=True), ("batch", True)),
        (JobChange("change_class", priority=Priority.INTERACTIVE, background=False), ("interactive", False)),
    ):
        await steering.change(job_id, "default", change)
        assert await level_of(queue, job_id) == expected
        assert await audit(AdminBroker(redis), POOL) == []
    if not_before_ms:
        await steering.change(job_id, "default", NOW)
    behind = await queue.submit(priority=Priority.STANDARD)
    assert ids_of(await node.take()) == [job_id, behind]


async def test_job_that_waits_for_tokens_keeps_waiting_in_its_new_class(queue: Queue, redis: Redis) -> None:
    await queue.node()
    terms = Terms(tokens_per_minute=1000, burst_s=1)
    jobs = [new_job(background=True) for _ in range(3)]
    for job in jobs:
        await queue.producer.submit(Submission(job, 900, terms=terms, rate_tokens=RateTokens(1, 1, 1, 900)))
    waiting = await queue.ids("awaiting:default")
    assert waiting
    job_id = waiting.pop()
    await Steering(redis).change(job_id, "default", JobChange("change_class", priority=Priority.BATCH))
    assert await level_of(queue, job_id) == ("batch", True)
    assert await audit(AdminBroker(redis), POOL) == []
    assert (await queue.producer.status(job_id, "default")).state == "queued"
    (queued, *_) = {job.id for job in jobs} - await queue.ids("awaiting:default")
    await Steering(redis).change(queued, "default", LATER)
    assert queued not in await queue.ids("may_use:default")
    assert await audit(AdminBroker(redis), POOL) == []


async def test_running_ended_and_foreign_jobs_are_refused(queue: Queue, redis: Redis) -> None:
    node, steering = await queue.node(), Steering(redis)
    taken = await queue.running(node)
    with pytest.raises(ConflictError) as running:
        await steering.change(taken.job_id, "default", LATER)
    await node.finish(taken, 0)
    with pytest.raises(ConflictError) as ended:
        await steering.change(taken.job_id, "default", LATER)
    assert (running.value.code, ended.value.code) == ("job_running", "job_ended")
    for job_id, tenant in ((await queue.submit(), "rival"), (new_job().id, "default")):
        with pytest.raises(NotFoundError):
            await steering.change(job_id, tenant, LATER)
    with pytest.raises(RequestError) as late:
        await steering.change(await queue.submit(deadline_ms=HOUR_MS), "default", LATER)
    assert late.value.param == "not_before_s"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"action": "explode"}, "action"),
        ({"action": "cancel", "not_before_s": 1}, "not_before_s"),
        ({"action": "reschedule"}, "not_before_s"),
        ({"action": "reschedule", "not_before_s": -1}, "not_before_s"),
        ({"action": "reschedule", "not_before_s": 10**9}, "not_before_s"),
        ({"not_before_s": 1, "priority": "batch"}, "priority"),
        ({"priority": "urgent"}, "priority"),
        ({}, "priority"),
    ],
)
def test_wrong_changes_name_their_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        JobChange.of(given)
    assert caught.value.param == param
