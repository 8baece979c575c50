"""A pool of another protocol version in Redis: only the keys that every version reads."""

from __future__ import annotations

from typing import Any, cast

import msgpack
from redis.asyncio import Redis

from penstock.queue import keys

OTHER = 4
REFUSAL = rf"protocol version {OTHER}, and this release has version 1.*`penstock pools forget {{pool}}`"


async def join_as_other_version(redis: Redis, pool: str, node_id: str = "other") -> None:
    """Join a pool as a node of another version does that finds no living node."""
    now_ms = int((await redis.time())[0]) * 1000
    client = cast(Any, redis)
    await client.hset(keys.config(pool), mapping={"version": OTHER, "lease_ms": 15_000})
    await client.zadd(keys.nodes(pool), {node_id: now_ms})


async def make_pool_of_other_version(redis: Redis, pool: str, model: str) -> str:
    """Write a pool with a living node and one job, and announce it. Return the job's id."""
    client = cast(Any, redis)
    await join_as_other_version(redis, pool)
    job_id = f"{pool}.01890a5d-ac96-774b-bcce-b302099a8057"
    await client.hset(keys.job(job_id), mapping={"state": "queued", "tenant": "default", "of_other_version": "1"})
    await client.set(
        keys.record(pool), msgpack.packb({"v": OTHER, "pool": pool, "model": model, "aliases": ["other"], "new": 1})
    )
    await client.hset(keys.POOLS, pool, msgpack.packb({"v": OTHER, "pool": pool, "names": None, "new": 1}))
    return job_id
