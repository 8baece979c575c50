"""Reader of pool statistics for operators."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.priority import NUM_PRIORITIES
from penstock.queue import keys, wire
from penstock.queue.broker.connection import translated
from penstock.queue.broker.pool_names import pool_names
from penstock.queue.msgpack_codec import WireError
from penstock.queue.pool_stats import EVENTS, PoolStats


class StatsBroker:
    """Reader of pool statistics. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def all(self) -> list[PoolStats]:
        """Return the statistics of every announced pool."""
        with translated():
            pools = await pool_names(self._redis)
            return list(await asyncio.gather(*map(self._of, pools)))

    async def memory(self) -> tuple[int, int]:
        """Return the bytes that Redis uses and its `maxmemory` (0: no limit)."""
        with translated():
            info = await self._redis.info("memory")
        return int(info["used_memory"]), int(info["maxmemory"])

    async def _of(self, pool: str) -> PoolStats:
        redis, classes = self._redis, range(NUM_PRIORITIES)
        (
            time,
            lease_ms,
            num_open,
            counts,
            heartbeats,
            records,
            stored,
            reserved,
            backlog,
            *waiting,
        ) = await asyncio.gather(
            redis.time(),
            redis.hget(keys.config(pool), "lease_ms"),
            redis.scard(keys.open_jobs(pool)),
            redis.hgetall(keys.counts(pool)),
            redis.zrange(keys.nodes(pool), 0, -1, withscores=True),
            redis.hgetall(keys.pressure(pool)),
            redis.hgetall(keys.stored(pool)),
            redis.hgetall(keys.reserved(pool)),
            redis.hmget(keys.backlog(pool), [str(p) for p in classes]),
            *(redis.zcard(keys.waiting(pool, p)) for p in classes),
            *(redis.zrange(keys.waiting(pool, p), 0, 0, withscores=True) for p in classes),
        )
        seconds, micros = time
        now_ms = seconds * 1000 + micros // 1000
        depth, heads = waiting[: len(classes)], waiting[len(classes) :]
        nodes = []
        for node, heartbeat_ms in heartbeats:
            if heartbeat_ms >= now_ms - int(lease_ms or 0) and node in records:
                # A node of another protocol version has a record that this one cannot read.
                with suppress(WireError):
                    nodes.append(wire.decode_pressure(records[node]))
        return PoolStats(
            pool,
            tuple(depth),
            tuple(max(0, now_ms - int(head[0][1])) if head else 0 for head in heads),
            tuple(max(0, int(cost or 0)) for cost in backlog),
            num_open,
            {event: int(counts.get(event.encode(), 0)) for event in EVENTS},
            tuple(nodes),
            {tenant.decode(): int(size) + int(reserved.get(tenant, 0)) for tenant, size in stored.items()},
        )
