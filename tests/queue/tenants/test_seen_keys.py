"""A key that a gateway has seen revoked stays revoked, also if Redis lost the revocation."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fakes.queue.older_history import saved, set_back
from redis.asyncio import Redis

from penstock.contract.tenant import Terms
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore, SeenKeys


async def test_a_revocation_that_redis_lost_is_written_again(redis: Redis) -> None:
    store, seen = KeyStore(redis), SeenKeys(redis)
    _, kept = await store.add("acme", ("infer",), Terms())
    _, other = await store.add("acme", ("infer",), Terms())
    before = await saved(redis)
    await store.revoke(kept.key_id)
    assert (await seen.all())[kept.key_id].is_revoked
    await set_back(redis, before)
    known = await seen.all()
    assert known[kept.key_id].is_revoked and not known[other.key_id].is_revoked
    assert (await store.all())[kept.key_id].is_revoked


async def test_a_revocation_that_no_gateway_saw_is_lost_with_it(redis: Redis) -> None:
    store, seen = KeyStore(redis), SeenKeys(redis)
    _, kept = await store.add("acme", ("infer",), Terms())
    await seen.all()
    before = await saved(redis)
    await store.revoke(kept.key_id)
    await set_back(redis, before)
    assert not (await seen.all())[kept.key_id].is_revoked


async def test_a_key_stays_refused_although_its_revocation_cannot_be_repeated(
    redis: Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = KeyStore(redis)
    _, kept = await store.add("acme", ("infer",), Terms())
    before = await saved(redis)
    await cast(Any, redis).execute_command(
        "ACL", "SETUSER", "reader", "reset", "on", ">reader", "~*", "+hgetall", "+hget"
    )
    try:
        async with connect(redis_url.replace("://", "://reader:reader@")) as reader:
            seen = SeenKeys(reader)
            await store.revoke(kept.key_id)
            await seen.all()
            await set_back(redis, before)
            assert (await seen.all())[kept.key_id].is_revoked
    finally:
        await cast(Any, redis).execute_command("ACL", "DELUSER", "reader")
    assert "a revocation cannot be repeated" in caplog.text
    assert not (await store.all())[kept.key_id].is_revoked
