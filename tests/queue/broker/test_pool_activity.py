"""What the dashboard reads of a pool: its queue by tenant, its nodes, and the newest events of nodes and jobs."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fakes.queue.harness import LEASE_MS, POOL, P, Queue
from redis.asyncio import Redis

from penstock.contract.job import Priority
from penstock.contract.pool import PoolActivity
from penstock.queue import keys
from penstock.queue.broker import pools
from penstock.queue.broker.pools import ActivityBroker

Event = tuple[str, str, str, str, str]


@pytest.fixture
def broker(redis: Redis) -> ActivityBroker:
    return ActivityBroker(redis)


async def activity(broker: ActivityBroker) -> PoolActivity:
    (only,) = await broker.of([POOL])
    return only


async def events(broker: ActivityBroker) -> list[Event]:
    """Kind, node, job, source and reason of each event."""
    found = (await activity(broker)).events
    assert [event.at_ms for event in found] == sorted(event.at_ms for event in found)
    return [(event.kind, event.node_id, event.job_id, event.source, event.reason) for event in found]


async def test_events_tell_which_node_was_lost_and_where_its_job_went(queue: Queue, broker: ActivityBroker) -> None:
    first = await queue.node("n1")
    taken = await queue.running(first)
    await first.emit(taken, 0)
    await queue.kill(first)
    heir = await queue.node("n2")
    await heir.take_one()
    assert sorted(await events(broker)) == [
        ("node_joined", "n1", "", "", ""),
        ("node_joined", "n2", "", "", ""),
        ("node_lost", "n1", "", "", ""),
        ("takeover", "n2", taken.job_id, "n1", "lost"),
    ]


async def test_takeover_after_a_drain_names_the_drain(queue: Queue, broker: ActivityBroker) -> None:
    first, heir = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(first)
    await first.emit(taken, 0)
    await first.give_back(taken)
    await heir.take_one()
    await first.broker.leave()
    assert sorted(await events(broker))[2:] == [
        ("node_left", "n1", "", "", ""),
        ("takeover", "n2", taken.job_id, "n1", "drain"),
    ]


async def test_job_that_no_node_began_makes_no_event(queue: Queue, broker: ActivityBroker) -> None:
    first, second = await queue.node("n1"), await queue.node("n2")
    await first.give_back(await queue.running(first))
    await second.take_one()
    assert {kind for kind, *_ in await events(broker)} == {"node_joined"}


async def test_dead_letter_is_an_event(queue: Queue, broker: ActivityBroker) -> None:
    node = await queue.node("n0")
    taken = await queue.running(node)
    await queue.kill(node)
    for number in (1, 2):
        node = await queue.node(f"n{number}")
        await node.take_one()
        await queue.kill(node)
    assert ("dead_letter", "n2", taken.job_id, "", "") in await events(broker)


async def test_repeated_join_is_one_event(queue: Queue, broker: ActivityBroker) -> None:
    node = await queue.node("n1")
    await node.join()
    assert await events(broker) == [("node_joined", "n1", "", "", "")]


async def test_only_the_newest_events_are_kept(queue: Queue, broker: ActivityBroker) -> None:
    for number in range(300):
        node = await queue.node(f"n{number}")
        await node.broker.leave()
    assert await queue.redis.zcard(keys.events(POOL, "node_")) == 256
    found = await events(broker)
    assert len(found) == pools.MAX_EVENTS
    assert found[-1][:2] == ("node_left", "n299")


async def test_each_lost_node_is_an_event_however_many_jobs_move(queue: Queue, broker: ActivityBroker) -> None:
    await queue.node("n", max_losses=100)
    for _ in range(60):
        await queue.submit()
    for number in range(7):
        node = await queue.node(f"n{number}", max_losses=100)
        assert len((await node.take()).jobs) == 60
        await queue.kill(node)
    found = await activity(broker)
    assert [event.node_id for event in found.events if event.kind == "node_lost"] == [f"n{n}" for n in range(7)]
    assert (found.counts["nodes_lost"], found.counts["losses"]) == (7, 7 * 60)
    assert len(found.events) == pools.MAX_EVENTS


async def test_a_kill_of_a_node_without_jobs_is_a_lost_node_and_no_loss(queue: Queue, broker: ActivityBroker) -> None:
    await queue.kill(await queue.node("n1"))
    found = await activity(broker)
    assert (found.counts["nodes_lost"], found.counts["losses"]) == (1, 0)
    assert [event.kind for event in found.events] == ["node_joined", "node_lost"]


async def test_queued_jobs_are_counted_by_tenant_the_largest_first(
    queue: Queue, broker: ActivityBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "MAX_TENANTS", 2)
    node = await queue.node()
    await node.give_back(await queue.running(node, tenant="a"))
    for priority in (Priority.STANDARD, Priority.BATCH):
        await queue.submit(tenant="a", priority=priority)
    await queue.submit(tenant="b", cost=900)
    await queue.submit(tenant="c", cost=1)
    found = await activity(broker)
    assert found.queued_of_tenants == {"b": 1, "a": 3}
    assert found.queue.queued[:3] == (0, 4, 1)
    assert found.queue.longest_wait_ms[0] == 0


async def test_nodes_are_those_with_a_heartbeat_within_a_lease(queue: Queue, broker: ActivityBroker) -> None:
    for name in ("n1", "n2"):
        node = await queue.node(name)
        await node.heartbeat(kv_blocks_total=8, jobs_by_tenant={"a": 2}, jobs_by_level=(0, 2, 0))
    await queue.redis.zincrby(f"{P}:nodes", -2 * LEASE_MS, "n2")
    (alive,) = (await activity(broker)).nodes
    assert (alive.pressure.node_id, alive.pressure.kv_blocks_total) == ("n1", 8)
    assert (alive.pressure.jobs_by_tenant, alive.pressure.jobs_by_level) == ({"a": 2}, (0, 2, 0))
    assert 0 <= alive.silent_ms < LEASE_MS


async def test_unreadable_record_hides_only_its_node(queue: Queue, broker: ActivityBroker) -> None:
    for name in ("n1", "n2"):
        await (await queue.node(name)).heartbeat()
    await cast(Any, queue.redis.hset(keys.pressure(POOL), "n1", b"\x81\xa1v\x09"))
    assert [node.pressure.node_id for node in (await activity(broker)).nodes] == ["n2"]


async def test_unknown_pool_has_no_activity(broker: ActivityBroker) -> None:
    found = await activity(broker)
    assert (found.queue.queued[:3], found.nodes, found.events) == ((0, 0, 0), (), ())
