"""What operators see of a pool's open jobs: their states, waits, backlog, shares, and those that expired."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.queue.harness import POOL, FakeNode, P, Queue, new_job
from redis.asyncio import Redis

from penstock.contract.job import Priority
from penstock.contract.output import Outcome
from penstock.contract.pool import QueueState, WaitState
from penstock.contract.priority import NUM_LEVELS, level_of
from penstock.contract.tenant import Terms
from penstock.queue.broker import queue_state
from penstock.queue.broker.pools import ActivityBroker, StatsBroker
from penstock.queue.broker.producer import Submission
from penstock.queue.job_cost import RateTokens

BACKGROUND = level_of(Priority.BATCH, background=True)


@pytest.fixture
def seen(redis: Redis) -> Any:
    """Read the state of the only pool, by both of its readers."""

    async def read() -> QueueState:
        (stats,) = await StatsBroker(redis).all()
        (activity,) = await ActivityBroker(redis).of([POOL])
        ages = {state: (jobs.count, activity.queue.waiting[state].count) for state, jobs in stats.queue.waiting.items()}
        assert all(one == other for one, other in ages.values())
        return stats.queue

    return read


def counts(state: QueueState, name: WaitState) -> dict[int, int]:
    return {level: count for level, count in enumerate(state.waiting[name].count) if count}


async def background(queue: Queue, **fields: Any) -> str:
    return await queue.submit(priority=Priority.BATCH, background=True, **fields)


async def reported(node: FakeNode, **fields: Any) -> None:
    await node.heartbeat(free=0, **{"kv_tokens_available": 0, **fields})


async def test_every_open_job_is_seen_in_one_state(queue: Queue, seen: Any) -> None:
    node = await queue.node()
    await queue.running(node)
    await reported(node, jobs_by_level=(0, 1))
    for _ in range(3):
        await background(queue)
    for tenant in ("a", "b", "b"):
        await background(queue, tenant=tenant, not_before_ms=60_000)
    await queue.submit(priority=Priority.INTERACTIVE, tenant="a", not_before_ms=60_000)
    state = await seen()
    assert counts(state, "queued") == {BACKGROUND: 3}
    assert counts(state, "scheduled") == {0: 1, BACKGROUND: 3}
    assert state.running == (0, 1, 0, 0, 0, 0)
    assert sum(state.queued) + sum(state.waiting["scheduled"].count) + sum(state.running) == len(
        await queue.ids("open")
    )


async def test_jobs_that_wait_for_their_tenants_tokens_are_a_state(queue: Queue, seen: Any) -> None:
    await queue.node()
    terms = Terms(tokens_per_minute=100, burst_s=1)
    for _ in range(3):
        job = new_job(background=True, priority=Priority.BATCH)
        await queue.producer.submit(Submission(job, 10, terms=terms, rate_tokens=RateTokens(0, 0, 0, may_use=150)))
    state = await seen()
    assert counts(state, "queued") == {BACKGROUND: 1}
    assert counts(state, "awaiting_tokens") == {BACKGROUND: 2}
    assert 0 <= state.waiting["awaiting_tokens"].oldest_ms[BACKGROUND] < 10_000


async def test_a_scheduled_job_waits_from_its_time_on(queue: Queue, seen: Any) -> None:
    await queue.node()
    later = await background(queue, not_before_ms=60_000)
    assert (await seen()).longest_wait_ms == (0,) * NUM_LEVELS
    lane = f"delayed:{BACKGROUND}:default"
    await queue.age(lane, later, 150_000)
    await queue.redis.zadd(f"{P}:delayed", {f"{BACKGROUND}:default": 1})
    assert (await seen()).longest_wait_ms[BACKGROUND] == pytest.approx(90_000, abs=10_000)


async def test_jobs_are_counted_at_zero_nodes(queue: Queue, seen: Any) -> None:
    node = await queue.node()
    await background(queue)
    await background(queue, not_before_ms=60_000)
    await node.broker.leave()
    state = await seen()
    assert (counts(state, "queued"), counts(state, "scheduled")) == ({BACKGROUND: 1}, {BACKGROUND: 1})
    assert state.running == (0,) * NUM_LEVELS
    assert state.backlog_s == (0.0, None), "no queued foreground work, and nobody knows when the rest is done"
    assert state.engine_shares is None


async def test_the_backlog_is_queued_cost_at_the_present_pace(queue: Queue, seen: Any) -> None:
    first, second = await queue.node("n1"), await queue.node("n2")
    await queue.submit(cost=300)
    await background(queue, cost=5_000)
    assert (await seen()).backlog_s == (None, None), "no node has measured its pace"
    await reported(first, drain_cost_per_s=60.0)
    await reported(second, drain_cost_per_s=40.0)
    assert (await seen()).backlog_s == (3.0, 50.0)
    await reported(second, drain_cost_per_s=40.0, draining=True)
    assert (await seen()).backlog_s == (5.0, pytest.approx(83.3, abs=0.1))


async def test_shares_are_those_of_all_engines_in_the_last_minute(queue: Queue, seen: Any) -> None:
    first, second = await queue.node("n1"), await queue.node("n2")
    await reported(first, recent_engine_ms=(3000.0, 0.0, 0.0, 0.0, 0.0, 1000.0))
    await reported(second, recent_engine_ms=(3000.0, 2000.0, 0.0, 0.0, 0.0, 1000.0))
    state = await seen()
    assert state.engine_shares == (0.6, 0.2, 0.0, 0.0, 0.0, 0.2)
    assert state.background_share == 0.2


async def test_each_expired_job_counts_once_wherever_it_was(queue: Queue, seen: Any) -> None:
    """Queued, scheduled, or running; its node may repeat its call."""
    node = await queue.node()
    job_id = await queue.submit(deadline_ms=60_000)
    taken = await node.take_one()
    await queue.change(job_id, deadline=1)
    for _ in range(2):
        await node.finish(taken, 0, outcome=Outcome("expired", "deadline_exceeded", "too late"))
    for fields in ({}, {"not_before_ms": 50_000}):
        late = await background(queue, deadline_ms=60_000, **fields)
        await queue.age("deadlines", late, 120_000)
        await queue.change(late, deadline=1)
    for _ in range(2):
        await queue.sweep()
    assert (await seen()).expired == (0, 1, 0, 0, 0, 2)
    (stats,) = await StatsBroker(queue.redis).all()
    assert stats.counts["ended_expired"] == 3


async def test_a_read_looks_at_a_bounded_number_of_tenants(
    queue: Queue, seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_state, "MAX_LANES", 2)
    await queue.node()
    for number in range(4):
        await background(queue, tenant=f"t{number}", not_before_ms=60_000 + number)
    assert counts(await seen(), "scheduled") == {BACKGROUND: 2}
