"""Deletion of all that Redis holds of a tenant: keys, endpoints, schedules, files, batches, jobs and usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from penstock.contract.errors import ConflictError
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import translated
from penstock.queue.broker.pools import pool_names
from penstock.queue.broker.schedules import ScheduleStore
from penstock.queue.files.file_records import FileRecords, HeldFiles
from penstock.queue.tenants.key_store import KeyStore
from penstock.queue.webhooks.deliveries import DeliveryQueue, EndpointStore

CANCEL_S = 60.0
"""Seconds to wait until all jobs have ended. A running job ends within a step; that of a dead node, after its lease."""
_POLL_S = 0.2
_ERASED_AT_ONCE = 64
"""Ended jobs that one call deletes. It takes a few milliseconds, in which Redis does nothing else."""
_CANCELED_AT_ONCE = 128
_FIELDS_AT_ONCE = 400


class Held(NamedTuple):
    """What a pool holds of a tenant."""

    num_open: int
    num_ended: int
    num_bytes: int
    """Bytes that its jobs and results occupy."""


@dataclass(frozen=True, slots=True)
class TenantData:
    """What Redis holds of a tenant."""

    tenant: str
    num_keys: int
    """API keys, revoked ones included."""
    num_endpoints: int
    """Webhook endpoints."""
    num_schedules: int
    files: HeldFiles
    pools: dict[str, Held]
    """Of the pools that hold anything."""


class TenantBroker:
    """Counts and deletes a tenant's data. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def data(self, tenant: str) -> TenantData:
        """Return what Redis holds of a tenant."""
        with translated():
            held = {pool: await self._call(pool, tenant, 0) for pool in await pool_names(self._redis)}
        num_keys, files = len(await self._keys_of(tenant)), await FileRecords(self._redis).held_by(tenant)
        num_endpoints = len(await EndpointStore(self._redis).of(tenant))
        num_schedules = len(await ScheduleStore(self._redis).of(tenant))
        pools = {pool: one for pool, one in held.items() if any(one)}
        return TenantData(tenant, num_keys, num_endpoints, num_schedules, files, pools)

    async def delete(self, tenant: str, on_job: Callable[[int], None] = lambda _: None) -> TenantData:
        """Delete a tenant's keys, endpoints, files and batches, end its jobs, and delete these. Return what was held.

        `on_job` is called with the number of jobs that were deleted together. Raises ConflictError if jobs do not end,
        or if new ones come: submitters of the tenant may still be at work. A later call deletes the rest.
        """
        before = await self.data(tenant)
        with translated():
            if found := await self._keys_of(tenant):
                await self._redis.hdel(keys.API_KEYS, *found)
                await self._redis.hdel(keys.key_terms(), *found)
            # Before the jobs, so that nothing submits further ones and no endpoint is told of the ends.
            schedules = ScheduleStore(self._redis)
            for schedule in await schedules.of(tenant):
                await schedules.delete(schedule.id, tenant)
            await FileRecords(self._redis).erase(tenant)
            endpoints = EndpointStore(self._redis)
            for one in await endpoints.of(tenant):
                await endpoints.delete(one.id, tenant)
            for pool in await pool_names(self._redis):
                await self._end_jobs(pool, tenant)
                await DeliveryQueue(self._redis).drop_ends(tenant, pool)
                await self._erase(pool, tenant, on_job)
                await self._forget_usage(pool, tenant)
        return before

    async def _keys_of(self, tenant: str) -> list[str]:
        return [key_id for key_id, key in (await KeyStore(self._redis).all()).items() if key.tenant == tenant]

    async def _call(self, pool: str, tenant: str, num_jobs: int) -> Held:
        return Held(*map(int, await scripts.call(self._redis, "erase", pool, tenant, num_jobs)))

    async def _end_jobs(self, pool: str, tenant: str) -> None:
        open_key, ends_s = keys.open_of_tenant(pool, tenant), time.monotonic() + CANCEL_S
        while num_open := await self._redis.scard(open_key):
            if time.monotonic() > ends_s:
                message = (
                    f"{num_open} jobs of tenant {tenant} in pool {pool} have not ended after {CANCEL_S:.0f} s; stop "
                    "their submitters, see that the pool's nodes live, and repeat the command"
                )
                raise ConflictError(message, code="tenant_in_use", param="tenant")
            for job_id in await self._redis.srandmember(open_key, _CANCELED_AT_ONCE):
                # This deletes the job's record too, so its end has no line.
                await scripts.call(self._redis, "cancel", pool, job_id, tenant)
            await asyncio.sleep(_POLL_S if num_open <= _CANCELED_AT_ONCE else 0)

    async def _erase(self, pool: str, tenant: str, on_job: Callable[[int], None]) -> None:
        while True:
            held = await self._call(pool, tenant, _ERASED_AT_ONCE)
            on_job(min(held.num_ended, _ERASED_AT_ONCE))
            if held.num_ended < _ERASED_AT_ONCE:
                return

    async def _forget_usage(self, pool: str, tenant: str) -> None:
        for kind in ("usage", "hour_usage", "recent_use"):
            async for key in self._redis.scan_iter(f"{keys.prefix(pool)}:{kind}:*", count=1000):
                fields = [
                    field
                    async for field, _ in self._redis.hscan_iter(key, count=_FIELDS_AT_ONCE)
                    if field.decode().partition(":")[0] == tenant
                ]
                if fields:
                    await self._redis.hdel(key, *fields)
