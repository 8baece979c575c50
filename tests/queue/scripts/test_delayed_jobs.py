"""Jobs with a start time, and tenants with larger weights."""

from __future__ import annotations

import pytest
from fakes.queue.harness import P, Queue, ids_of, new_job

from penstock.contract.job import Priority, SamplingParams


async def is_due(queue: Queue, job_id: str, ago_ms: int = 0) -> int:
    """Let a job's start time pass. Return that time."""
    due_ms = await queue.now_ms() - ago_ms
    await queue.delay(job_id, due_ms)
    return due_ms


async def test_a_job_is_not_taken_before_its_time(queue: Queue) -> None:
    node = await queue.node()
    later = await queue.submit(not_before_ms=60_000, cost=70)

    answer = await node.take()
    assert (ids_of(answer), answer.depth[:3]) == ([], (0, 0, 0))
    assert 59_000 < answer.again_in_ms <= 60_000
    assert (await queue.producer.pressure("m")).backlog_cost[:3] == (0, 0, 0)
    assert await queue.state(later) == "queued"

    await is_due(queue, later)
    assert ids_of(await node.take()) == [later]
    assert await queue.keys("delayed*") == await queue.keys("requeued:*") == set()


async def test_a_node_is_told_when_the_next_job_is_due(queue: Queue) -> None:
    node = await queue.node()
    for not_before_ms in (9000, 400, 5000):
        await queue.submit(not_before_ms=not_before_ms)
    assert 0 < (await node.take()).again_in_ms <= 400


async def test_a_job_does_not_age_before_its_time(queue: Queue) -> None:
    """It queues behind jobs that came while it waited, and its class does not age for it."""
    node = await queue.node(policy="priority", aging_ms=1000)
    later = await queue.submit(not_before_ms=60_000, priority=Priority.BATCH)
    await queue.change(later, taken="")
    earlier = await queue.submit()
    await is_due(queue, later)
    assert ids_of(await node.take()) == [earlier, later]
    status = await queue.producer.status(later, "default")
    assert status.taken_ms - status.submitted_ms < 50_000


async def test_sweep_queues_delayed_jobs_that_are_due(queue: Queue) -> None:
    node = await queue.node()
    await node.heartbeat(free=100)
    bell = await queue.listen(f"{P}:doorbell:n1")
    later = [await queue.submit(not_before_ms=60_000, cost=30, tenant="ab"[i % 2]) for i in range(4)]
    assert await bell.messages() == []
    for job_id in later[:3]:
        await is_due(queue, job_id)
    await queue.sweep()
    assert await queue.keys("delayed:*") == {"delayed:1:b"}
    assert await queue.ids("delayed:1:b") == {later[3]}
    assert await queue.ids("waiting:1") == set(later[:3])
    assert (await queue.producer.pressure("m")).backlog_cost[:3] == (0, 90, 0)
    assert len(await bell.messages()) == 3


async def test_a_deadline_may_pass_while_a_job_waits_for_its_time(queue: Queue) -> None:
    await queue.node()
    later = await queue.submit(not_before_ms=60_000, deadline_ms=70_000)
    assert await queue.ids("deadlines") == {later}
    await queue.redis.zadd(f"{P}:deadlines", {later: 1})
    await queue.change(later, deadline=1)
    await is_due(queue, later)
    assert await queue.sweep() == ["OK", 0, 0, 1]
    assert await queue.state(later) == "expired"
    assert await queue.keys("delayed*") == await queue.keys("waiting:*") == await queue.keys("deadlines") == set()


async def test_delayed_job_can_be_canceled_and_submitted_again(queue: Queue) -> None:
    await queue.node()
    job = new_job(not_before_ms=60_000)
    for _ in range(2):
        assert await queue.submit(job) == job.id
    assert await queue.ids("delayed:1:default") == {job.id}
    assert await queue.producer.cancel(job.id, "default") == "cancelled"
    assert await queue.keys("delayed*") == await queue.ids("open") == set()
    assert (await queue.producer.pressure("m")).backlog_cost[:3] == (0, 0, 0)


@pytest.mark.parametrize("kv_token_ms", [None, 5000.0])
async def test_a_tenant_of_twice_the_weight_gets_twice_as_much(queue: Queue, kv_token_ms: float | None) -> None:
    node = await queue.node(policy="fair")
    for _ in range(60):
        await queue.submit(tenant="one", cost=10, params=SamplingParams())
        await queue.submit(tenant="two", cost=10, weight=2.0)
    tenants = []
    for _ in range(30):
        (taken,) = (await node.take(slots=1)).jobs
        tenants.append(taken.tenant)
        await node.finish(taken, 0, kv_token_ms=kv_token_ms)
    assert tenants.count("two") == 2 * tenants.count("one") == 20
