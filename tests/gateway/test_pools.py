"""Pools whose nodes are gone, and a gateway that receives no messages any more."""

from __future__ import annotations

import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import redis
import redis.asyncio
from fakes.announced_pools import announcing, withdrawing
from fakes.other_version import REFUSAL, make_pool_of_other_version

from penstock.contract.pool import RANKS_PART, NodePressure, PoolRecord
from penstock.contract.tasks import KINDS
from penstock.gateway.app import create_app
from penstock.gateway.settings import GatewaySettings
from penstock.producer.client import AsyncClient
from penstock.queue import keys


@pytest.fixture
def ghost(redis_url, url):
    with redis.Redis.from_url(redis_url) as client:
        for command in announcing(PoolRecord("ghost", "acme/ghost")):
            client.execute_command(*command)
        client.hset(keys.POOLS, "broken", b"\xff")
        yield "acme/ghost"
        client.hdel(keys.POOLS, "broken")
        for command in withdrawing("ghost"):
            client.execute_command(*command)


def test_model_without_live_nodes_is_a_503_and_not_listed(stack, shared_engine, ghost):
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as http:
        response = http.post("/v1/completions", json={"model": ghost, "prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_node")
        assert int(response.headers["retry-after"]) >= 1
        assert {m["root"] for m in http.get("/v1/models").json()["data"]} == {"acme/echo"}
        assert http.get(f"/v1/models/{ghost}").status_code == 404
        assert http.post("/v1/completions", json={"model": "acme/nobody", "prompt": "a"}).status_code == 404
        assert http.get("/ready").status_code == 200


@contextmanager
def alive(client, record):
    """List a pool with a node that never takes a job."""
    for command in announcing(record):
        client.execute_command(*command)
    client.hset(keys.config(record.pool), "lease_ms", 60_000)
    client.zadd(keys.nodes(record.pool), {"n": 1000 * client.time()[0]})
    try:
        yield
    finally:
        for command in withdrawing(record.pool):
            client.execute_command(*command)
        client.delete(keys.nodes(record.pool), keys.config(record.pool))


def test_a_model_is_known_as_soon_as_it_is_announced(stack, shared_engine, redis_url, url):
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as http, redis.Redis.from_url(redis_url) as client:
        assert http.get("/v1/models/acme/late").status_code == 404
        with alive(client, PoolRecord("late", "acme/late")):
            assert http.get("/v1/models/acme/late").json()["id"] == "acme/late"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/jobs", {"prompt": "a"}),
    ],
)
def test_a_body_without_a_model_lists_the_models_if_there_are_several(stack, shared_engine, redis_url, path, body):
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as http, redis.Redis.from_url(redis_url) as client:
        with alive(client, PoolRecord("second", "acme/second", kinds=KINDS)):
            http.get("/v1/models/acme/second").raise_for_status()
            refused = http.post(path, json=body)
        assert refused.status_code == 400, refused.text
        assert "model must be named; served: " in refused.text
        assert "acme/echo, acme/second" in refused.text


def test_a_model_of_another_version_is_a_503_with_both_versions_and_not_listed(stack, shared_engine, redis_url):
    async def make() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await make_pool_of_other_version(client, "old", "acme/older")

    stack.call(make())
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as http, redis.Redis.from_url(redis_url) as client:
        try:
            response = http.post("/v1/completions", json={"model": "acme/older", "prompt": "a"})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (503, "protocol_version")
            assert re.search(REFUSAL.format(pool="old"), error["message"])
            assert {m["root"] for m in http.get("/v1/models").json()["data"]} == {"acme/echo"}
            assert http.get("/metrics").status_code == 200
        finally:
            client.hdel(keys.POOLS, "old")
            client.delete(*client.keys("penstock:{old}:*"))


async def test_gateway_whose_inbox_has_ended_is_not_ready():
    class Deaf:
        is_alive = False
        feed = control = files = batches = sets = None
        webhooks = SimpleNamespace(queue=None)
        schedules = SimpleNamespace(store=None)
        servers = SimpleNamespace(clock=SimpleNamespace(now_s=None), is_split=False)

    app = create_app(GatewaySettings(), cast("AsyncClient", Deaf()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        response = await http.get("/ready")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "inbox_ended")
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(("troubles", "status"), [({"runner": "3 steps failed"}, 200), ({RANKS_PART: "ended"}, 503)])
async def test_gateway_is_not_ready_while_the_only_node_waits_for_its_ranks(troubles, status):
    class Clientlike:
        is_alive = True
        feed = control = files = batches = sets = None
        webhooks = SimpleNamespace(queue=None)
        schedules = SimpleNamespace(store=None)
        servers = SimpleNamespace(clock=SimpleNamespace(now_s=None), is_split=False, named={}, grouped=lambda _: [])

        async def pools(self, *, renewed: bool = False):
            return {"m": SimpleNamespace(is_alive=True)}

        async def pressure(self, pool: str):
            return SimpleNamespace(nodes=[NodePressure("n1", troubles=troubles)])

    app = create_app(GatewaySettings(), cast("AsyncClient", Clientlike()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        assert (await http.get("/ready")).status_code == status
