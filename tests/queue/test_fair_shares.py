"""Fairness across classes: interactive jobs of a tenant above its share run after the standard jobs of others."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.cover import examples
from fakes.queue.harness import P, Queue, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.job import Priority
from penstock.queue.policy import PolicyConfig, PolicyName, choose, foremost
from penstock.queue.policy_state import PolicyState, RecentUse

WINDOW_MS = 1_000
MAX_COST_MS = 50
STATED_BOUND_MS = 2 * WINDOW_MS + 2 * MAX_COST_MS


@dataclass(frozen=True)
class Work:
    """A job that occupies the only slot for `cost` ms."""

    job_id: str
    tenant: str
    level: int
    submitted_ms: float
    cost: int

    @property
    def remaining_cost(self) -> int:
        return self.cost

    @property
    def charge(self) -> float:
        return float(self.cost)


def serve(
    policy: PolicyConfig, classes: dict[str, list[int]], since_ms: dict[str, int], until_ms: int, seed: int
) -> list[tuple[float, str, int]]:
    """Return (time, tenant, duration) of each start on one slot. Each tenant always has a waiting job of each class."""
    rng, standing = random.Random(seed), PolicyState(policy.share_window_ms)
    waiting: list[Work] = []
    served: list[tuple[float, str, int]] = []
    now_ms = 0.0
    while now_ms < until_ms:
        for tenant, priorities in classes.items():
            for priority in priorities:
                is_there = any((w.tenant, w.level) == (tenant, priority) for w in waiting)
                if since_ms[tenant] <= now_ms and not is_there:
                    cost = rng.randint(1, MAX_COST_MS)
                    waiting.append(Work(f"{len(served)}{tenant}{priority}", tenant, priority, now_ms, cost))
                    standing.virtual_times[priority].enter(tenant)
        places = [1]
        chosen = choose(waiting, policy, standing, now_ms, lambda *_, places=places: bool(places and places.pop()))
        for work in chosen:
            waiting.remove(work)
            if not any((w.tenant, w.level) == (work.tenant, work.level) for w in waiting):
                standing.virtual_times[work.level].leave(work.tenant)
            served.append((now_ms, work.tenant, work.cost))
            now_ms += work.cost
        now_ms += not chosen
    return served


def share_of(tenant: str, served: list[tuple[float, str, int]], from_ms: float, to_ms: float) -> float:
    inside = [(who, cost) for at_ms, who, cost in served if from_ms <= at_ms < to_ms]
    return sum(cost for who, cost in inside if who == tenant) / (to_ms - from_ms)


attackers = st.lists(st.sampled_from(([0], [0, 1], [1])), min_size=1, max_size=4)


@settings(max_examples=examples(60))
@given(attackers=attackers, arrivals=st.lists(st.integers(0, 4000), min_size=5, max_size=5), seed=st.integers(0, 99))
def test_no_tenant_is_below_half_of_its_share_for_longer_than_the_bound(
    attackers: list[list[int]], arrivals: list[int], seed: int
) -> None:
    classes = {f"attacker{number}": priorities for number, priorities in enumerate(attackers)} | {"victim": [1]}
    since_ms = dict(zip(classes, arrivals, strict=False)) | {"victim": 3000}
    served = serve(PolicyConfig("fair", 10**9, 0, WINDOW_MS), classes, since_ms, 15_000, seed)
    # In such a period it may have nothing for the length of the bound, and its share in the rest. Several that come one
    # after the other, each of which used less lately, may each go first for a while.
    fair_share, period_ms = 1 / len(classes), (3 if len(attackers) == 1 else 5) * STATED_BOUND_MS
    for from_ms in range(3000, 15_000 - period_ms, 500):
        assert share_of("victim", served, from_ms, from_ms + period_ms) >= fair_share / 2


@pytest.mark.parametrize(("name", "share"), [("priority", 0.0), ("fair", 0.5)])
def test_a_flood_of_interactive_work_leaves_a_standard_tenant_its_half(name: PolicyName, share: float) -> None:
    classes = {"flood": [0], "neighbour": [1]}
    served = serve(PolicyConfig(name, 10**9, 0, WINDOW_MS), classes, dict.fromkeys(classes, 0), 10_000, 1)
    assert share_of("neighbour", served, 1000, 10_000) == pytest.approx(share, abs=0.05)


def test_a_tenant_within_its_share_keeps_its_precedence() -> None:
    standing = PolicyState(WINDOW_MS)
    for tenant, used in (("light", 10.0), ("heavy", 90.0)):
        standing.use.note(tenant, used, 0)
        for virtual_times in standing.virtual_times:
            virtual_times.enter(tenant)
    waiting = [Work("s", "heavy", 1, 0, 10), Work("i", "light", 0, 1, 10), Work("j", "heavy", 0, 0, 10)]
    policy = PolicyConfig("fair", 10**9, 0, WINDOW_MS)
    order = choose(waiting, policy, standing, 5, lambda work, urgency: urgency == (work.job_id != "i"))
    assert [work.job_id for work in order] == ["i", "s", "j"], "as what they count as"
    assert foremost(waiting[2:], policy, standing, 5) == (waiting[2], 1)


def test_tenant_that_is_alone_is_not_above_its_share() -> None:
    standing = PolicyState(WINDOW_MS)
    standing.use.note("only", 1e6, 0)
    standing.virtual_times[0].enter("only")
    standing.virtual_times[1].enter("only")
    assert standing.shares(0).goes_first("only") and standing.shares(0).may_displace("only")


def test_tenant_above_its_share_goes_first_if_no_other_waits_and_preempts_nothing() -> None:
    standing = PolicyState(WINDOW_MS)
    standing.use.note("flood", 90, 0)
    standing.use.note("running", 10, 0)
    standing.virtual_times[0].enter("flood")
    policy, waiting = PolicyConfig("fair", 10**9, 0, WINDOW_MS), [Work("i", "flood", 0, 0, 10)]
    assert foremost(waiting, policy, standing, 0) == (waiting[0], 1)
    assert foremost(waiting, policy, standing, 3 * WINDOW_MS) == (waiting[0], 0), "what was used long ago"


def test_use_counts_in_its_window_and_the_next_one() -> None:
    use = RecentUse(WINDOW_MS)
    use.note("a", 10, 999)
    use.note("a", 5.5, 1000)
    assert [use.of("a", at_ms) for at_ms in (1500, 2500, 3500)] == [16, 6, 0]
    use.note("a", 100, 3500)
    use.note("a", -40, 4500, 3500)
    assert use.of("a", 4500) == 60, "what came back, where it was charged"
    use.note("a", -60, 6000, 3500)
    use.note("a", 7, 6000)
    assert use.of("a", 6000) == 7, "what was charged long ago is no credit now"


# A tenant below its share of a node --------------------------------------------------------------


async def test_full_node_takes_a_job_of_a_tenant_that_holds_nothing_there(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    flood = [await queue.submit(tenant="flood", cost=100) for _ in range(3)]
    victim = await queue.submit(tenant="victim", cost=100)
    held = {"flood": (800, 8, 1.0)}
    full: Any = {"tokens": 200, "slots": 0, "kv_total": 1000, "slots_total": 8}
    assert ids_of(await node.take(**full)) == [], "nobody is known to be above its share"
    assert ids_of(await node.take(**full, tenants=held)) == [victim]
    assert ids_of(await node.take(**full, tenants=held | {"victim": (100, 1, 1.0)})) == []
    assert await queue.redis.scard(f"{P}:open") == len(flood) + 1


async def test_a_tenant_gets_its_share_of_a_full_node_and_no_more(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    for _ in range(9):
        await queue.submit(tenant="victim", cost=10)
    taken = await node.take(200, 0, kv_total=1000, slots_total=8, tenants={"flood": (800, 8, 1.0)})
    assert len(taken.jobs) == 4
    batch = await queue.submit(tenant="other", cost=10, priority=Priority.BATCH)
    taken = await node.take(200, 0, kv_total=1000, slots_total=8, tenants={"flood": (800, 8, 1.0)})
    assert batch not in ids_of(taken), "batch work waits"


async def test_a_tenant_gets_no_more_than_its_share_of_what_a_flood_has_above_its_own(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    for _ in range(9):
        await queue.submit(tenant="victim", cost=10)
    held = {"flood": (800, 8, 1.0), "third": (0, 0, 1.0)}
    taken = await node.take(200, 0, kv_total=1000, slots_total=8, tenants=held)
    assert len(taken.jobs) == 2, "a third of 8 slots"


async def test_a_flood_whose_turn_has_come_holds_back_no_tenant_below_its_share(queue: Queue) -> None:
    """The head of the flood is old, so the node keeps capacity free for it; the victim need not wait for that."""
    node = await queue.node(policy="fair", bypass_ms=0, aging_ms=1)
    await queue.submit(tenant="flood", cost=500)
    await asyncio.sleep(0.01)
    victim = await queue.submit(tenant="victim", cost=10)
    taken = await node.take(200, 0, kv_total=1000, slots_total=8, tenants={"flood": (800, 8, 1.0)})
    assert ids_of(taken) == [victim]
