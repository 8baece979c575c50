"""A pool that no node serves can be forgotten, unless it still has jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes.queue.harness import LEASE_MS, POOL, P, Queue
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, NotFoundError
from penstock.contract.job import Priority
from penstock.queue import keys
from penstock.queue.broker import admin, scripts
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.job_lists import DeadLetters


async def a_full_life(queue: Queue) -> str:
    """Create ended jobs of all classes, a dead letter and a reader. Return the finished job's id."""
    node = await queue.node("n1")
    for priority in Priority:
        done = await queue.running(node, priority=priority, tags=("nightly",), custom_id="row-1", metadata={"a": "b"})
        await node.finish(done, 0, 3)
    await node.heartbeat()
    lethal = await queue.submit()
    for number in range(3):
        victim = await queue.node(f"v{number}")
        await victim.take_one()
        await queue.kill(victim)
    assert await queue.state(lethal) == "dead"
    await queue.producer.reader_heartbeat(POOL, "inbox")
    await node.broker.leave()
    return done.job_id


async def test_forget_deletes_all_keys_of_a_pool_that_do_not_expire(queue: Queue) -> None:
    done = await a_full_life(queue)
    await AdminBroker(queue.redis).forget(POOL)
    assert await queue.producer.pools() == {}
    assert await DeadLetters(queue.redis).newest(POOL) == []
    lasting = [key async for key in queue.redis.scan_iter(f"{P}*") if await queue.redis.ttl(key) == -1]
    assert lasting == []
    assert await queue.redis.exists(keys.result(done))
    with pytest.raises(NotFoundError):
        await AdminBroker(queue.redis).forget(POOL)


async def test_forgotten_pool_is_created_anew_by_its_next_node(queue: Queue) -> None:
    await a_full_life(queue)
    await AdminBroker(queue.redis).forget(POOL)
    node = await queue.node("n2")
    assert [pool.is_alive for pool in (await queue.producer.pools()).values()] == [True]
    await node.finish(await queue.running(node), 0, 3)


async def test_node_that_joins_during_forget_keeps_the_pool(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    await a_full_life(queue)

    async def call(redis: Redis, name: str, pool: str, *names: str) -> Any:
        answer = await scripts.call(redis, name, pool, *names)
        if not names:
            await queue.node("n2")
        return answer

    monkeypatch.setattr(admin, "scripts", SimpleNamespace(call=call))
    await AdminBroker(queue.redis).forget(POOL)
    assert [pool.is_alive for pool in (await queue.producer.pools()).values()] == [True]


async def test_forget_spares_what_a_node_has_that_joins_meanwhile(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_full_life(queue)

    async def call(redis: Redis, name: str, pool: str, *names: str) -> Any:
        if not names:
            await queue.node("n2")
            await queue.submit(tags=("new",))
        return await scripts.call(redis, name, pool, *names)

    monkeypatch.setattr(admin, "scripts", SimpleNamespace(call=call))
    with pytest.raises(ConflictError, match="live nodes: 1"):
        await AdminBroker(queue.redis).forget(POOL)
    assert await queue.keys("tag*") == {"tagged:default:new", "tag_counts:default:new"}


async def test_a_pool_with_a_node_stays(queue: Queue) -> None:
    await queue.node("n1")
    with pytest.raises(ConflictError, match="live nodes: 1"):
        await AdminBroker(queue.redis).forget(POOL)
    assert list(await queue.producer.pools()) == [POOL]


async def test_a_pool_with_an_open_job_stays(queue: Queue) -> None:
    node = await queue.node("n1")
    job_id = await queue.submit()
    await queue.age("nodes", "n1", LEASE_MS + 1)
    with pytest.raises(ConflictError, match="open jobs: 1"):
        await AdminBroker(queue.redis).forget(POOL)
    await queue.age("nodes", "n1", -LEASE_MS)
    assert (await node.take_one()).job_id == job_id
