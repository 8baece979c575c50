"""The longest wait that is accepted: of a pool, of a class in this pool, and of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes.queue.harness import RECORD, Queue

from penstock.queue.broker.connection import connect
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import Stack

PACE = 20.0
"""KV tokens that the node completes per second. A job needs about 200, so it takes ten seconds."""
NUM_TOKENS = 200


async def start_full_node(redis_url: str) -> None:
    """A node that takes nothing."""
    async with connect(redis_url) as redis:
        limits: dict[str, Any] = {"max_wait_ms": 60_000, "max_wait_ms_standard": "", "max_wait_ms_batch": 15_000}
        node = await Queue(redis).node(lease_ms=60_000, **limits)
        await node.heartbeat(free=0, drain_cost_per_s=PACE, kv_tokens_available=0)


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    """A gateway in front of a pool of which the class batch has a limit of its own."""
    with EmbeddedRedis() as server:
        asyncio.run(start_full_node(server.url))
        with httpx.Client(base_url=stack.start_gateway(redis_url=server.url), timeout=60) as http:
            yield http


def submit(http: httpx.Client, priority: str, **fields: Any) -> httpx.Response:
    body = {"model": RECORD.model, "prompt": "hi", "params": {"max_tokens": NUM_TOKENS}, "background": False}
    return http.post("/v1/jobs", json={**body, "priority": priority, **fields})


def test_a_class_has_its_own_limit_and_a_request_overrides_it(http: httpx.Client) -> None:
    submit(http, "standard").raise_for_status()
    submit(http, "standard").raise_for_status(), "it waits for 20 s, and its class has the limit of the pool"
    refused = submit(http, "batch")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "pool_busy")
    assert "the limit is 15 s" in refused.json()["error"]["message"]
    submit(http, "batch", max_wait_s=120).raise_for_status()
    impatient = submit(http, "standard", max_wait_s=5)
    assert "the limit is 5 s" in impatient.json()["error"]["message"]


def test_background_jobs_have_no_limit(http: httpx.Client) -> None:
    for _ in range(4):
        submit(http, "batch", background=True).raise_for_status()
