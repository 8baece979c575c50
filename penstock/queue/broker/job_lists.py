"""Lists of tenants' jobs, newest first and in pages. A job is listed until its record expires."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.contract.errors import NotFoundError, RequestError
from penstock.queue import keys
from penstock.queue.broker.connection import translated
from penstock.queue.broker.job_records import STATUS_FIELDS, JobStatus, status_of
from penstock.queue.broker.pool_names import LoggedOnce, pool_names

_LOG = logging.getLogger(__name__)
JobState = str
MAX_PAGE_JOBS = 100
MAX_EXAMINED = 1000
"""Records that one page reads. With a rare state a page may so be short, or empty, although more jobs follow."""
MAX_LISTS = 1000
"""Lists, one for each pool and tenant, that one page merges."""
_ROUND_IDS = 100


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs of one page. `next_after` is the cursor of the next page, None after the last page."""

    jobs: tuple[JobStatus, ...]
    next_after: str | None


class JobLists:
    """Reader of the lists. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis, self._logged = cast(Any, redis), LoggedOnce(_LOG)

    async def page(
        self,
        tenant: str | None,
        *,
        pool: str | None = None,
        state: JobState | None = None,
        after: str | None = None,
        limit: int = 20,
    ) -> JobPage:
        """Return up to `limit` jobs that follow the cursor `after`, a job's id.

        `tenant` None lists the jobs of all tenants. Raises RequestError for a wrong limit, and if that takes too many
        lists.
        """
        if not 1 <= limit <= MAX_PAGE_JOBS:
            raise RequestError(f"limit must be from 1 to {MAX_PAGE_JOBS}", param="limit")
        lists = await self._lists(tenant, pool)
        cursor, found, num_examined = _time_part(after or ""), list[JobStatus](), 0
        while num_examined < MAX_EXAMINED:
            job_ids = await self._newest(lists, cursor)
            statuses = await self._statuses(job_ids)
            for number, (job_id, status) in enumerate(zip(job_ids, statuses, strict=True), 1):
                cursor = _time_part(job_id)
                if status is not None and state in (None, status.state):
                    found.append(status)
                if len(found) == limit:
                    has_more = number < len(job_ids) or len(job_ids) == _ROUND_IDS
                    return JobPage(tuple(found), job_id if has_more else None)
            if len(job_ids) < _ROUND_IDS:
                return JobPage(tuple(found), None)
            num_examined += len(job_ids)
        return JobPage(tuple(found), job_ids[-1])

    async def owner(self, job_id: str) -> str:
        """Return the tenant that a job belongs to. Raises NotFoundError."""
        with translated():
            tenant = await self._redis.hget(keys.job(job_id), "tenant")
        if tenant is None:
            raise NotFoundError(f"no job {job_id[:100]}", code="job_not_found", param="job_id")
        return str(tenant.decode())

    async def _lists(self, tenant: str | None, pool: str | None) -> list[tuple[str, str]]:
        """Return the pools and tenants whose lists to merge."""
        with translated():
            pools = [pool] if pool is not None else await pool_names(self._redis)
            if tenant is not None:
                return [(name, tenant) for name in pools]
            # Each stored job counts there, so no tenant with a list is missing.
            tenants = await asyncio.gather(*(self._redis.hkeys(keys.stored(name)) for name in pools))
        lists = [(name, owner.decode()) for name, of_pool in zip(pools, tenants, strict=True) for owner in of_pool]
        if len(lists) > MAX_LISTS:
            message = f"tenant: {len(lists)} tenants of pools have jobs; name a tenant or a pool to list fewer than "
            raise RequestError(f"{message}{MAX_LISTS}", param="tenant")
        return lists

    async def _newest(self, lists: Iterable[tuple[str, str]], cursor: str) -> list[str]:
        """Return the newest _ROUND_IDS ids, over all lists, that are older than the cursor."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for pool, tenant in lists:
                    start = f"({pool}.{cursor}" if cursor else "+"
                    key = keys.jobs(pool, tenant)
                    pipe.zrange(key, start, "-", desc=True, bylex=True, offset=0, num=_ROUND_IDS)
                pages = await pipe.execute()
        job_ids = (job_id.decode() for page in pages for job_id in page)
        return nlargest(_ROUND_IDS, job_ids, key=_time_part)

    async def _statuses(self, job_ids: Sequence[str]) -> list[JobStatus | None]:
        """Return the states of these jobs, None for a record that has expired."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hmget(keys.job(job_id), STATUS_FIELDS)
                    pipe.llen(keys.log(job_id))
                values = await pipe.execute(raise_on_error=False)
        return [self._status(job_id, *values[2 * at : 2 * at + 2]) for at, job_id in enumerate(job_ids)]

    def _status(self, job_id: str, values: Any, num_chunks: Any) -> JobStatus | None:
        """Return a job's state, None without a record. A damaged record is logged, and hides this job alone."""
        try:
            for answer in (values, num_chunks):
                if isinstance(answer, Exception):
                    raise answer
            if not values[0]:
                return None
            fields = {name: (value or b"").decode() for name, value in zip(STATUS_FIELDS, values, strict=True)}
            return status_of(job_id, fields, num_chunks)
        except (ValueError, KeyError, ResponseError) as error:
            self._logged.warn("unreadable job record", keys.job(job_id), error)
            return None


def _time_part(job_id: str) -> str:
    """Return the UUID of a job's id. It begins with the time, so it orders the jobs of all pools."""
    return job_id.rpartition(".")[2]
