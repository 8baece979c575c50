"""What operators watch: scripts count what happened, and gauges are those of the moment."""

from __future__ import annotations

import msgpack
import pytest
from fakes.queue.harness import LEASE_MS, POOL, P, Queue, new_job
from redis.asyncio import Redis

from penstock.contract.errors import BusyError
from penstock.contract.job import Priority
from penstock.contract.pool import EVENTS, PoolStats
from penstock.contract.tenant import UNLIMITED, Terms
from penstock.queue import keys
from penstock.queue.broker.pools import StatsBroker
from penstock.queue.broker.producer import Submission


@pytest.fixture
def broker(redis: Redis) -> StatsBroker:
    return StatsBroker(redis)


async def pool_stats(broker: StatsBroker) -> PoolStats:
    (only,) = await broker.all()
    return only


async def counted(broker: StatsBroker) -> dict[str, int]:
    return {event: number for event, number in (await pool_stats(broker)).counts.items() if number}


async def test_undisturbed_jobs_count_only_their_ends(queue: Queue, broker: StatsBroker) -> None:
    node = await queue.node()
    for _ in range(2):
        await node.finish(await queue.running(node), 0, 3)
    await queue.producer.cancel(await queue.submit(), "default")
    assert await counted(broker) == {"submitted": 3, "ended_succeeded": 2, "ended_cancelled": 1}


async def test_a_node_of_another_version_hides_no_pool(queue: Queue, broker: StatsBroker) -> None:
    old, new = await queue.node("old"), await queue.node("new")
    for node in (old, new):
        await node.heartbeat([])
    record = msgpack.unpackb(await queue.redis.hget(keys.pressure(POOL), new.name))
    await queue.redis.hset(keys.pressure(POOL), new.name, msgpack.packb(record | {"v": record["v"] + 1}))
    assert [node.node_id for node in (await pool_stats(broker)).nodes] == ["old"]


async def refused(queue: Queue, terms: Terms = UNLIMITED, *, cost: int = 100) -> str:
    with pytest.raises(BusyError) as caught:
        await queue.producer.submit(Submission(new_job(), cost, terms=terms))
    return caught.value.code


async def test_refusals_are_counted_by_their_limit(queue: Queue, broker: StatsBroker) -> None:
    await queue.node(max_queued_cost=1000)
    await queue.submit()
    assert await refused(queue, cost=1000) == await refused(queue, cost=1001) == "pool_busy"
    assert await refused(queue, Terms(max_open_jobs=1)) == "rate_limit_exceeded"
    assert await refused(queue, Terms(max_queued_cost=1)) == "rate_limit_exceeded"
    await queue.redis.hset(keys.stored(POOL), "default", 300 << 20)
    assert await refused(queue) == "memory_share_exceeded"
    await queue.redis.config_set("maxmemory", 1)
    assert await refused(queue) == "redis_full"
    await queue.redis.config_set("maxmemory", "512mb")
    expected = {"refused_busy": 2, "refused_tenant_limit": 2, "refused_tenant_memory": 1, "refused_memory": 1}
    assert await counted(broker) == {"submitted": 1, **expected}


async def test_losses_takeovers_zombies_and_dead_letters_are_counted(queue: Queue, broker: StatsBroker) -> None:
    zombie = await queue.node("n0")
    taken = await queue.running(zombie)
    await queue.kill(zombie)
    for number in (1, 2):
        node = await queue.node(f"n{number}")
        (again,) = (await node.take()).jobs
        await queue.kill(node)
    assert again.job_id == taken.job_id
    assert await zombie.emit(taken, 0) == "FENCED"
    assert await zombie.finish(taken, 0) == "FENCED"
    assert await zombie.give_back(taken) == "FENCED"

    expected = {"submitted": 1, "nodes_lost": 3, "losses": 3, "takeovers": 2, "dead_letters": 1, "ended_dead": 1}
    assert await counted(broker) == {**expected, "fenced": 3}


async def test_returned_jobs_are_counted_by_reason(queue: Queue, broker: StatsBroker) -> None:
    node = await queue.node()
    assert await node.give_back(await queue.running(node)) == "OK"
    forgetful = await queue.node("n2")
    await forgetful.take_one()
    await forgetful.heartbeat([])
    await queue.sweep(since_last_ms=None)
    found = await counted(broker)
    assert (found["given_back_drain"], found["given_back_unlisted"], found["sweep_resets"]) == (1, 1, 1)


async def test_depth_age_and_cost_are_told_per_class(queue: Queue, broker: StatsBroker) -> None:
    node = await queue.node()
    await node.heartbeat([])
    oldest = await queue.submit(priority=Priority.BATCH, cost=30)
    await queue.submit(priority=Priority.BATCH, cost=40)
    await queue.age(f"waiting:{int(Priority.BATCH)}", oldest, 60_000)
    found = await pool_stats(broker)
    queued = found.queue.waiting["queued"]
    assert (found.pool, queued.count, found.num_open) == (POOL, (0, 0, 2, 0, 0, 0), 2)
    assert found.queue.cost == (0, 0, 70, 0, 0, 0)
    assert queued.oldest_ms[:2] == (0, 0)
    assert queued.oldest_ms[2] == pytest.approx(60_000, abs=10_000)
    assert [one.node_id for one in found.nodes] == ["n1"]

    await queue.age("nodes", "n1", LEASE_MS + 1)
    assert (await pool_stats(broker)).nodes == ()


async def test_full_redis_still_counts_and_answers(queue: Queue, broker: StatsBroker) -> None:
    node, other = await queue.node(), await queue.node("n2")
    taken = await queue.running(node)
    await node.give_back(taken)
    await queue.change(taken.job_id, avoid_until=0)
    await other.take_one()
    await queue.redis.config_set("maxmemory", 1)
    for answer in (await node.emit(taken, 0), await node.finish(taken, 0), await node.give_back(taken)):
        assert answer == "FENCED"
    assert (await counted(broker))["fenced"] == 3
    await queue.redis.config_set("maxmemory", "512mb")


async def test_every_counted_event_is_known(queue: Queue, broker: StatsBroker) -> None:
    node = await queue.node()
    await node.finish(await queue.running(node), 0)
    names = {name.decode() for name in await queue.redis.hkeys(f"{P}:counts")}  # type: ignore[misc]
    assert names <= set(EVENTS)
