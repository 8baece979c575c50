"""The limit on waiting, and the pool's limits: each tenant is refused by what it would meet itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.queue.harness import POOL, Queue, new_job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.contract.errors import BusyError
from penstock.contract.job import Priority
from penstock.contract.output import WaitEstimate
from penstock.contract.tasks import Tokenize
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.producer import Submission
from penstock.queue.job_cost import spread_with_jobs

MAX_WAIT_S = 60
JITTER = 0.21


async def pool(queue: Queue, policy: str = "fair", *, rate: float = 10.0, free: int = 0, **config: Any) -> None:
    """Start a pool whose node completes `rate` KV tokens a second and has `free` of them."""
    node = await queue.node(policy=policy, **config)
    await node.heartbeat(drain_cost_per_s=rate, kv_tokens_available=free)


async def refusal(queue: Queue, tenant: str = "a", cost: int = 100, **fields: object) -> BusyError | None:
    terms = fields.pop("terms", Terms())
    assert isinstance(terms, Terms)
    try:
        await queue.producer.submit(Submission(new_job(tenant=tenant, **fields), cost, terms=terms))
    except BusyError as error:
        return error
    return None


async def fill(queue: Queue, tenant: str, seconds: float, *, rate: float = 10.0, **fields: object) -> None:
    """Queue work of one tenant that takes so many seconds. Under `fair`, a first job is never refused for its wait."""
    assert await refusal(queue, tenant, round(seconds * rate), **fields) is None


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority", "sjf"])
async def test_a_minute_of_one_tenants_work_refuses_others_only_without_fair_shares(queue: Queue, policy: str) -> None:
    await pool(queue, policy)
    await fill(queue, "flood", MAX_WAIT_S - 1)
    flood, victim = await refusal(queue, "flood"), await refusal(queue, "victim")
    assert flood is not None
    assert (victim is None) == (policy == "fair")


async def test_the_wait_is_the_own_work_at_the_share_of_the_pace(queue: Queue) -> None:
    await pool(queue)
    await fill(queue, "a", 20)
    assert await refusal(queue, "a", 100) is None  # 30 s alone
    await fill(queue, "b", 30)
    error = await refusal(queue, "a", 100)  # 10 s, and 30 s at half of the pace
    assert error is not None
    assert error.estimated_wait_ms == pytest.approx(70_000, abs=10)
    assert "would wait about 70 s; the limit is 60 s" in error.message
    assert error.retry_after_ms == pytest.approx(10_000, rel=JITTER)


async def test_the_wait_is_never_longer_than_that_for_all_queued_work(queue: Queue) -> None:
    await pool(queue)
    for name in "bcdefgh":
        await fill(queue, name, 1)
    await fill(queue, "a", 30)
    # At an eighth of the pace the own work would take 240 s, but after 37 s nothing is left before it.
    assert await refusal(queue, "a", 100) is None


async def test_a_weight_is_part_of_the_share(queue: Queue) -> None:
    await pool(queue)
    await fill(queue, "b", 50)
    await fill(queue, "a", 35)
    assert await refusal(queue, "a", 10) is not None
    assert await refusal(queue, "a", 10, terms=Terms(weight=9)) is None


async def test_free_capacity_shortens_the_wait_and_an_unknown_pace_refuses_nothing(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    await fill(queue, "a", 1000)
    assert await refusal(queue, "a") is None
    await node.heartbeat(drain_cost_per_s=10.0, kv_tokens_available=9_700)
    assert await refusal(queue, "a") is None
    await node.heartbeat(drain_cost_per_s=10.0, kv_tokens_available=0)
    assert await refusal(queue, "a") is not None
    await node.heartbeat(drain_cost_per_s=10.0, kv_tokens_available=0, draining=True)
    assert await refusal(queue, "a") is None


async def test_tokens_that_no_sequence_can_use_are_not_free(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    await node.heartbeat(drain_cost_per_s=10.0, kv_tokens_available=100_000, sequences_available=0)
    await fill(queue, "a", 60)
    assert await refusal(queue, "a") is not None
    await node.heartbeat(drain_cost_per_s=10.0, kv_tokens_available=100_000, sequences_available=2)
    assert await refusal(queue, "a", 100) is None, "there is a place for it"


async def test_a_refusal_has_an_interval_and_background_work_its_own_pace(queue: Queue) -> None:
    node = await queue.node(policy="fair", max_open_jobs=2)
    paces: dict[str, Any] = {"drain_cost_per_s": 10.0, "background_cost_per_s": 5.0, "pace_spreads": (0.1, 0.3)}
    await node.heartbeat(kv_tokens_available=0, **paces)
    for background in (False, True):
        await fill(queue, "a", 10, background=background)
    error = await refusal(queue, "a", 100)
    assert error is not None
    assert error.estimated_wait_ms == 20_000
    wait = WaitEstimate.of(20_000, spread_with_jobs(0.1, 1))
    assert (error.estimated_wait_p10_ms, error.estimated_wait_p90_ms) == wait[1:]
    error = await refusal(queue, "a", 100, background=True, priority=Priority.BATCH)
    assert error is not None
    assert error.estimated_wait_ms == 60_000
    wait = WaitEstimate.of(60_000, spread_with_jobs(0.3, 2))
    assert (error.estimated_wait_p10_ms, error.estimated_wait_p90_ms) == wait[1:]


async def test_only_work_ahead_of_the_class_counts(queue: Queue) -> None:
    await pool(queue, "priority")
    await fill(queue, "a", 59, priority=Priority.BATCH)
    assert await refusal(queue, priority=Priority.BATCH) is not None
    assert await refusal(queue, priority=Priority.STANDARD) is None
    assert await refusal(queue, priority=Priority.INTERACTIVE) is None


async def test_delayed_jobs_wait_by_their_callers_wish(queue: Queue) -> None:
    await pool(queue)
    await fill(queue, "a", 1000)
    assert await refusal(queue, "a", not_before_ms=600_000) is None


async def test_refused_cost_is_a_tenants_own_and_a_retry_counts_once(queue: Queue) -> None:
    await pool(queue)
    for name in ("flood", "a"):
        await fill(queue, name, 40)
    first = await refusal(queue, "a", 100)
    for number in range(50):
        assert await refusal(queue, "flood", 1000, prompt=f"{number}") is not None
    other = await refusal(queue, "a", 100)
    assert first is not None and other is not None
    assert other.retry_after_ms == pytest.approx(first.retry_after_ms, rel=0.5)
    flooded = await refusal(queue, "flood", 1000, prompt="0")
    assert flooded is not None and flooded.retry_after_ms > 400_000
    cost = int(float(await queue.redis.hget(f"{keys.prefix(POOL)}:refused:a", "cost") or 0))
    assert cost == 100


@pytest.mark.parametrize("every_s", [30, pytest.param(5, marks=pytest.mark.slow)])
async def test_hundreds_of_bodies_that_come_again_and_again_count_once_each(queue: Queue, every_s: int) -> None:
    """400 bodies of one key, for 5 minutes: `Retry-After` stays about what they cost ÷ the key's pace."""
    num_bodies, cost, rate = 400, 100, 100.0
    await pool(queue, rate=rate)
    await fill(queue, "a", MAX_WAIT_S, rate=rate)
    longest_ms, now_s = 0, 0
    while now_s < 300:
        refused = await asyncio.gather(*(refusal(queue, "a", cost, prompt=f"{body}") for body in range(num_bodies)))
        assert all(error is not None for error in refused)
        longest_ms = max(longest_ms, *(error.retry_after_ms for error in refused if error))
        now_s += every_s
        await queue.redis.hincrby(f"{keys.prefix(POOL)}:refused:a", "at", -1000 * every_s)  # type: ignore[misc]
    assert longest_ms <= 1.25 * 1000 * num_bodies * cost / rate


async def test_a_tenant_below_its_part_of_the_pools_limits_is_not_refused(queue: Queue) -> None:
    await pool(queue, max_open_jobs=4, max_queued_cost=1000)
    for _ in range(4):
        assert await refusal(queue, "flood", 1) is None
    assert (await refusal(queue, "flood", 1)) is not None
    assert await refusal(queue, "victim", 1) is None
    assert await refusal(queue, "victim", 1) is None
    assert await refusal(queue, "victim", 1) is not None


async def test_a_tenant_below_its_part_of_the_queued_cost_is_not_refused(queue: Queue) -> None:
    await pool(queue, rate=0, max_queued_cost=1000)
    assert await refusal(queue, "flood", 900) is None
    assert await refusal(queue, "flood", 200) is not None
    assert await refusal(queue, "victim", 200) is None
    assert await refusal(queue, "victim", 200) is None
    assert await refusal(queue, "victim", 200) is not None


async def test_waiting_tasks_have_tenant_shares(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await queue.node(policy="fair")
    for _ in range(3):
        await queue.submit(new_job(tenant="flood", task=Tokenize()), cost=1)
    # The queue counts 10,000 of them; submitting as many takes minutes.
    waiting = f"{keys.prefix(POOL)}:tasks"
    await queue.redis.zadd(waiting, {f"x{number}": 0 for number in range(10_000)})
    await queue.redis.hincrby(f"{keys.prefix(POOL)}:tenant_tasks", "flood", 10_000)
    assert await refusal(queue, "flood", 1, task=Tokenize()) is not None
    assert await refusal(queue, "victim", 1, task=Tokenize()) is None
    taken = await node.take(tasks=32)
    assert len(taken.jobs) == 4
    assert await queue.redis.hgetall(f"{keys.prefix(POOL)}:tenant_tasks") == {b"flood": b"10000"}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 900)), max_size=12), st.integers(1, 900))
async def test_a_tenant_without_queued_work_is_never_refused(
    queue: Queue, earlier: list[tuple[str, int]], cost: int
) -> None:
    await queue.redis.flushall()
    await pool(queue)
    for tenant, one in earlier:
        await refusal(queue, tenant, one)
    assert await refusal(queue, "victim", cost) is None
