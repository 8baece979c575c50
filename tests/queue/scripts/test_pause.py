"""Pauses: nodes take no job of a paused pool, class or tenant, and miss none of the others."""

from __future__ import annotations

import pytest
from fakes.queue.harness import POOL, Queue, ids_of
from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError, RequestError
from penstock.contract.job import Priority
from penstock.contract.job_actions import pause_names
from penstock.queue.broker.steering import Steering

POLICIES = ("fcfs", "priority", "sjf", "fair")


async def test_paused_pool_hands_out_nothing_and_accepts_jobs(queue: Queue, redis: Redis) -> None:
    node, steering = await queue.node(), Steering(redis)
    taken = await queue.running(node)
    (pause,) = await steering.pause(POOL, ["pool"], on=True)
    assert (pause.pool, pause.tenant, pause.level) == (POOL, None, None)
    job_id = await queue.submit()
    assert ids_of(await node.take()) == []
    assert await node.emit(taken, 0) == "OK"
    assert (await steering.pause(POOL, ["pool"], on=True)) == [pause]
    inbox = await queue.listen(f"penstock:{{{POOL}}}:doorbell:n1")
    assert await steering.pause(POOL, ["pool"], on=False) == []
    assert await inbox.messages() == [b""]
    assert ids_of(await node.take()) == [job_id]


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
            await queue.submit(priority=Priority.STANDARD, background=background)
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
    await Steering(redis).pause(POOL, ["pool"], on=True)
    job_id = await queue.submit(deadline_ms=1000)
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
