"""submit: one job per id and per idempotency key. A refusal leaves no keys."""

from __future__ import annotations

import asyncio
import time

import pytest
from fakes.queue.harness import CONFIG, POOL, RECORD, TENANT, P, Queue, id_minted_at, new_id, new_job

from penstock.contract.errors import BusyError, ConflictError, RequestError, UnavailableError
from penstock.contract.job import NO_RESPONSE, JobDef, Priority, ResponseRecord, SamplingParams
from penstock.contract.output import Outcome
from penstock.queue import keys
from penstock.queue.broker.node import NodeBroker
from penstock.queue.broker.producer import Submission


async def test_accepted_job_is_queued_counted_and_readable(queue: Queue) -> None:
    await queue.node()
    job = new_job(tenant="acme", priority=Priority.INTERACTIVE, deadline_ms=60_000)

    answer = await queue.producer.submit(Submission(job, 70), inbox="me")

    assert (answer.job_id, answer.state, answer.num_chunks, answer.existed) == (job.id, "queued", 0, False)
    status = await queue.producer.status(job.id, "acme")
    assert (status.state, status.priority, status.outcome) == ("queued", Priority.INTERACTIVE, None)
    assert status.submitted_ms == pytest.approx(await queue.now_ms(), abs=5000)
    assert await queue.ids("waiting:0") == await queue.ids("open") == await queue.ids("tenant:acme:open") == {job.id}
    assert await queue.ids("deadlines") == {job.id}
    assert (await queue.producer.pressure(POOL)).backlog_cost[:3] == (70, 0, 0)


async def test_same_id_and_body_is_the_same_job(queue: Queue) -> None:
    node, job = await queue.node(), new_job()
    await queue.submit(job)
    taken = await node.take_one()
    await node.emit(taken, 0, 3)

    again = await queue.producer.submit(Submission(job, 100))

    assert (again.job_id, again.state, again.num_chunks, again.existed) == (job.id, "running", 3, True)
    assert await queue.ids("open") == {job.id}


@pytest.mark.parametrize("change", [{"prompt": "other"}, {"params": SamplingParams(seed=1)}, {"tenant": "other"}])
async def test_same_id_with_another_body_or_tenant_conflicts(queue: Queue, change: dict[str, object]) -> None:
    await queue.node()
    job_id = await queue.submit(new_job(prompt="one"))
    with pytest.raises(ConflictError) as caught:
        await queue.submit(JobDef(**{"id": job_id, "prompt": "one", **change}))
    assert (caught.value.code, caught.value.param) == ("id_conflict", "job_id")


async def test_hundred_submits_of_one_idempotency_key_make_one_job(queue: Queue) -> None:
    await queue.node()
    jobs = [new_job(idempotency_key="order-7") for _ in range(100)]

    answers = await asyncio.gather(*(queue.producer.submit(Submission(job, 10)) for job in jobs))

    assert len({answer.job_id for answer in answers}) == 1
    assert sum(not answer.existed for answer in answers) == 1
    assert len(await queue.ids("open")) == 1
    assert (await queue.producer.pressure(POOL)).backlog_cost[:3] == (0, 10, 0)


async def test_idempotency_key_of_another_body_conflicts(queue: Queue) -> None:
    await queue.node()
    await queue.submit(new_job(prompt="one", idempotency_key="k"))
    with pytest.raises(ConflictError) as caught:
        await queue.submit(new_job(prompt="two", idempotency_key="k"))
    assert caught.value.code == "idempotency_conflict"


async def test_tenants_do_not_share_idempotency_keys(queue: Queue) -> None:
    await queue.node()
    one = await queue.submit(new_job(tenant="one", idempotency_key="k"))
    two = await queue.submit(new_job(tenant="two", idempotency_key="k"))
    assert one != two


async def test_idempotency_key_outlives_the_job_and_then_ends(queue: Queue) -> None:
    node = await queue.node()
    job_id = await queue.submit(new_job(idempotency_key="k"))
    await node.finish(await node.take_one(), 0)

    assert await queue.submit(new_job(idempotency_key="k")) == job_id

    (name,) = await queue.keys(f"idem:{TENANT}:*")
    assert 0 < await queue.redis.pttl(f"{P}:{name}") <= CONFIG["idem_ttl_ms"]


@pytest.mark.parametrize(("code", "is_free"), [("unread", True), ("cancelled", False)])
async def test_idempotency_key_of_an_unread_job_is_free_again(queue: Queue, code: str, is_free: bool) -> None:
    node = await queue.node()
    first = await queue.submit(new_job(idempotency_key="k", background=False), inbox="me")
    await node.finish(await node.take_one(), 0, outcome=Outcome("cancelled", code, "why"))
    second = await queue.submit(new_job(idempotency_key="k", background=False), inbox="me")
    assert (second != first) is is_free
    assert await queue.state(second) == ("queued" if is_free else "cancelled")
    assert await queue.submit(new_job(idempotency_key="k", background=False), inbox="me") == second


async def test_idempotency_key_of_a_job_whose_record_is_gone_is_free_again(queue: Queue) -> None:
    node = await queue.node()
    first = await queue.submit(new_job(idempotency_key="k"))
    await node.finish(await node.take_one(), 0)
    await queue.redis.delete(keys.job(first))
    second = await queue.submit(new_job(idempotency_key="k"))
    assert second != first
    assert await queue.submit(new_job(idempotency_key="k")) == second


@pytest.mark.parametrize("shift_s", [-25 * 3600, 6 * 60])
async def test_id_from_another_time_is_refused(queue: Queue, shift_s: int) -> None:
    await queue.node()
    with pytest.raises(RequestError, match="older than 1435 min or from the future") as caught:
        await queue.submit(new_job(id_minted_at(time.time() + shift_s)))
    assert (caught.value.code, caught.value.param) == ("bad_id", "job_id")
    assert await queue.ids("open") == set()


@pytest.mark.parametrize("shift_s", [-23 * 3600, 4 * 60])
async def test_id_from_a_clock_a_little_off_is_accepted(queue: Queue, shift_s: int) -> None:
    await queue.node()
    job_id = id_minted_at(time.time() + shift_s)
    assert await queue.submit(new_job(job_id)) == job_id


@pytest.mark.parametrize(
    ("result_ttl_min", "keep_min", "age_min", "is_accepted"),
    [
        *((60, None, 54, True), (60, None, 56, False)),
        *((1440, 60, 54, True), (1440, 60, 56, False), (60, 1440, 56, True)),
        *((1, None, 4, True), (1, None, 6, False), (100 * 60, None, 23 * 60, True), (100 * 60, None, 25 * 60, False)),
    ],
)
async def test_id_whose_record_may_have_expired_is_refused(
    queue: Queue, result_ttl_min: int, keep_min: int | None, age_min: int, is_accepted: bool
) -> None:
    """Otherwise a job that had run and been forgotten would run again."""
    await queue.node(result_ttl_ms=result_ttl_min * 60_000)
    response = NO_RESPONSE if keep_min is None else ResponseRecord(b"record", keep_min * 60_000)
    submission = Submission(new_job(id_minted_at(time.time() - 60 * age_min)), 1, response=response)
    if is_accepted:
        assert (await queue.producer.submit(submission)).state == "queued"
    else:
        with pytest.raises(RequestError, match="or from the future"):
            await queue.producer.submit(submission)


async def test_known_job_is_answered_however_old_its_id(queue: Queue) -> None:
    await queue.node()
    job = new_job(id_minted_at(time.time()))
    await queue.submit(job)
    await queue.redis.rename(keys.job(job.id), keys.job(old := id_minted_at(1_700_000_000)))
    assert (await queue.producer.submit(Submission(job.model_copy(update={"id": old}), 1))).existed


async def test_unknown_pool_has_no_node_and_leaves_no_key(queue: Queue) -> None:
    with pytest.raises(UnavailableError) as caught:
        await queue.submit()
    assert caught.value.code == "no_node"
    assert await queue.redis.dbsize() == 0


async def test_open_jobs_are_capped_but_known_ones_still_answered(queue: Queue) -> None:
    node = await queue.node(max_open_jobs=2)
    jobs = [new_job(), new_job()]
    for job in jobs:
        await queue.submit(job)
    with pytest.raises(BusyError, match="2 open jobs") as caught:
        await queue.submit()
    assert caught.value.retry_after_ms > 0
    assert await queue.ids("open") == {job.id for job in jobs}
    assert (await queue.producer.submit(Submission(jobs[0], 100))).existed

    taken = await node.take(slots=1)
    await node.finish(taken.jobs[0], 0)

    await queue.submit()


async def test_queued_cost_is_capped_and_freed_by_take(queue: Queue) -> None:
    node = await queue.node(max_queued_cost=250)
    await queue.submit(cost=100)
    await queue.submit(cost=150, priority=Priority.BATCH)
    with pytest.raises(BusyError, match="250 queued KV tokens"):
        await queue.submit(cost=1, priority=Priority.INTERACTIVE)

    await node.take(tokens=100)

    await queue.submit(cost=100)


async def test_job_above_the_cap_is_accepted_by_an_empty_queue(queue: Queue) -> None:
    await queue.node(max_queued_cost=250)
    assert await queue.submit(cost=1000)


async def test_doorbell_rings_the_node_with_the_most_capacity_then_the_next(queue: Queue) -> None:
    bells = {}
    for name, free in (("big", 1000), ("small", 950)):
        node = await queue.node(name)
        await node.heartbeat(free=free)
        bells[name] = await queue.listen(keys.doorbell(POOL, name))

    await queue.submit(cost=100)
    await queue.submit(cost=100)
    await queue.submit(cost=10)

    assert len(await bells["big"].messages()) == 2
    assert len(await bells["small"].messages()) == 1


async def test_each_tenant_and_class_has_a_stream_gone_when_empty(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit(tenant="a", priority=Priority.INTERACTIVE)
    await queue.submit(tenant="a", priority=Priority.BATCH)
    await queue.submit(tenant="b", priority=Priority.BATCH)
    assert await queue.keys("queue:*") == {"queue:0:a", "queue:2:a", "queue:2:b"}

    await node.take(slots=2)
    assert await queue.keys("queue:*") == {"queue:2:b"}

    await node.take()
    assert await queue.keys("queue:*") == await queue.keys("waiting:*") == set()


async def test_pools_share_nothing(queue: Queue) -> None:
    await queue.node()
    other = NodeBroker(queue.redis, "m~1", "n1", "r1")
    await other.join(CONFIG, RECORD)
    await queue.submit()
    await queue.submit(new_job(new_id("m~1")))
    assert len(await queue.ids("open")) == 1
    assert await queue.redis.scard("penstock:{m~1}:open") == 1
