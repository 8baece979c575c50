"""take of tasks: jobs that need no KV cache do not wait for capacity, and keep every other promise of the queue."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.queue.harness import POOL, Queue, ids_of, new_id, new_job

from penstock.contract.errors import BusyError
from penstock.contract.job import Priority
from penstock.contract.tasks import Tokenize
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.producer import Submission

FULL: dict[str, Any] = {"tokens": 0, "slots": 0, "tasks": 8}
"""What a node offers whose engine has no capacity left."""


async def submit_task(queue: Queue, **fields: Any) -> str:
    return await queue.submit(task=Tokenize(), cost=fields.pop("cost", 1), **fields)


async def is_sound(queue: Queue) -> bool:
    return await audit(AdminBroker(queue.redis), POOL) == []


async def grow_old(queue: Queue, job_id: str, name: str = "waiting:1") -> None:
    """Make a job's submission a minute earlier."""
    await queue.age(name, job_id, 60_000)
    await queue.change(job_id, submitted=await queue.now_ms() - 60_000)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
async def test_full_node_takes_tasks_from_behind_jobs_that_do_not_fit(queue: Queue, policy: str) -> None:
    node = await queue.node(policy=policy, bypass_ms=10_000)
    for _ in range(200):
        await queue.submit(cost=100)
    task = await submit_task(queue)

    answer = await node.take(**FULL)

    assert ids_of(answer) == [task]
    assert (answer.jobs[0].num_sequences, answer.jobs[0].cost) == (0, 1)
    assert await queue.ids("tasks") == set()
    assert await is_sound(queue)


async def test_task_is_taken_while_the_node_keeps_capacity_for_an_old_job(queue: Queue) -> None:
    node = await queue.node(bypass_ms=1)
    big = await queue.submit(cost=500)
    await grow_old(queue, big)
    task = await submit_task(queue)

    assert ids_of(await node.take(tokens=499, tasks=8)) == [task]
    assert await queue.keys("reservations") == {"reservations"}
    assert ids_of(await node.take(tokens=500)) == [big]


@pytest.mark.parametrize("policy", ["priority", "sjf"])
async def test_node_takes_no_more_tasks_than_it_offers(queue: Queue, policy: str) -> None:
    node = await queue.node(policy=policy)
    tasks = {await submit_task(queue) for _ in range(5)}
    job = await queue.submit(cost=1)

    first = ids_of(await node.take(tasks=3))
    assert len(tasks & {*first}) == 3
    assert job in first
    assert {*ids_of(await node.take(tasks=3))} == tasks - {*first}


async def test_tasks_take_no_capacity_from_other_jobs(queue: Queue) -> None:
    node = await queue.node()
    task, job = await submit_task(queue, cost=100), await queue.submit(cost=100)
    assert {*ids_of(await node.take(tokens=100, slots=1, tasks=8))} == {task, job}


@pytest.mark.parametrize("priority", [Priority.STANDARD, Priority.BATCH])
async def test_task_fits_behind_a_more_urgent_job(queue: Queue, priority: Priority) -> None:
    """The job takes what running jobs of lower classes hold. That leaves less than nothing for these classes."""
    node = await queue.node(bypass_ms=1)
    job = await queue.submit(cost=500, priority=Priority.INTERACTIVE)
    task = await submit_task(queue, priority=priority)
    await grow_old(queue, task, f"waiting:{int(priority)}")

    answer = await node.take(tokens=(1000, 0, 0), slots=(8, 0, 0), tasks=1)

    assert ids_of(answer) == [job, task]
    assert await queue.keys("reservations") == set()


async def test_task_of_a_dead_node_is_taken_by_the_next_one(queue: Queue) -> None:
    first, second = await queue.node("n1"), await queue.node("n2")
    task = await submit_task(queue)
    assert ids_of(await first.take(**FULL)) == [task]

    await queue.kill(first)

    assert await queue.ids("tasks") == {task}
    taken = (await second.take(**FULL)).jobs[0]
    assert (taken.job_id, taken.losses, taken.num_sequences) == (task, 1, 0)
    assert await second.finish(taken, 0) == "OK"
    assert await queue.state(task) == "succeeded"


async def test_repeated_take_gives_the_same_tasks(queue: Queue) -> None:
    node = await queue.node()
    await submit_task(queue)
    assert await node.take(**FULL) == await node.take_again(**FULL)


async def test_given_back_task_is_a_task_again(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    task = await submit_task(queue, cost=7)
    taken = (await node.take(**FULL)).jobs[0]
    assert await node.give_back(taken) == "OK"
    assert await is_sound(queue)
    again = (await other.take(**FULL)).jobs[0]
    assert (again.job_id, again.cost, again.preemptions) == (task, 7, 1)


async def test_canceled_and_expired_tasks_leave_the_queue_once(queue: Queue) -> None:
    node = await queue.node(bypass_ms=1)
    await grow_old(queue, await queue.submit(cost=500))
    canceled, expired = await submit_task(queue), await submit_task(queue, deadline_ms=60_000)
    await queue.producer.cancel(canceled, "default")
    await queue.change(expired, deadline=1)

    assert ids_of(await node.take(**FULL)) == []

    assert [await queue.state(one) for one in (canceled, expired)] == ["cancelled", "expired"]
    assert len(await queue.log(expired)) == 1
    assert await queue.ids("tasks") == set()


async def test_expired_task_that_the_walk_reaches_ends_once(queue: Queue) -> None:
    node = await queue.node()
    expired = await submit_task(queue, deadline_ms=60_000)
    await queue.change(expired, deadline=1)
    assert ids_of(await node.take(**FULL)) == []
    assert await queue.redis.hget(keys.counts(POOL), "ended_expired") == b"1"
    assert len(await queue.log(expired)) == 1
    assert await is_sound(queue)


async def test_tasks_of_all_tenants_are_taken_in_fair_order(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    flood = [await submit_task(queue, tenant="flood") for _ in range(100)]
    other = await submit_task(queue, tenant="other")

    answer = ids_of(await node.take(tasks=4))

    assert other in answer
    assert len({*answer} & {*flood}) == 3


async def test_no_task_runs_beside_an_isolated_job(queue: Queue) -> None:
    node = await queue.node(bypass_ms=1)
    suspect = await queue.submit(cost=100)
    await queue.change(suspect, losses=2)
    await grow_old(queue, suspect)
    await submit_task(queue, priority=Priority.BATCH)

    assert ids_of(await node.take(tasks=8)) == [suspect]
    assert ids_of(await node.take(tasks=8)) == []


async def test_node_with_jobs_takes_no_more_tasks_once_an_isolated_job_waits_for_it(queue: Queue) -> None:
    node = await queue.node(bypass_ms=1)
    await queue.running(node)
    suspect = await queue.submit(cost=100)
    await queue.change(suspect, losses=2)
    await grow_old(queue, suspect)
    task = await submit_task(queue, priority=Priority.BATCH)

    assert ids_of(await node.take(tasks=8)) == []
    assert await queue.ids("tasks") == {task}


async def test_task_that_an_older_node_took_is_not_taken_again(queue: Queue) -> None:
    node, older = await queue.node("n1"), await queue.node("n2")
    task = await submit_task(queue)
    assert ids_of(await older.take(**FULL)) == [task]
    await queue.redis.zadd("penstock:{m}:tasks", {task: 1, new_id(): 2})

    assert ids_of(await node.take(**FULL)) == []
    assert await queue.ids("tasks") == set()
    assert await queue.ids("running:n2") == {task}


async def test_audit_finds_and_restores_a_task_that_its_index_lost(queue: Queue) -> None:
    await queue.node()
    task = await submit_task(queue)
    await queue.redis.delete("penstock:{m}:tasks")

    assert [str(found) for found in await audit(AdminBroker(queue.redis), POOL)] != []
    await audit(AdminBroker(queue.redis), POOL, repair=True)

    assert await queue.ids("tasks") == {task}
    assert await is_sound(queue)


async def test_audit_removes_a_job_that_is_no_task_from_their_index(queue: Queue) -> None:
    await queue.node()
    job = await queue.submit()
    await queue.redis.zadd("penstock:{m}:tasks", {job: 1})

    assert [found.name for found in await audit(AdminBroker(queue.redis), POOL)] == ["stray"]
    await audit(AdminBroker(queue.redis), POOL, repair=True)

    assert await queue.ids("tasks") == set()


async def test_task_counts_in_open_jobs_and_costs_its_tenants_rate_no_tokens(queue: Queue) -> None:
    node = await queue.node()
    terms = Terms(tokens_per_minute=1, max_open_jobs=2, max_queued_cost=1)
    tasks = [await submit(queue, Tokenize(), terms) for _ in range(2)]
    assert await queue.ids("tenant:default:open") == {*tasks}
    with pytest.raises(BusyError, match="limit of 2 open jobs"):
        await submit(queue, Tokenize(), terms)

    for taken in (await node.take(**FULL)).jobs:
        assert (await queue.record(taken.job_id))["n"] == "0"
        await node.finish(taken, 0)

    assert await queue.ids("tenant:default:open") == set()
    assert await queue.keys("rate:*") == set()
    assert await is_refused(queue, None, terms) is False
    assert await is_refused(queue, None, terms)


async def test_pool_whose_queue_is_full_of_generations_still_takes_tasks(queue: Queue) -> None:
    await queue.node(max_queued_cost=100)
    await queue.submit(cost=100)
    with pytest.raises(BusyError, match="queued KV tokens"):
        await queue.submit(cost=100)
    assert await queue.state(await submit_task(queue, cost=100)) == "queued"


async def test_pool_refuses_a_task_while_too_many_wait(queue: Queue) -> None:
    await queue.node()
    await queue.redis.zadd("penstock:{m}:tasks", {f"m.{number}": number for number in range(10_000)})
    await queue.redis.hset("penstock:{m}:tenant_tasks", "default", 10_000)
    with pytest.raises(BusyError, match="limit of 10000 waiting tasks") as caught:
        await submit_task(queue)
    assert caught.value.retry_after_ms >= 1000
    assert await queue.state(await queue.submit()) == "queued"


async def submit(queue: Queue, task: Tokenize | None, terms: Terms) -> str:
    return (await queue.producer.submit(Submission(new_job(task=task), 7, terms=terms))).job_id


async def is_refused(queue: Queue, task: Tokenize | None, terms: Terms) -> bool:
    try:
        await submit(queue, task, terms)
    except BusyError:
        return True
    return False
