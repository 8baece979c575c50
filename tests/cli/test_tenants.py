"""`penstock tenants delete` shows what it would delete, asks, and deletes."""

from __future__ import annotations

import asyncio
import json

import redis as sync_redis
from fakes.command import run_command
from fakes.queue.harness import POOL, Queue

from penstock.contract.tenant import Terms
from penstock.contract.webhook import EVENT_TYPES, WebhookEndpoint, WebhookSecrets, new_secret
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from penstock.queue.webhooks.deliveries import EndpointStore


async def fill(redis_url: str) -> None:
    async with connect(redis_url) as redis:
        queue = Queue(redis)
        node = await queue.node()
        given = {"id": "we_0123456789abcdef", "tenant": "zeta", "name": "a test", "url": "https://hook.example/"}
        endpoint = WebhookEndpoint.model_validate({**given, "event_types": EVENT_TYPES})
        await EndpointStore(redis).create(endpoint, WebhookSecrets(secret=new_secret()))
        await queue.submit(tenant="zeta", webhooks=(endpoint.id,))
        await node.finish(await node.take_one(), 0)
        await queue.submit(tenant="zeta", not_before_ms=3_600_000, background=True)
        await KeyStore(redis).add("zeta", ["infer"], Terms())


def test_a_tenant_is_shown_and_deleted(redis_url: str) -> None:
    asyncio.run(fill(redis_url))
    command = ("tenants", "delete", "zeta", "--redis-url", redis_url)
    shown = json.loads(run_command(*command, "--dry-run", "--json").stdout)
    held = shown["pools"][POOL]
    assert (shown["num_keys"], held["open_jobs"], held["ended_jobs"]) == (1, 1, 1) and held["bytes"] > 2000
    refused = run_command(*command)
    assert refused.returncode == 2 and "add --yes" in refused.stderr
    deleted = run_command(*command, "--yes")
    assert deleted.returncode == 0 and "deleted: 1 API keys, 2 jobs" in deleted.stderr
    left = json.loads(run_command(*command, "--dry-run", "--json").stdout)
    assert (left["num_keys"], left["pools"]) == (0, {})
    with sync_redis.Redis.from_url(redis_url) as redis:
        assert redis.xlen(keys.untold(POOL)) == 0
        assert [key for key in redis.scan_iter("penstock:*") if b"webhook" in key] == []
