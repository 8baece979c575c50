"""A budget that callers share: no caller has more than its share, and owners are served alternately."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from penstock.contract.errors import UnavailableError
from penstock.gateway.budget import Refusal, SharedBudget

MOMENT_S = 0.01


async def hold(budget: SharedBudget, owner: str, amount: int, order: list[str], release: asyncio.Event) -> None:
    async with budget.taken(owner, amount):
        order.append(owner)
        await release.wait()


async def test_an_owner_has_no_more_than_its_share():
    budget = SharedBudget(10, per_owner=6)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(budget.taken("a", 4))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                await stack.enter_async_context(budget.taken("a", 4))
        await stack.enter_async_context(budget.taken("b", 100))  # all of its share
        assert budget.num_used == 10
    assert budget.num_used == 0


async def test_owners_are_served_round_robin():
    budget, order = SharedBudget(1, per_owner=1), []
    release = asyncio.Event()
    owners = ["a", "a", "a", "b", "a", "b", "c"]
    tasks = []
    for owner in owners:
        tasks.append(asyncio.create_task(hold(budget, owner, 1, order, release)))
        await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*tasks)
    assert order[:4] in (["a", "a", "b", "c"], ["a", "b", "c", "a"])
    assert sorted(order) == sorted(owners)


async def test_claim_of_zero_units_does_not_wait():
    budget = SharedBudget(1, per_owner=1)
    async with budget.taken("a", 1), budget.taken("a", 0):
        assert budget.num_used == 1


async def test_canceled_claim_holds_nothing():
    budget, order, release = SharedBudget(1, per_owner=1), [], asyncio.Event()
    first = asyncio.create_task(hold(budget, "a", 1, order, release))
    await asyncio.sleep(0)
    others = [asyncio.create_task(hold(budget, owner, 1, order, release)) for owner in "bbc"]
    await asyncio.sleep(0)
    others[0].cancel()
    first.cancel()
    await asyncio.sleep(MOMENT_S)
    release.set()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert sorted(order) == ["a", "b", "c"] and budget.num_used == 0


async def test_large_claim_is_not_overtaken_forever():
    budget, order, release = SharedBudget(4, per_owner=4), [], asyncio.Event()
    tasks = [asyncio.create_task(hold(budget, "small", 1, order, release))]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(hold(budget, "large", 4, order, release)))
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(hold(budget, "other", 1, order, release)))
    await asyncio.sleep(MOMENT_S)
    assert order == ["small"]
    release.set()
    await asyncio.gather(*tasks)
    assert order == ["small", "large", "other"]


async def test_growing_claims_leave_enough_for_one_to_complete():
    budget = SharedBudget(100, per_owner=12, step=1, most=8)
    async with AsyncExitStack() as stack:
        claims = [await stack.enter_async_context(budget.taken("a")) for _ in range(3)]
        for claim in claims:
            await claim.grow_to(2)
        await claims[0].grow_to(3)
        # Of 12 units 5 are free, and the first claim may need all of them.
        waiting = asyncio.create_task(claims[1].grow_to(3))
        await asyncio.sleep(MOMENT_S)
        assert not waiting.done()
        await claims[0].grow_to(100)
        assert (claims[0].amount, budget.num_used) == (8, 12)
        claims[0].shrink_to(0)
        await asyncio.wait_for(waiting, 60)
        assert claims[1].amount == 3


async def test_growing_claims_all_complete():
    budget = SharedBudget(20, per_owner=12, step=2, most=8)

    async def grow(owner: str) -> None:
        async with budget.taken(owner) as claim:
            for amount in range(1, 9):
                await claim.grow_to(amount)
                await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(*map(grow, "aaaabbbbccc")), 60)
    assert budget.num_used == 0


async def test_requests_that_hold_a_claim_get_a_second_one_one_after_the_other():
    budget = SharedBudget(30, per_owner=10, max_wait_s=5, has_reserve=True)
    order = []

    async def answer(name: str) -> None:
        async with budget.taken(name[0], 5) as record:
            await asyncio.sleep(MOMENT_S)
            async with budget.taken(name[0], 8, beside=record):
                order.append(name)
                assert budget.num_used <= 30
                await asyncio.sleep(MOMENT_S)

    # Both owners hold all of their shares, and together all that is not reserved.
    async with asyncio.timeout(60):
        await asyncio.gather(*map(answer, ("a1", "a2", "b1", "b2")))
    assert (sorted(order), budget.num_used) == (["a1", "a2", "b1", "b2"], 0)


async def test_the_reserve_is_not_for_first_claims():
    budget = SharedBudget(30, per_owner=10, max_wait_s=MOMENT_S, has_reserve=True)
    async with budget.taken("a", 10), budget.taken("b", 10), budget.taken("c") as empty:
        for beside in (None, empty):
            with pytest.raises(UnavailableError):
                async with budget.taken("c", 1, beside=beside):
                    pass


async def test_a_claim_that_waits_too_long_is_refused_with_a_time_to_retry():
    budget = SharedBudget(10, per_owner=10, max_wait_s=MOMENT_S)
    async with budget.taken("a", 10):
        with pytest.raises(UnavailableError) as caught:
            async with budget.taken("b", 1):
                pass
    assert (caught.value.status, caught.value.code, budget.num_used) == (503, "answer_memory_full", 0)
    assert caught.value.retry_after_ms > 0
    async with budget.taken("b", 10):
        assert budget.num_used == 10


async def test_a_claim_is_refused_at_once_if_its_owner_would_wait_for_too_much():
    budget = SharedBudget(10, per_owner=10, max_waiting=6, refusal=Refusal("things", code="things_full"))
    order, release = list[str](), asyncio.Event()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(budget.taken("a", 10))
        waiting = [asyncio.create_task(hold(budget, owner, 4, order, release)) for owner in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="as many large things as it may") as caught:
            await stack.enter_async_context(budget.taken("a", 4))
        assert (caught.value.status, caught.value.code) == (503, "things_full")
    release.set()
    await asyncio.gather(*waiting)
    assert (sorted(order), budget.num_used) == (["a", "b"], 0)
