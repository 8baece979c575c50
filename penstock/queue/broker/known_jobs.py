"""What the queue knows of earlier submissions, by job id or idempotency key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from redis.asyncio import Redis

from penstock.contract.job import Job, JobKey
from penstock.queue import keys
from penstock.queue.broker.connection import translated


class KnownJobs:
    """Looks for jobs that were submitted before. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def has(self, job: Job) -> bool:
        """Return whether a job of this id or with this idempotency key was submitted before to its pool."""
        names = [keys.job(job.id)]
        if job.idempotency_key:
            names.append(keys.idempotency(job.pool, job.tenant, keys.key_hash(job.idempotency_key)))
        with translated():
            return bool(await self._redis.exists(*names))

    async def pool_of(self, key: JobKey, pools: Sequence[str]) -> str:
        """Return which of the pools has a job of this key; of several, the first one; of none, an empty text.

        The reads are pipelined.
        """
        names = [keys.idempotency(pool, key.tenant, keys.key_hash(key.key)) for pool in pools]
        with translated():
            found = await asyncio.gather(*(self._redis.exists(name) for name in names))
        return next((pool for pool, has_key in zip(pools, found, strict=True) if has_key), "")
