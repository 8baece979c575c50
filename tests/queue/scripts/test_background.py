"""Background work in the queue: what is accepted, when it is taken, and how due jobs flow."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.queue.harness import POOL, FakeNode, P, Queue, ids_of, new_job

from penstock.contract.errors import BusyError
from penstock.contract.job import Priority
from penstock.contract.tenant import Terms
from penstock.gpu_node.taking.taker import MAX_BACKGROUND_TAKEN
from penstock.queue.broker.producer import Submission

RATE = 100.0
"""KV tokens of cost that the node completes per second."""
MAX_READY = 128
"""As in waiting.lua."""


async def paced(queue: Queue, **config: Any) -> FakeNode:
    """Return a node whose pace is known, so that waits can be expected."""
    node = await queue.node(policy="fair", **config)
    await node.heartbeat(free=0, drain_cost_per_s=RATE, kv_tokens_available=0)
    return node


async def background(queue: Queue, priority: Priority = Priority.BATCH, **fields: Any) -> str:
    return await queue.submit(priority=priority, background=True, **fields)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
async def test_foreground_work_of_any_class_goes_first(queue: Queue, policy: str) -> None:
    node = await queue.node(policy=policy, aging_ms=1)
    urgent = await background(queue, Priority.INTERACTIVE)
    batch = await queue.submit(priority=Priority.BATCH)
    chat = await queue.submit(priority=Priority.STANDARD)
    await queue.change(urgent, submitted=1)
    taken = ids_of(await node.take())
    assert set(taken[:2]) == {batch, chat}
    assert taken[2] == urgent, "background work does not age"


async def test_background_work_is_taken_class_by_class(queue: Queue) -> None:
    node = await queue.node()
    ids = [await background(queue, priority) for priority in (2, 1, 0)]  # type: ignore[arg-type]
    answer = await node.take()
    assert ids_of(answer) == ids[::-1]
    assert [(job.level, job.urgency, job.is_background, job.priority) for job in answer.jobs] == [
        (3, 3, True, 0),
        (4, 4, True, 1),
        (5, 5, True, 2),
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
async def test_a_take_brings_few_background_jobs_so_that_a_chat_does_not_wait_for_their_preparation(
    queue: Queue, policy: str
) -> None:
    node = await queue.node(policy=policy)
    for _ in range(MAX_BACKGROUND_TAKEN + 2):
        await background(queue)
    chats = [await queue.submit() for _ in range(2)]
    answer = await node.take(slots=1000, slots_total=1000)
    assert (ids_of(answer)[:2], len(answer.jobs)) == (chats, MAX_BACKGROUND_TAKEN)
    assert len((await node.take(slots=1000, slots_total=1000)).jobs) == 4


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
async def test_background_work_below_its_share_goes_first_one_job_at_a_time(queue: Queue, policy: str) -> None:
    node = await queue.node(policy=policy)
    chats = [await queue.submit() for _ in range(3)]
    waiting = [await background(queue) for _ in range(3)]
    answer = await node.take(slots=3, background_due=True)
    assert ids_of(answer) == [waiting[0], *chats[:2]]
    assert answer.jobs[0].urgency == 0, "nothing displaces it"
    assert ids_of(await node.take(slots=3)) == [chats[2], *waiting[1:]]


async def test_classes_take_turns_by_weight_in_the_share_of_background_work(queue: Queue) -> None:
    node = await queue.node()
    for _ in range(30):
        await queue.submit()
        for priority in Priority:
            await background(queue, priority, cost=100)
    first = [(await node.take(slots=1, background_due=True)).jobs[0].priority for _ in range(28)]
    assert [first.count(priority) for priority in Priority] == [16, 8, 4]


async def test_due_background_work_that_does_not_fit_displaces_nothing(queue: Queue) -> None:
    node = await queue.node()
    chat = await queue.submit(cost=10)
    await background(queue, cost=30)
    assert ids_of(await node.take((40, 40, 40, 40, 40, 20), background_due=True, kv_total=60)) == []
    assert ids_of(await node.take((40, 40, 40, 40, 40, 20), kv_total=60)) == [chat]


async def test_background_work_waits_for_as_long_as_it_takes_and_foreground_work_does_not(queue: Queue) -> None:
    await paced(queue)
    for _ in range(100):
        await background(queue, cost=1000)
    await queue.submit(priority=Priority.INTERACTIVE, cost=5000)
    for priority in Priority:
        with pytest.raises(BusyError, match=r"would wait about \d+ s; the limit is 60 s"):
            await queue.submit(priority=priority, cost=5000)
    await background(queue, cost=1000)


async def test_a_backlog_of_background_work_refuses_no_foreground_work(queue: Queue) -> None:
    await paced(queue, max_queued_cost=10_000)
    for _ in range(50):
        await background(queue, Priority.INTERACTIVE, cost=5000)
    await queue.submit(priority=Priority.BATCH, cost=5000)
    await queue.submit(tenant="other", priority=Priority.BATCH, cost=5000)


async def test_the_longest_wait_is_a_setting_of_the_pool_and_of_a_request(queue: Queue) -> None:
    await paced(queue, max_wait_ms=10_000)
    await queue.submit(cost=500)
    with pytest.raises(BusyError, match="the limit is 10 s"):
        await queue.submit(cost=600)
    patient = new_job(background=False, max_wait_ms=20_000)
    await queue.producer.submit(Submission(patient, 600))
    with pytest.raises(BusyError, match="the limit is 1 s"):
        await queue.producer.submit(Submission(new_job(background=False, max_wait_ms=1000), 10))


async def test_a_deadline_refuses_background_work_only_if_it_is_certainly_too_late(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    for _ in range(10):
        await background(queue, cost=1000)
    await background(queue, deadline_ms=1000), "the pace is unknown"
    await node.heartbeat(free=0, drain_cost_per_s=RATE, kv_tokens_available=0)
    with pytest.raises(BusyError, match=r"wait at least 10\d s, longer than its deadline_s of 60 s") as refused:
        await background(queue, deadline_ms=60_000)
    assert refused.value.code == "deadline_unreachable"
    await background(queue, deadline_ms=200_000)
    await background(queue, deadline_ms=60_000, tenant="other"), "its own work would be done in time"


async def test_limits_of_a_tenant_count_its_background_work(queue: Queue) -> None:
    await paced(queue)
    terms = Terms(max_queued_cost=250)
    for _ in range(2):
        await queue.producer.submit(Submission(new_job(background=True), 100, terms=terms))
    with pytest.raises(BusyError, match="tenant's limit of 250 queued KV tokens"):
        await queue.producer.submit(Submission(new_job(background=False), 100, terms=terms))


async def test_use_by_background_work_costs_a_tenant_no_place_among_chats(queue: Queue) -> None:
    """Interactive work of a tenant above its share of foreground work counts as standard."""
    node = await queue.node(policy="fair")
    await background(queue, cost=1000, tenant="a")
    await node.take(hold_ms=1000)
    assert await queue.keys("recent_use:*") == set()
    chat = await queue.submit(tenant="a", priority=Priority.INTERACTIVE)
    await queue.submit(tenant="b", priority=Priority.INTERACTIVE)
    assert chat in ids_of(await node.take(slots=1))


# Jobs that fall due together


async def delayed(queue: Queue, count: int, tenant: str, **fields: Any) -> list[str]:
    ids = [await queue.submit(tenant=tenant, background=True, not_before_ms=60_000, **fields) for _ in range(count)]
    now_ms = await queue.now_ms()
    for number, job_id in enumerate(ids):
        await queue.delay(job_id, now_ms - 10_000 + number)
    return ids


async def let_lanes_pass(queue: Queue) -> None:
    for lane in await queue.ids("delayed"):
        await queue.redis.zadd(f"{P}:delayed", {lane: 1})


async def test_due_jobs_enter_the_queue_as_it_takes_them_oldest_first(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    ids = await delayed(queue, 300, "a")
    for _ in range(9):
        await let_lanes_pass(queue)
        await node.take(slots=0)
    assert await queue.redis.zcard(f"{P}:waiting:4") == MAX_READY
    assert await queue.redis.zcard(f"{P}:delayed:4:a") == 300 - MAX_READY
    taken: list[str] = []
    while len(taken) < 300:
        await let_lanes_pass(queue)
        taken += ids_of(await node.take(slots=50))
    assert taken == ids
    assert await queue.keys("delayed*") == set()


async def test_one_tenants_due_jobs_do_not_hide_those_of_another(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    await delayed(queue, 400, "a")
    few = await delayed(queue, 10, "b")
    await let_lanes_pass(queue)
    answer = await node.take(slots=20)
    assert set(few) <= set(ids_of(answer))


async def test_due_jobs_of_the_default_class_refuse_no_chat(queue: Queue) -> None:
    node = await paced(queue)
    await delayed(queue, 200, "a", priority=Priority.STANDARD, cost=1000)
    await let_lanes_pass(queue)
    await node.take(slots=0)
    await queue.submit(tenant="a", cost=100)
    chat = await queue.submit(tenant="b", cost=100)
    assert chat in ids_of(await node.take(slots=2))
    assert (await queue.producer.pressure(POOL)).num_queued[4] > 0
