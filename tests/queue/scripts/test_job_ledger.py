"""A job's ledger has the time and reason of each lost lease. Its tenant's list has it until its record expires."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes.queue.harness import POOL, P, Queue, chunks_of, new_id, new_job
from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError, RequestError
from penstock.contract.job import Priority
from penstock.contract.job_actions import JobFilter
from penstock.contract.output import JobLedger, Outcome, Usage
from penstock.queue import keys
from penstock.queue.broker import job_lists
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.job_lists import MAX_EXAMINED, JobLists
from penstock.queue.broker.node import Emission, GivenBackJob

MAX_PAST_LEASES = 8
RECORD_BYTES, WIDE_RECORD_BYTES = 1120, 5184


async def ledger_of(queue: Queue, job_id: str) -> JobLedger:
    return (await queue.producer.status(job_id, "default")).ledger


def told(ledger: JobLedger) -> list[tuple[str, str, str]]:
    return [(event.event, event.node_id, event.from_node_id or event.reason) for event in ledger.events()]


async def test_undisturbed_job_has_four_events_and_what_it_used(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    assert told(await ledger_of(queue, taken.job_id)) == [("queued", "", ""), ("taken", "n1", "")]
    await node.emit(taken, 0, 2)
    last = Emission(taken.job_id, taken.lease, 2, chunks_of(taken.job_id, 2, 1))
    await node.broker.finish(last, Outcome("succeeded"), b"result", kv_token_ms=1234.6, usage=Usage(9, 3, 4))

    ledger = await ledger_of(queue, taken.job_id)
    assert told(ledger) == [
        ("queued", "", ""),
        ("taken", "n1", ""),
        ("first_token", "", ""),
        ("finished", "n1", "succeeded"),
    ]
    assert (ledger.usage, ledger.kv_token_ms, ledger.num_past_leases) == (Usage(9, 3, 4), 1235, 0)
    assert not {"past_leases", "num_past_leases", "retaken"} & (await queue.record(taken.job_id)).keys()


async def test_each_return_to_the_queue_is_recorded_with_its_node(queue: Queue, redis: Redis) -> None:
    one, two = await queue.node("one"), await queue.node("two")
    taken = await queue.running(one)
    await one.emit(taken, 0)
    await one.give_back(taken)
    taken = await two.take_one()
    await one.heartbeat(free=10**6)
    await two.give_back(taken, why="pressure")
    await queue.change(taken.job_id, avoid_until=0)
    await two.take_one()
    await two.heartbeat(held=[])
    taken = await one.take_one()
    await queue.kill(one)
    three = await queue.node("three")
    await three.take_one()
    await queue.producer.cancel(taken.job_id, "default")
    await queue.kill(three)

    ledger = await ledger_of(queue, taken.job_id)
    assert [event for event in told(ledger) if event[0] not in ("queued", "first_token")] == [
        ("taken", "one", ""),
        ("given_back", "one", "drain"),
        ("moved", "two", "one"),
        ("preempted", "two", ""),
        ("taken", "two", ""),
        ("given_back", "two", "unlisted"),
        ("moved", "one", "two"),
        ("node_lost", "one", ""),
        ("moved", "three", "one"),
        ("finished", "three", "cancelled"),
    ]
    assert (ledger.preemptions, ledger.losses, ledger.num_past_leases) == (2, 2, 4)
    assert ledger.usage == Usage(0, 1, 0)
    times = [event.at_ms for event in ledger.events()]
    assert times == sorted(times)
    assert await audit(AdminBroker(redis), POOL) == []


async def test_engine_preemptions_of_all_leases_add_up(queue: Queue) -> None:
    one, two = await queue.node("one"), await queue.node("two")
    taken = await queue.running(one)
    assert await one.broker.give_back([GivenBackJob(taken.job_id, taken.lease, 100, 100, 2)]) == ["OK"]
    assert await one.broker.give_back([GivenBackJob(taken.job_id, taken.lease, 100, 100, 2)]) == ["FENCED"]
    taken = await two.take_one()
    assert (await ledger_of(queue, taken.job_id)).engine_preemptions == 2
    last = Emission(taken.job_id, taken.lease, 0, ())
    for _ in range(2):
        assert await two.broker.finish(last, Outcome("succeeded"), b"result", num_preemptions=3) == "OK"
    ledger = await ledger_of(queue, taken.job_id)
    assert (ledger.engine_preemptions, ledger.preemptions) == (5, 1)


async def test_ledger_keeps_the_newest_leases_and_counts_all(queue: Queue, redis: Redis) -> None:
    node = await queue.node("n1", avoid_ms=0)
    taken = await queue.running(node)
    for _ in range(MAX_PAST_LEASES + 3):
        await asyncio.sleep(0.002)
        await node.give_back(taken)
        taken = await node.take_one()
    ledger = await ledger_of(queue, taken.job_id)
    assert (len(ledger.past_leases), ledger.num_past_leases) == (MAX_PAST_LEASES, MAX_PAST_LEASES + 3)
    assert ledger.past_leases[0].taken_ms > ledger.taken_ms
    taken_ms = [lease.taken_ms for lease in ledger.past_leases] + [ledger.retaken_ms]
    assert taken_ms == sorted(taken_ms)
    assert await audit(AdminBroker(redis), POOL) == []


async def test_job_that_ends_in_the_queue_has_no_last_node(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.give_back(taken)
    await queue.producer.cancel(taken.job_id, "default")
    assert told(await ledger_of(queue, taken.job_id)) == [
        ("queued", "", ""),
        ("taken", "n1", ""),
        ("given_back", "n1", "drain"),
        ("finished", "", "cancelled"),
    ]


async def test_record_of_a_moved_job_counts_as_larger(queue: Queue) -> None:
    node = await queue.node("n1", avoid_ms=0)
    for moves, size in ((0, RECORD_BYTES), (2, WIDE_RECORD_BYTES)):
        taken = await queue.running(node)
        for _ in range(moves):
            await node.give_back(taken)
            taken = await node.take_one()
        await node.finish(taken, 0)
        record = await queue.record(taken.job_id)
        assert int(record["stored"].split()[3]) == size + len(b"result")
        used: Any = await queue.redis.memory_usage(keys.job(taken.job_id), samples=0)
        assert used < size


# Lists ------------------------------------------------------------------------------------------


async def announced(queue: Queue) -> JobLists:
    """The lists of the pool, which a node has announced."""
    await queue.node()
    return JobLists(queue.redis)


async def test_lists_of_tenants_are_read_in_pages_newest_first(queue: Queue) -> None:
    lists = await announced(queue)
    mine = [await queue.submit(tenant="acme") for _ in range(5)]
    other = await queue.submit(tenant="rival")
    found, after = list[str](), None
    while True:
        page = await lists.page(JobFilter("acme"), after=after, limit=2)
        found += [status.job_id for status in page.jobs]
        after = page.next_after
        if after is None:
            break
    assert found == sorted(mine, reverse=True)
    everything = await lists.page(JobFilter(), limit=100)
    assert {status.job_id for status in everything.jobs} == {*mine, other}
    assert {status.tenant for status in everything.jobs} == {"acme", "rival"}
    assert (await lists.page(JobFilter("acme", pool="other"))).jobs == ()
    assert await lists.owner(other) == "rival"
    with pytest.raises(NotFoundError):
        await lists.owner(new_id())
    with pytest.raises(RequestError):
        await lists.page(JobFilter("acme"), limit=1001)


async def test_page_of_a_rare_class_ends_early_and_goes_on(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = await announced(queue)
    monkeypatch.setattr(job_lists, "MAX_EXAMINED", 192)
    first = await queue.submit(priority=Priority.INTERACTIVE)
    for _ in range(600):
        await queue.submit()
    wanted = JobFilter("default", priority=Priority.INTERACTIVE)
    page, num_pages = await lists.page(wanted), 1
    while not page.jobs:
        assert page.next_after is not None
        page, num_pages = await lists.page(wanted, after=page.next_after), num_pages + 1
    assert ([status.job_id for status in page.jobs], num_pages) == ([first], 4)
    assert MAX_EXAMINED == 2048


async def test_too_many_lists_are_refused(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = await announced(queue)
    monkeypatch.setattr(job_lists, "MAX_TENANTS", 1)
    for tenant in ("one", "two"):
        await queue.submit(tenant=tenant)
    with pytest.raises(RequestError, match="name a tenant or a pool"):
        await lists.page(JobFilter())
    assert len((await lists.page(JobFilter("one"))).jobs) == 1


async def test_job_leaves_its_list_with_its_record(queue: Queue, redis: Redis) -> None:
    lists = await announced(queue)
    node = await queue.node("n2")
    taken = await queue.running(node)
    await node.finish(taken, 0)
    record, log, result = keys.job(taken.job_id), keys.log(taken.job_id), keys.result(taken.job_id)
    await redis.delete(record, log, result)  # as if by their ends of life
    for member in await queue.ids("expiry"):
        await queue.age("expiry", member, 10**9)
    assert await queue.ids("jobs:succeeded:default") == {taken.job_id}
    assert (await lists.page(JobFilter("default"))).jobs == ()
    assert await audit(AdminBroker(redis), POOL) == []
    await queue.sweep()
    assert await queue.ids("jobs:succeeded:default") == set()
    assert await audit(AdminBroker(redis), POOL) == []


Damage = Callable[[Queue, str, str], Awaitable[object]]
"""What harms the lists: with the queue, a job, and the key of the list that the job is in."""
MENDED: dict[str, tuple[Damage, str]] = {
    "job is not in its tenant's list": (lambda q, _, of: q.redis.delete(of), "missing"),
    "job is in another tenant's list": (lambda q, i, _: q.redis.zadd(f"{P}:jobs:rival", {i: 0}), "stray"),
    "unknown job is listed": (lambda q, _, of: q.redis.zadd(of, {new_id(): 0}), "stray"),
    "listed job has a score": (lambda q, i, of: q.redis.zadd(of, {i: 5}), "wrong_score"),
}


@pytest.mark.parametrize("damage", MENDED)
@pytest.mark.parametrize("is_open", [True, False])
async def test_audit_names_and_repairs_a_wrong_list(queue: Queue, redis: Redis, damage: str, is_open: bool) -> None:
    node = await queue.node()
    taken = await queue.running(node, idempotency_key="one")
    if not is_open:
        result = Emission(taken.job_id, taken.lease, 0, ())
        await node.broker.finish(result, Outcome("failed", "model_error"), b"")
    await node.heartbeat()
    harm, name = MENDED[damage]
    await harm(queue, taken.job_id, f"{P}:jobs:{'running' if is_open else 'failed'}:default")
    broker = AdminBroker(redis)
    found = await audit(broker, POOL)
    assert {(one.name, one.key.partition(":")[0]) for one in found} == {(name, "jobs")}
    await audit(broker, POOL, repair=True)
    assert await audit(broker, POOL) == []


async def test_audit_names_a_ledger_that_contradicts_its_record(queue: Queue, redis: Redis) -> None:
    node = await queue.node("n1", avoid_ms=0)
    taken = await queue.running(node)
    await node.give_back(taken)
    await node.take_one()
    broker = AdminBroker(redis)
    assert await audit(broker, POOL) == []
    for fields in ({"num_past_leases": 3}, {"num_past_leases": 1, "preemptions": 0}):
        await queue.change(taken.job_id, **fields)
        assert [(one.name, one.invariant) for one in await audit(broker, POOL)] == [("wrong_ledger", "I5")]


async def test_submitted_job_is_listed_once_whatever_is_repeated(queue: Queue) -> None:
    await queue.node()
    job = new_job()
    for _ in range(3):
        await queue.submit(job)
    assert await queue.ids("jobs:default") == {job.id}
