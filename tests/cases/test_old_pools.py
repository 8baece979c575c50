"""Pools without nodes for an hour do not stand in the way: lists fold them away, and examples do not take them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from fakes.command import run_command
from fakes.queue.harness import Queue
from redis.asyncio import Redis

from penstock.gateway.apis.web.dashboard import Dashboard
from penstock.gateway.metrics import GatewayMetrics
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.producer import ProducerBroker

HOUR_MS = 3_600_000
POOL = "m"


@pytest.fixture
async def queue(redis: Redis) -> Queue:
    """A pool whose only node was lost just now."""
    found = Queue(redis)
    await found.node("n1")
    await found.age("nodes", "n1", 10 * HOUR_MS)
    await found.sweep()
    return found


async def an_hour_passes(queue: Queue) -> None:
    events: list[bytes] = await cast(Any, queue.redis).zrange(keys.events(POOL, "node_"), 0, -1)
    for member in events:
        await queue.age("node_events", member.decode(), HOUR_MS)


async def listed(redis_url: str, *words: str) -> str:
    return await said_by("pools", "list", *words, "--redis-url", redis_url)


async def top(redis_url: str, *words: str) -> str:
    return await said_by("top", *(words or ("--once",)), "--redis-url", redis_url)


async def said_by(*words: str) -> str:
    return (await asyncio.to_thread(run_command, *words)).stdout


async def test_lists_show_a_pool_whose_node_has_just_gone(queue: Queue, redis_url: str) -> None:
    assert await listed(redis_url) == "m  0 nodes  0 open jobs, 0 of them queued\n"
    assert "Without a node" not in await top(redis_url)


async def test_lists_fold_a_pool_without_nodes_for_an_hour(queue: Queue, redis_url: str) -> None:
    await an_hour_passes(queue)
    said = "without a node for an hour or more (--all shows them, `forget` removes one): m\n"
    assert await listed(redis_url) == said
    assert await listed(redis_url, "--all") == "m  0 nodes for 1 h  0 open jobs, 0 of them queued\n"
    (shown,) = json.loads(await listed(redis_url, "--json"))
    assert shown["without_node_ms"] >= HOUR_MS
    assert "Without a node for an hour or more (--pool shows one): m" in await top(redis_url)
    frame = json.loads(await top(redis_url, "--json"))
    assert (frame["pools"], frame["folded_pools"]) == ([], ["m"])
    assert "Without a node" not in await top(redis_url, "--once", "--pool", "m")


async def test_a_pool_with_a_waiting_job_is_shown(queue: Queue, redis_url: str) -> None:
    await queue.submit()
    await an_hour_passes(queue)
    assert (await listed(redis_url)).startswith("m  0 nodes for 1 h  1 open jobs, 1 of them queued for up to ")
    assert "Without a node" not in await top(redis_url)


async def test_a_pool_that_has_a_node_again_is_shown(queue: Queue, redis_url: str) -> None:
    await an_hour_passes(queue)
    await queue.node("n2")
    assert (await ProducerBroker(queue.redis).pools())[POOL].without_node_ms == 0
    assert (await listed(redis_url)).startswith("m  ")


async def test_the_dashboard_names_a_folded_pool(queue: Queue, redis_url: str) -> None:
    await an_hour_passes(queue)
    async with AsyncClient(redis_url) as client:
        state = json.loads(await Dashboard(client, GatewayMetrics(), asyncio.Event()).state())
    assert (state["pools"], state["folded"]) == ([], ["m"])
