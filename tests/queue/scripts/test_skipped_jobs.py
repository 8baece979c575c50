"""take beside jobs that are not for the node: they hide no other jobs, and one call reads a bounded number of them."""

from __future__ import annotations

import pytest
from fakes.queue.harness import FakeNode, P, Queue, chunks_of, ids_of

from penstock.contract.tasks import Tokenize
from penstock.queue.broker.node import Emission, GivenBackJob, TakeAnswer

POLICIES = ("fcfs", "priority", "sjf", "fair")
MAX_EXAMINED = 160
MAX_SKIPPED = 512


async def drain(queue: Queue, node: FakeNode, count: int) -> list[str]:
    """Give back jobs with tokens, as a node of an older revision does when it is upgraded."""
    for _ in range(count):
        await queue.submit(cost=1, tenant="old")
    taken = [job for _ in range(3) for job in (await node.take()).jobs]
    assert len(taken) == count
    await node.broker.emit([Emission(job.job_id, job.lease, 0, chunks_of(job.job_id, 0, 1)) for job in taken])
    for at in (0, count // 2):
        part = taken[at : at + count // 2]
        await node.broker.give_back([GivenBackJob(job.job_id, job.lease, job.cost, 0) for job in part], "drain")
    return [job.job_id for job in taken]


async def hide_behind(queue: Queue, tenant: str, count: int) -> None:
    """Put entries whose jobs are gone before the jobs of a tenant: a node can take none of them."""
    entries = {f"m.{number}": number for number in range(count)}
    await queue.redis.zadd(f"{P}:waiting:1", entries)
    await queue.redis.zadd(f"{P}:requeued:1:{tenant}", entries)


@pytest.mark.parametrize("policy", ["sjf", "fair"])
async def test_jobs_of_an_older_revision_do_not_hide_the_others(queue: Queue, policy: str) -> None:
    old, new = await queue.node("old", "r1", policy=policy), await queue.node("new", "r2", policy=policy)
    foreign = await drain(queue, old, MAX_EXAMINED + 10)
    jobs = {await queue.submit(tenant=tenant) for tenant in ("old", "other")}

    assert {*ids_of(await new.take())} == jobs
    assert await queue.ids("requeued:1:old") == {*foreign}


@pytest.mark.parametrize("policy", ["priority", "fair"])
async def test_tasks_that_have_no_slot_do_not_hide_other_jobs(queue: Queue, policy: str) -> None:
    node = await queue.node(policy=policy)
    for _ in range(MAX_EXAMINED + 10):
        await queue.submit(task=Tokenize(), cost=1, tenant="flood")
    jobs = {await queue.submit(tenant=tenant) for tenant in ("flood", "other")}

    assert {*ids_of(await node.take(tasks=0))} == jobs


@pytest.mark.parametrize("policy", POLICIES)
async def test_one_take_skips_a_bounded_number_of_jobs(queue: Queue, policy: str) -> None:
    node = await queue.node(policy=policy)
    job = await queue.submit()
    await hide_behind(queue, "default", MAX_SKIPPED)
    assert ids_of(await node.take()) == []
    await queue.redis.zrem(f"{P}:waiting:1", "m.0")
    await queue.redis.zrem(f"{P}:requeued:1:default", "m.0")
    assert ids_of(await node.take()) == [job]


async def test_each_tenant_has_its_share_of_the_skipped_jobs(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    first, second = [await queue.submit(tenant=tenant) for tenant in ("first", "second")]
    await hide_behind(queue, "first", MAX_SKIPPED // 2)
    assert ids_of(await node.take()) == [second]
    assert ids_of(await node.take()) == [first], "alone, it has the whole"


async def test_one_take_ends_a_bounded_number_of_jobs(queue: Queue) -> None:
    node = await queue.node()
    jobs = [await queue.submit(deadline_ms=60_000) for _ in range(MAX_EXAMINED + 5)]
    for job in jobs:
        await queue.change(job, deadline=1)
    assert await node.take() == TakeAnswer((), (0, 5, 0, 0, 0, 0), 0, num_nodes=1)
    assert (await node.take()).depth[:3] == (0, 0, 0)
