"""Pauses: nodes take no job of a paused pool, class or tenant, and miss none of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.queue.harness import POOL, Queue, ids_of, new_job
from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError, RequestError, UnavailableError, error_of
from penstock.contract.job import Priority
from penstock.contract.pauses import pause_names
from penstock.queue import keys
from penstock.queue.broker.producer import Submission
from penstock.queue.broker.steering import Steering

POLICIES = ("fcfs", "priority", "sjf", "fair")


async def test_paused_pool_hands_out_nothing_and_accepts_jobs(queue: Queue, redis: Redis) -> None:
    node, steering = await queue.node(), Steering(redis)
    taken = await queue.running(node)
    (pause,) = await steering.pause(POOL, ["pool"], on=True)
    assert (pause.pool, pause.tenant, pause.level) == (POOL, None, None)
    job_id = await queue.submit(background=True)
    assert ids_of(await node.take()) == []
    assert await node.emit(taken, 0) == "OK"
    assert (await steering.pause(POOL, ["pool"], on=True)) == [pause]
    inbox = await queue.listen(f"penstock:{{{POOL}}}:doorbell:n1")
    assert await steering.pause(POOL, ["pool"], on=False) == []
    assert await inbox.messages() == [b""]
    assert ids_of(await node.take(background_due=True)) == [job_id]


@pytest.mark.parametrize(
    ("names", "words"), [(["pool"], "the pool"), (["level:1"], "class standard"), (["tenant:acme"], "tenant acme")]
)
async def test_callers_who_would_wait_are_refused_as_soon_as_the_pause_stands(
    queue: Queue, redis: Redis, names: list[str], words: str
) -> None:
    await queue.node()
    known = new_job(tenant="acme")
    await queue.submit(known)
    # Neither the widest pause alone nor its answer hides what else is paused.
    await Steering(redis).pause(POOL, [*names, "tenant:acme"], on=True)
    outcomes = await asyncio.gather(
        queue.submit(tenant="acme"),
        queue.submit(tenant="acme", background=True),
        queue.submit(known),
        queue.producer.submit(Submission(new_job(tenant="acme"), 10, waits=True)),
        queue.producer.submit(Submission(new_job(tenant="acme"), 10).repeated()),
        queue.submit(tenant="rival", priority=Priority.BATCH),
        return_exceptions=True,
    )
    refused = [one for one in outcomes if isinstance(one, BaseException)]
    assert (outcomes[0], *outcomes[5:][: names == ["pool"]]) == tuple(refused)
    for error in refused:
        assert isinstance(error, UnavailableError)
        assert (error.code, error.pool, error.retry_after_ms > 0) == ("pool_paused", POOL, True)
        assert error.reason.startswith(words)
    assert await redis.scard(keys.open_jobs(POOL)) == len(outcomes) - len(refused)  # type: ignore[misc]
    await Steering(redis).pause(POOL, [*names, "tenant:acme"], on=False)
    await queue.submit(tenant="acme")


@pytest.mark.parametrize("policy", POLICIES)
async def test_paused_tenant_hides_no_other_tenants_jobs(queue: Queue, redis: Redis, policy: str) -> None:
    node, steering = await queue.node(policy=policy), Steering(redis)
    for _ in range(700):
        await queue.submit(tenant="paused", background=True)
    mine = [await queue.submit(tenant="other", background=True) for _ in range(3)]
    await steering.pause(POOL, pause_names("paused", None, None), on=True)
    assert sorted(ids_of(await node.take())) == mine
    assert ids_of(await node.take()) == []
    await steering.pause(POOL, pause_names("paused", None, None), on=False)
    assert len(ids_of(await node.take())) == 32


@pytest.mark.parametrize("policy", POLICIES)
async def test_paused_class_hides_no_other_class(queue: Queue, redis: Redis, policy: str) -> None:
    node, steering = await queue.node(policy=policy), Steering(redis)
    await steering.pause(POOL, pause_names(None, Priority.STANDARD, None), on=True)
    for background in (False, True):
        for _ in range(200):
            job = new_job(priority=Priority.STANDARD, background=background)
            await queue.producer.submit(Submission(job, 100, waits=True))
    fore = await queue.submit(priority=Priority.BATCH)
    back = await queue.submit(priority=Priority.BATCH, background=True)
    assert ids_of(await node.take(background_due=True)) == [back, fore]
    await steering.pause(POOL, pause_names(None, Priority.STANDARD, False), on=False)
    assert {pause.level for pause in await steering.paused([POOL])} == {4}
    assert len(ids_of(await node.take())) == (64 if policy == "sjf" else 128)


async def test_tasks_of_paused_tenants_wait(queue: Queue, redis: Redis) -> None:
    from penstock.contract.tasks import Tokenize

    node, steering = await queue.node(), Steering(redis)
    for _ in range(100):
        await queue.submit(tenant="paused", task=Tokenize())
    other = await queue.submit(tenant="other", task=Tokenize())
    await steering.pause(POOL, pause_names("paused", None, None), on=True)
    assert ids_of(await node.take(tasks=32)) == [other]


async def test_deadlines_pass_while_jobs_are_paused(queue: Queue, redis: Redis) -> None:
    await queue.node()
    job_id = await queue.submit(deadline_ms=1000)
    await Steering(redis).pause(POOL, ["pool"], on=True)
    await queue.age("deadlines", job_id, 10_000)
    await queue.change(job_id, deadline=await queue.now_ms() - 1)
    await queue.sweep()
    assert await queue.state(job_id) == "expired"


async def test_wrong_pauses_are_refused(queue: Queue, redis: Redis) -> None:
    with pytest.raises(NotFoundError):
        await Steering(redis).pause("unknown", ["pool"], on=True)
    with pytest.raises(RequestError) as caught:
        pause_names("acme", Priority.BATCH, None)
    assert caught.value.param == "tenant"


async def waiting_since(queue: Queue, ms_ago: int, **fields: Any) -> str:
    """Return a queued job that was submitted so long ago."""
    job_id = await queue.submit(**fields)
    await queue.change(job_id, submitted=await queue.now_ms() - ms_ago)
    return job_id


@pytest.mark.parametrize("names", [["pool"], ["level:1"], ["tenant:acme"]])
async def test_callers_are_told_of_a_pause_once_they_have_waited_for_as_long_as_they_accept(
    queue: Queue, redis: Redis, names: list[str]
) -> None:
    await queue.node(max_wait_ms=60_000, max_wait_ms_batch=1_000)
    over = [
        await waiting_since(queue, 61_000, tenant="acme"),
        await waiting_since(queue, 3_000, tenant="acme", max_wait_ms=2_000),
    ]
    waiting = [
        await waiting_since(queue, 50_000, tenant="acme"),
        await waiting_since(queue, 61_000, tenant="acme", max_wait_ms=100_000),
        await waiting_since(queue, 61_000, tenant="acme", background=True),
    ]
    patient = (await queue.producer.submit(Submission(new_job(tenant="acme"), 10, waits=True))).job_id
    await queue.change(patient, submitted=1)
    other = await waiting_since(queue, 61_000, tenant="rival", priority=Priority.BATCH)
    await queue.sweep()
    assert {await queue.state(one) for one in (*over, *waiting, patient, other)} == {"queued"}
    await Steering(redis).pause(POOL, names, on=True)
    await queue.sweep()
    for job_id in over:
        outcome = (await queue.producer.status(job_id, "acme")).outcome
        assert outcome is not None
        assert (outcome.state, outcome.code) == ("failed", "pool_paused")
        assert isinstance(error_of(outcome), UnavailableError)
    assert {await queue.state(one) for one in (*waiting, patient)} == {"queued"}
    assert await queue.state(other) == ("failed" if names == ["pool"] else "queued")


async def test_jobs_that_wait_for_longer_hide_no_caller(queue: Queue, redis: Redis) -> None:
    await queue.node()
    for _ in range(150):
        await waiting_since(queue, 50_000, max_wait_ms=3_600_000)
    late = await waiting_since(queue, 61_000)
    await redis.zadd(keys.waiting(POOL, 1), {late: await queue.now_ms()})
    await Steering(redis).pause(POOL, ["pool"], on=True)
    for _ in range(8):
        await queue.sweep()
        if await queue.state(late) == "failed":
            break
        await redis.hincrby(keys.config(POOL), "ahead_ms", 1000)  # type: ignore[misc]
    assert await queue.state(late) == "failed"


@pytest.mark.parametrize(
    ("names", "left"), [(["pool"], [0, 0, 0]), (["level:1"], [0, 0, 1]), (["tenant:acme"], [0, 1, 1])]
)
async def test_what_is_paused_counts_as_no_work_that_waits(
    queue: Queue, redis: Redis, names: list[str], left: list[int]
) -> None:
    node = await queue.node()
    for tenant, priority in (("acme", 1), ("rival", 1), ("rival", 2)):
        await queue.submit(tenant=tenant, priority=Priority(priority))
    await Steering(redis).pause(POOL, names, on=True)
    assert list((await node.take(slots=0)).depth[:3]) == left
