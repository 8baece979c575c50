"""A node that holds a seat of its host declares its previous holders dead, and no other node."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fakes.queue.harness import LEASE_MS, POOL, FakeNode, P, Queue
from redis.asyncio import Redis

from penstock.queue.broker.node import NodeBroker

SILENCE_MS = LEASE_MS // 5


@pytest.fixture
async def queue(redis: Redis) -> Queue:
    """A pool that was swept a moment ago."""
    queue = Queue(redis)
    node = await queue.node("n-0")
    await node.broker.sweep()
    await node.broker.leave()
    return queue


async def be_silent_for(queue: Queue, node: FakeNode, silent_ms: float) -> None:
    """Make a node's last heartbeat that old."""
    await queue.redis.zincrby(f"{P}:nodes", -silent_ms, node.name)


async def seats_of(queue: Queue) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in (await cast(Any, queue.redis.hgetall(f"{P}:seats"))).items()}


async def test_job_of_a_dead_predecessor_continues_long_before_its_lease_ends(queue: Queue) -> None:
    before = await queue.node("n-1")
    assert (await before.broker.declare_dead(["seat"], has_joined=True)).num_left == 0
    taken = await queue.running(before)
    await be_silent_for(queue, before, SILENCE_MS + 50)
    after = await queue.node("n-2")
    assert (await after.broker.declare_dead(["other", "seat"], has_joined=True)).num_left == 1
    await after.broker.sweep()
    assert (await after.broker.declare_dead(["other", "seat"], has_joined=True)).num_left == 0
    assert await seats_of(queue) == {"seat": "n-2", "other": "n-2"}
    record = await queue.record(taken.job_id)
    assert (record["state"], record["losses"]) == ("queued", "1")
    assert (await after.take_one()).job_id == taken.job_id
    assert await before.emit(taken, 0) == "FENCED"


async def test_predecessor_that_sends_heartbeats_is_not_declared_dead(queue: Queue) -> None:
    living, after = await queue.node("n-1"), await queue.node("n-2")
    await living.broker.declare_dead(["seat"], has_joined=True)
    for _ in range(4):
        await living.heartbeat([])
        answer = await after.broker.declare_dead(["seat"], has_joined=True)
        assert answer.num_left == 1 and 0 < answer.wait_ms <= SILENCE_MS
        await after.broker.sweep()
        await be_silent_for(queue, living, SILENCE_MS / 2)
    assert await cast(Any, queue.redis.zscore(f"{P}:nodes", "n-1")) > 0
    assert await seats_of(queue) == {"seat": "n-1 n-2"}


async def test_heartbeat_revives_a_node_that_was_declared_dead_by_mistake(queue: Queue) -> None:
    living, after = await queue.node("n-1"), await queue.node("n-2")
    await living.broker.declare_dead(["seat"], has_joined=True)
    await be_silent_for(queue, living, SILENCE_MS + 50)
    await after.broker.declare_dead(["seat"], has_joined=True)
    await living.heartbeat([])
    await after.broker.sweep()
    assert await cast(Any, queue.redis.zscore(f"{P}:nodes", "n-1")) > 0


async def test_holder_of_another_seat_is_not_declared_dead(queue: Queue) -> None:
    one, other = await queue.node("n-1"), await queue.node("n-2")
    await one.broker.declare_dead(["seat"], has_joined=True)
    await be_silent_for(queue, one, LEASE_MS * 3 / 4)
    assert (await other.broker.declare_dead(["another"], has_joined=True)).num_left == 0
    assert await cast(Any, queue.redis.zscore(f"{P}:nodes", "n-1")) > 0


async def test_node_that_has_not_joined_takes_no_seat(queue: Queue) -> None:
    before = await queue.node("n-1")
    await before.broker.declare_dead(["seat"], has_joined=True)
    await be_silent_for(queue, before, SILENCE_MS + 50)
    loading = NodeBroker(queue.redis, POOL, "", "")
    assert (await loading.declare_dead(["seat"], has_joined=False)).num_left == 1
    assert await seats_of(queue) == {"seat": "n-1"}
    await (await queue.node("n-2")).broker.sweep()
    assert await seats_of(queue) == {}, "with a node its seat goes"


async def test_predecessor_that_died_while_it_waited_is_found_by_the_next_node(queue: Queue) -> None:
    for name in ("n-1", "n-2"):
        node = await queue.node(name)
        await node.broker.declare_dead(["seat"], has_joined=True)
    for name in ("n-1", "n-2"):
        await be_silent_for(queue, FakeNode(queue.redis, name, "r1"), SILENCE_MS + 50)
    last = await queue.node("n-3")
    await last.broker.sweep()
    assert (await last.broker.declare_dead(["seat"], has_joined=True)).num_left == 2
    await last.broker.sweep()
    assert await queue.redis.zrange(f"{P}:nodes", 0, -1) == [b"n-3"]


async def test_node_that_left_is_no_predecessor(queue: Queue) -> None:
    before, other = await queue.node("n-1"), await queue.node("n-2")
    await before.broker.declare_dead(["seat"], has_joined=True)
    await other.broker.declare_dead(["other"], has_joined=True)
    await before.broker.leave()
    assert await seats_of(queue) == {"other": "n-2"}


async def test_sweep_that_restarts_all_leases_revives_no_dead_node(queue: Queue) -> None:
    before, after = await queue.node("n-1"), await queue.node("n-2")
    await before.broker.declare_dead(["seat"], has_joined=True)
    await be_silent_for(queue, before, SILENCE_MS + 50)
    await queue.note_sweep(None)
    await after.broker.declare_dead(["seat"], has_joined=True)
    await after.broker.sweep()
    assert await cast(Any, queue.redis.hget(f"{P}:counts", "sweep_resets")) == b"2"
    assert await cast(Any, queue.redis.zscore(f"{P}:nodes", "n-1")) == 0


async def test_a_pool_without_a_schema_has_no_predecessors(redis: Redis) -> None:
    answer = await NodeBroker(redis, POOL, "n-1", "r1").declare_dead(["seat"], has_joined=False)
    assert (answer.num_left, answer.wait_ms) == (0, 0)
