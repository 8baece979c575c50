"""Reader of tenants' token usage and stored bytes, as the scripts have counted them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from datetime import date, timedelta
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.usage import DayUsage
from penstock.queue import keys
from penstock.queue.broker.connection import translated

_COUNTERS = ("jobs", "prompt", "completion", "cached")
_SECONDS_A_DAY = 86_400


class UsageBroker:
    """Reader of usage. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def of(self, tenant: str, account: str, days: int) -> list[DayUsage]:
        """Return one account's usage in all pools, per day of the last `days` days; days without usage are left out."""
        names = [f"{tenant}:{account}:{counter}" for counter in _COUNTERS]
        found = []
        for pool, day in await self._pool_days(days):
            with translated():
                values = await self._redis.hmget(keys.usage(pool, day), names)
            if any(values):
                found.append(_usage(day, pool, tenant, account, [int(value or 0) for value in values]))
        return sorted(found)

    async def all(self, days: int) -> list[DayUsage]:
        """Return the usage of all accounts in all pools, per day of the last `days` days."""
        found = []
        for pool, day in await self._pool_days(days):
            with translated():
                fields = await self._redis.hgetall(keys.usage(pool, day))
            accounts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
            for name, value in fields.items():
                tenant, account, counter = name.decode().split(":")
                accounts[tenant, account][counter] = int(value)
            for owner, counts in accounts.items():
                found.append(_usage(day, pool, *owner, [counts.get(counter, 0) for counter in _COUNTERS]))
        return sorted(found)

    async def kept(self) -> dict[str, int]:
        """Return the bytes of Redis memory that each tenant's jobs and results occupy, in all pools."""
        sums: dict[str, int] = defaultdict(int)
        with translated():
            pools = await self._redis.hkeys(keys.POOLS)
            for kept in await asyncio.gather(*(self._redis.hgetall(keys.kept_bytes(name.decode())) for name in pools)):
                for tenant, num_bytes in kept.items():
                    sums[tenant.decode()] += int(num_bytes)
        return dict(sums)

    async def _pool_days(self, days: int) -> Iterable[tuple[str, int]]:
        with translated():
            (seconds, _), pools = await asyncio.gather(self._redis.time(), self._redis.hkeys(keys.POOLS))
        today = seconds // _SECONDS_A_DAY
        names = sorted(name.decode() for name in pools)
        return [(pool, day) for pool in names for day in range(today - days + 1, today + 1)]


def _usage(day: int, pool: str, tenant: str, account: str, counts: list[int]) -> DayUsage:
    return DayUsage(date(1970, 1, 1) + timedelta(days=day), pool, tenant, account, *counts)
