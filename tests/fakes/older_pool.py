"""A pool of protocol version 1 in Redis: only the keys that another version reads."""

from __future__ import annotations

from typing import Any, cast

import msgpack
from redis.asyncio import Redis

from penstock.queue import keys

REFUSAL = r"protocol version 1, and this release has version 4.*`penstock pools forget {pool}`"

JOIN_SCRIPT = """
local P = string.sub(KEYS[1], 1, -8)
local now = tonumber(redis.call('TIME')[1]) * 1000
local known = redis.call('HMGET', KEYS[1], 'version', 'lease_ms')
local alive = known[1] and redis.call('ZCOUNT', P .. ':nodes', now - tonumber(known[2]), '+inf') or 0
if known[1] and known[1] ~= '1' and alive > 0 then return {'MISMATCH', 'version', known[1]} end
redis.call('HSET', KEYS[1], 'version', '1', 'lease_ms', '15000')
redis.call('ZADD', P .. ':nodes', now, ARGV[1])
return {'OK'}
"""
"""The part of version 1's join.lua that decides whether a node may join."""


async def join_as_version_1(redis: Redis, pool: str, node_id: str = "old") -> list[bytes]:
    """Join a pool as a node of protocol version 1. Return the script's answer."""
    return cast(list[bytes], await cast(Any, redis.eval(JOIN_SCRIPT, 1, f"{keys.prefix(pool)}:schema", node_id)))


async def make_older_pool(redis: Redis, pool: str, model: str) -> str:
    """Write a pool with a living node and one job, and announce it. Return the job's id."""
    assert await join_as_version_1(redis, pool) == [b"OK"]
    job_id = f"{pool}.01890a5d-ac96-774b-bcce-b302099a8057"
    record = {"state": "queued", "tenant": "default", "p": "1", "n": "1", "inboxes": "", "channel": "0", "unread": ""}
    await cast(Any, redis.hset(keys.job(job_id), mapping=cast(Any, record)))
    announced = msgpack.packb({"v": 1, "pool": pool, "model": model, "aliases": ["older"], "max_model_len": 4096})
    await cast(Any, redis.hset(keys.POOLS, pool, announced))
    return job_id
