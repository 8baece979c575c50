"""Metering: used tokens are counted once a job, and a token rate is corrected to them at the end."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from fakes.queue.harness import POOL, SLOT_MS, FakeNode, P, Queue, chunks_of, new_job
from redis.asyncio import Redis

from penstock.contract.errors import BusyError
from penstock.contract.output import Outcome, Usage
from penstock.contract.tenant import UNLIMITED, Terms
from penstock.contract.usage import MAX_DAYS, MAX_HOURS, Period, UsagePage, UsageQuery
from penstock.queue import keys
from penstock.queue.broker.node import Emission, Taken
from penstock.queue.broker.producer import Submission
from penstock.queue.broker.usage import UsageBroker

TOLERANCE_MS = 2_000  # a slow machine
KINDS = ("usage", "hour_usage")
PERIODS: tuple[Period, ...] = ("day", "hour")


async def submit(queue: Queue, terms: Terms = UNLIMITED, *, cost: int = 100, tenant: str = "acme") -> str:
    return (await queue.producer.submit(Submission(new_job(tenant=tenant), cost, terms=terms))).job_id


async def end(node: FakeNode, taken: Taken, usage: Usage, start: int = 0) -> str:
    last = Emission(taken.job_id, taken.lease, start, chunks_of(taken.job_id, start, 1))
    return await node.broker.finish(last, Outcome("succeeded"), b"result", usage=usage)


async def run(queue: Queue, node: FakeNode, terms: Terms, *, cost: int, used: int) -> None:
    await submit(queue, terms, cost=cost)
    assert await end(node, await node.take_one(), Usage(used // 2, used - used // 2)) == "OK"


async def owed_ms(queue: Queue, tenant: str = "acme") -> float:
    due = await queue.redis.hget(f"{P}:rate:{tenant}", "tokens")
    return max(0.0, float(due or 0) - await queue.now_ms())


async def counts(redis: Redis, tenant: str = "acme", account: str = "") -> tuple[int, ...]:
    """The sums by day, which equal those by hour."""
    by_day, by_hour = [
        await UsageBroker(redis).per_owner(UsageQuery(by, days=2, tenant=tenant, account=account)) for by in PERIODS
    ]
    assert by_day == by_hour
    return tuple(by_day.get((tenant, account), ()))


async def test_usage_is_counted_once_whatever_is_repeated(queue: Queue) -> None:
    node = await queue.node()
    await submit(queue, Terms(account="key1"))
    taken = await node.take_one()
    for _ in range(3):
        assert await end(node, taken, Usage(11, 7, 4)) == "OK"
    assert await counts(queue.redis, account="key1") == (1, 11, 7, 4)
    assert await counts(queue.redis) == ()


async def test_usage_is_counted_once_over_a_takeover(queue: Queue) -> None:
    first, second = await queue.node("n1"), await queue.node("n2")
    await submit(queue)
    lost = await first.take_one()
    await first.emit(lost, 0, 3)
    await queue.kill(first)
    taken = await second.take_one()
    assert await end(first, lost, Usage(11, 3), start=3) == "FENCED"
    assert await end(second, taken, Usage(11, 9), start=3) == "OK"
    assert await end(first, lost, Usage(11, 3), start=3) == "FENCED"
    assert await counts(queue.redis) == (1, 11, 9, 0)


async def test_a_job_that_no_node_ended_counts_the_tokens_of_its_log(queue: Queue) -> None:
    await queue.node("n0")
    await submit(queue)
    for number in range(3):
        node = await queue.node(f"n{number}")
        taken = await node.take_one()
        if number == 0:
            await node.emit(taken, 0, 5)
        await queue.kill(node)
    assert await queue.state(taken.job_id) == "dead"
    assert await counts(queue.redis) == (1, 0, 5, 0)
    waiting = await submit(queue)
    await queue.producer.cancel(waiting, "acme")
    assert await counts(queue.redis) == (2, 0, 5, 0)


async def test_accounts_and_tenants_are_told_apart(queue: Queue) -> None:
    node = await queue.node()
    for tenant, account, used in (("acme", "k1", 1), ("acme", "k2", 20), ("rival", "k3", 300), ("acme", "k1", 4000)):
        await submit(queue, Terms(account=account), tenant=tenant)
        await end(node, await node.take_one(), Usage(used, 0))
    for by in PERIODS:
        found = await UsageBroker(queue.redis).per_owner(UsageQuery(by, days=2))
        prompt_tokens = {owner: counts[1] for owner, counts in found.items()}
        assert prompt_tokens == {("acme", "k1"): 4001, ("acme", "k2"): 20, ("rival", "k3"): 300}


async def test_pages_of_a_report_hold_each_row_once(queue: Queue) -> None:
    await queue.node()
    now_s = await queue.now_ms() // 1000
    for days_ago in (1, 0):
        fields = {f"t{tenant:03}:k{key}:jobs": days_ago + 1 for tenant in range(300) for key in range(2)}
        await cast(Any, queue.redis).hset(keys.usage(POOL, now_s // 86_400 - days_ago), mapping=fields)
    usage = UsageBroker(queue.redis)
    pages: list[UsagePage] = []
    after = None
    while after is not None or not pages:
        pages.append(await usage.page(UsageQuery(days=2), after=after, limit=250))
        after = pages[-1].next_after
    rows = [row for page in pages for row in page.rows]
    assert [len(page.rows) for page in pages] == [250, 250, 250, 250, 200]
    assert rows == sorted(rows) and len({(row.start, row.tenant, row.account) for row in rows}) == 1200
    assert [row.jobs for row in rows] == [2] * 600 + [1] * 600
    of_one = await usage.page(UsageQuery(days=2, tenant="t007"))
    assert [(row.tenant, row.account) for row in of_one.rows] == [("t007", "k0"), ("t007", "k1")] * 2


async def test_usage_by_hour_is_kept_for_three_days_and_by_day_for_three_months(queue: Queue) -> None:
    node = await queue.node()
    await submit(queue)
    await end(node, await node.take_one(), Usage(1, 1))
    lives = {kind: [await queue.redis.pttl(f"{P}:{name}") for name in await queue.keys(f"{kind}:*")] for kind in KINDS}
    assert {kind: [round(life / 3_600_000) for life in of_kind] for kind, of_kind in lives.items()} == {
        "usage": [MAX_DAYS * 24],
        "hour_usage": [MAX_HOURS],
    }


async def test_use_above_the_prediction_is_a_debt_and_below_it_is_refunded(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=6000, burst_s=10)
    await run(queue, node, terms, cost=100, used=3000)
    assert await owed_ms(queue) == pytest.approx(30_000, abs=TOLERANCE_MS)
    with pytest.raises(BusyError) as caught:
        await submit(queue, terms, cost=100)
    assert caught.value.retry_after_ms == pytest.approx(21_000, abs=TOLERANCE_MS)

    terms = Terms(tokens_per_minute=6000, burst_s=10)
    await submit(queue, terms, cost=5000, tenant="other")
    with pytest.raises(BusyError):
        await submit(queue, terms, cost=100, tenant="other")
    (taken,) = (await node.take()).jobs
    await end(node, taken, Usage(50, 10))
    assert await owed_ms(queue, "other") == pytest.approx(600, abs=TOLERANCE_MS)
    await submit(queue, terms, cost=100, tenant="other")


async def test_job_that_used_more_than_its_charge_leaves_the_difference_as_debt(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=6000, burst_s=10)
    await submit(queue, terms, cost=100)
    await queue.redis.delete(f"{P}:rate:acme")  # as if by its end of life
    await end(node, await node.take_one(), Usage(1000, 2000))
    assert await owed_ms(queue) == pytest.approx(29_000, abs=TOLERANCE_MS)


async def test_refund_is_made_at_the_rate_of_the_debt(queue: Queue) -> None:
    node, slow = await queue.node(), Terms(tokens_per_minute=60, burst_s=1)
    await submit(queue, slow, cost=200)
    taken = await node.take_one()
    fast = Terms(tokens_per_minute=6000, burst_s=60)
    await submit(queue, fast, cost=500)
    assert await owed_ms(queue) == pytest.approx(7_000, abs=TOLERANCE_MS)
    await end(node, taken, Usage(50, 50))
    assert await owed_ms(queue) == pytest.approx(6_000, abs=TOLERANCE_MS)


async def test_refund_of_tokens_leaves_the_debt_of_jobs(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(jobs_per_minute=2, tokens_per_minute=6000, burst_s=10)
    await run(queue, node, terms, cost=100, used=0)
    with pytest.raises(BusyError, match="2 jobs per minute"):
        await submit(queue, terms, cost=100)


async def test_refund_allows_no_more_than_a_burst(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=6000, burst_s=2)
    for _ in range(5):
        await run(queue, node, terms, cost=150, used=0)
    assert await owed_ms(queue) == 0
    await submit(queue, terms, cost=150)
    with pytest.raises(BusyError):
        await submit(queue, terms, cost=150)


async def test_short_answers_first_and_long_ones_then_do_not_beat_the_limit(queue: Queue) -> None:
    """Predicted from the short ones, each long answer is charged a hundredth of what it becomes."""
    node, terms = await queue.node(), Terms(tokens_per_minute=60_000, burst_s=10)
    now_ms, total, most_at_once = 0, 0, 0
    while now_ms < 600_000:
        try:
            await submit(queue, terms, cost=50)
            # A job may have to wait until older tokens count no more.
            wait_ms = (answer := await node.take()).again_in_ms
        except BusyError as error:
            wait_ms = error.retry_after_ms
        if wait_ms:
            wait_ms = SLOT_MS * math.ceil(wait_ms / SLOT_MS)
            await queue.pass_time("acme", wait_ms)
            now_ms += wait_ms
            answer = await node.take()
        if not answer.jobs:
            continue
        used = 20 if total < 1000 else 5000
        (taken,) = answer.jobs
        await end(node, taken, Usage(0, used))
        total += used
        most_at_once = max(most_at_once, used)
    allowed = 60_000 * now_ms / 60_000 + 10 * 1000 + most_at_once
    slack = TOLERANCE_MS  # tokens of real time that passes in the test, at 1 a ms
    assert 0.8 * allowed <= total <= allowed + slack


async def pass_time(queue: Queue, ms: int) -> None:
    rates: Any = await queue.redis.hgetall(f"{P}:rate:acme")
    await queue.redis.hset(f"{P}:rate:acme", "tokens", float(rates[b"tokens"]) - ms)
