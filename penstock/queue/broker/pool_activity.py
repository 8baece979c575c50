"""Reader of what happens in pools, for the dashboard. One read of a pool takes at most two round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from heapq import nlargest
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.priority import NUM_PRIORITIES
from penstock.queue import keys, wire
from penstock.queue.broker.connection import translated
from penstock.queue.msgpack_codec import WireError
from penstock.queue.pool_activity import LiveNode, PoolActivity, PoolEvent
from penstock.queue.pool_stats import EVENTS

MAX_TENANTS = 8
"""Tenants of a pool whose queued jobs are counted, those that wait for the most KV tokens first."""
MAX_TENANTS_READ = 1000
"""Waiting tenants of which these are chosen. Redis may return a few more."""
MAX_EVENTS = 50
"""Newest events of a pool that are read."""
_ABSENT = "-"
_CLASSES = range(NUM_PRIORITIES)


class ActivityBroker:
    """Reader of pools' activity. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def of(self, pools: Sequence[str]) -> list[PoolActivity]:
        """Return the activity of each pool."""
        with translated():
            return list(await asyncio.gather(*map(self._of, pools)))

    async def _of(self, pool: str) -> PoolActivity:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.hget(keys.config(pool), "lease_ms")
            pipe.hgetall(keys.counts(pool))
            pipe.zrange(keys.nodes(pool), 0, -1, withscores=True)
            pipe.hgetall(keys.pressure(pool))
            pipe.zrevrange(keys.events(pool), 0, MAX_EVENTS - 1)
            pipe.hscan(keys.queued(pool), 0, count=MAX_TENANTS_READ)
            for priority in _CLASSES:
                pipe.zcard(keys.waiting(pool, priority))
                pipe.zrange(keys.waiting(pool, priority), 0, 0, withscores=True)
            time, lease_ms, counts, heartbeats, records, events, (_, queued), *waiting = await pipe.execute()
        now_ms = time[0] * 1000 + time[1] // 1000
        return PoolActivity(
            pool,
            depth=tuple(waiting[::2]),
            oldest_ms=tuple(max(0, now_ms - int(head[0][1])) if head else 0 for head in waiting[1::2]),
            queued_of_tenants=await self._queued_of_tenants(pool, queued),
            counts={event: int(counts.get(event.encode(), 0)) for event in EVENTS},
            nodes=tuple(_live_nodes(heartbeats, records, now_ms, int(lease_ms or 0))),
            events=tuple(_event_of(member.decode()) for member in reversed(events)),
        )

    async def _queued_of_tenants(self, pool: str, costs: Mapping[bytes, bytes]) -> dict[str, int]:
        """Count the queued jobs of the tenants with the highest queued cost."""
        largest = nlargest(MAX_TENANTS, costs, key=lambda tenant: int(costs[tenant]))
        if not largest:
            return {}
        async with self._redis.pipeline(transaction=False) as pipe:
            for tenant in largest:
                for priority in _CLASSES:
                    pipe.xlen(keys.queue(pool, priority, tenant.decode()))
                    pipe.zcard(keys.requeued(pool, priority, tenant.decode()))
            lengths = await pipe.execute()
        step = 2 * NUM_PRIORITIES
        return {tenant.decode(): sum(lengths[i * step : (i + 1) * step]) for i, tenant in enumerate(largest)}


def _live_nodes(
    heartbeats: Sequence[tuple[bytes, float]], records: Mapping[bytes, bytes], now_ms: int, lease_ms: int
) -> list[LiveNode]:
    nodes = []
    for node, heartbeat_ms in sorted(heartbeats):
        if heartbeat_ms >= now_ms - lease_ms and node in records:
            # A node of another protocol version has a record that this one cannot read.
            with suppress(WireError):
                nodes.append(LiveNode(wire.decode_pressure(records[node]), max(0, now_ms - int(heartbeat_ms))))
    return nodes


def _event_of(member: str) -> PoolEvent:
    at_ms, *names = member.split(" ")
    return PoolEvent(int(at_ms), *("" if name == _ABSENT else name for name in names))
