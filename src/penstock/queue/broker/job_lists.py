"""Lists of jobs, newest first and in pages, and dead letters: jobs that failed because several nodes died running them.

A job is listed until its record expires. Dead letters keep their requests for 7 days.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.contract.errors import NotFoundError, RequestError
from penstock.contract.job import is_job_id, pool_of
from penstock.contract.job_actions import JobFilter, id_time
from penstock.contract.job_counts import CountedJobs
from penstock.contract.priority import Priority, class_of_level, is_background
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.jobs import STATUS_FIELDS, JobStatus, pool_ms, readable, status_of
from penstock.queue.broker.pools import LoggedOnce, pool_names
from penstock.queue.broker.submitting import custom_mark
from penstock.queue.record_fields import executed, is_text, is_wrong_type, unless_wrong_type
from penstock.queue.wire import Request

_LOG = logging.getLogger(__package__)
MAX_PAGE_JOBS = 1000
_FOUND_AT_ONCE = 32
"""Jobs that one call of list.lua finds at most, so that it takes less than 5 ms also on a slow machine."""
_READ_AT_ONCE = 250
"""Records that are read together."""
MAX_EXAMINED = 2048
"""Records that one page looks at. With a rare kind of job a page may be short, or empty, although more jobs follow."""
MAX_TENANTS = 1000
"""Tenants of pools that one page merges, and of which what is left is counted."""
_LISTS_OF_CALL = 512
"""Lists that one call of list.lua merges."""
_NEWEST = "g"
"""Text behind every uuid."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs of one page. `next_after` is the cursor of the next page, None after the last page."""

    jobs: tuple[JobStatus, ...]
    next_after: str | None


@dataclass(slots=True)
class _Source:
    """Some tenants' lists in a pool: the ids that were found there, and where the next search begins."""

    pool: str
    tenants: list[str]
    place: str
    """The uuid up to which it was searched."""
    found: deque[str] = field(default_factory=deque)
    is_over: bool = False

    @property
    def needs_search(self) -> bool:
        """Whether none of its jobs is known, and there may be more."""
        return not self.found and not self.is_over


class JobLists:
    """Reader of the lists. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis, self._logged = cast(Any, redis), LoggedOnce(_LOG)

    @retried
    async def page(self, wanted: JobFilter, *, after: str | None = None, limit: int = 20) -> JobPage:
        """Return up to `limit` jobs that follow the cursor `after`: the `next_after` of a page, or a job's id.

        Raises RequestError for a wrong limit or cursor, and if that takes too many lists.
        """
        if not 1 <= limit <= MAX_PAGE_JOBS:
            raise RequestError(f"limit must be from 1 to {MAX_PAGE_JOBS}", param="limit")
        place = await self._place_of(wanted, after)
        job_ids, last = await self.find(wanted, place, limit)
        parts = [job_ids[at : at + _READ_AT_ONCE] for at in range(0, len(job_ids), _READ_AT_ONCE)]
        statuses = [status for part in parts for status in await self._statuses(part)]
        shown = tuple(status for status in statuses if status is not None)
        return JobPage(shown, None if last is None else wanted.cursor(last))

    async def find(
        self, wanted: JobFilter, place: str, limit: int, *, tenants: Sequence[str] | None = None
    ) -> tuple[list[str], str | None]:
        """Return up to `limit` ids of such jobs that are older than the uuid `place` ('' for all), newest first.

        With them comes the uuid from which to go on, None at the end. `tenants`: only jobs of these.
        """
        before = id_time(wanted.submitted_before)
        place = min(place or _NEWEST, before or _NEWEST)
        sources = [_Source(pool, some, place) for pool, some in await self._tenants(wanted, tenants)]
        job_ids: list[str] = []
        num_examined = 0
        while True:
            # Down to this place all sources were searched.
            bound = max((source.place for source in sources if not source.is_over), default="")
            for job_id in _newest_first(sources, bound):
                job_ids.append(job_id)
                if len(job_ids) == limit:
                    has_more = any(source.found or not source.is_over for source in sources)
                    return job_ids, _uuid(job_id) if has_more else None
            if not bound:
                return job_ids, None
            if num_examined >= MAX_EXAMINED:
                return job_ids, bound
            behind = [source for source in sources if source.needs_search]
            num_examined += sum(await asyncio.gather(*(self._search(source, wanted, limit) for source in behind)))

    async def owner(self, job_id: str) -> str:
        """Return the tenant that a job belongs to. Raises NotFoundError."""
        with translated():
            tenant = await self._redis.hget(keys.job(job_id), "tenant")
        if tenant is None:
            raise NotFoundError(f"no job {job_id[:100]}", code="job_not_found", param="job_id")
        return str(tenant.decode())

    async def tenants_of(self, pool: str) -> list[str]:
        """Return the tenants that have jobs in a pool, in order. Each stored job counts, so none is missing."""
        with translated():
            found = await unless_wrong_type(list[bytes](), self._redis.hkeys, keys.stored(pool))
        return sorted(tenant.decode() for tenant in found if is_text(tenant))

    async def num_left(self, wanted: JobFilter, pool: str, place: str, tenants: Sequence[str]) -> int:
        """Return how many jobs of a pool a search still has to look at: those that are older than the uuid `place`.

        It is searched tenant by tenant: of those behind the first one, it has looked at none. Jobs of such lists to
        which the filter does not apply count too.
        """
        before, since = id_time(wanted.submitted_before) or _NEWEST, id_time(wanted.submitted_after)
        tag = wanted.tag if wanted.custom_id is None else custom_mark(wanted.custom_id)
        places = [min(place or _NEWEST, before), *[before] * (len(tenants) - 1)]
        asked = [
            (keys.jobs_in(pool, tenant, state), f"({pool}.{bound}")
            for tenant, bound in zip(tenants, places, strict=True)
            for state in (() if wanted.custom_id is not None else wanted.lists)
        ]
        tagged = [
            (keys.tagged(pool, tenant, tag or ""), f"({pool}.{bound}")
            for tenant, bound in zip(tenants if tag else (), places, strict=False)
        ]
        stop = f"[{pool}.{since}" if since else "-"
        counts = await self._counts_between([*asked, *tagged], stop)
        of_lists, of_tags = sum(counts[: len(asked)]), sum(counts[len(asked) :])
        return of_lists if not tag else of_tags if wanted.custom_id is not None else min(of_lists, of_tags)

    async def _counts_between(self, asked: Sequence[tuple[str, str]], stop: str) -> list[int]:
        """Return how many ids each of these sets has from `stop` to its bound, by their ranks."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for key, bound in asked:
                    pipe.zrange(key, bound, stop, bylex=True, desc=True, offset=0, num=1)
                    pipe.zrange(key, stop, bound, bylex=True, offset=0, num=1)
                ends = await executed(pipe, default=[])
            async with self._redis.pipeline(transaction=False) as pipe:
                for (key, _), last, first in zip(asked, ends[::2], ends[1::2], strict=True):
                    for one in (last, first):
                        pipe.zrank(key, one[0] if one else "")
                ranks = await executed(pipe, default=None)
        pairs = zip(ranks[::2], ranks[1::2], strict=True)
        return [0 if None in (last, first) else last - first + 1 for last, first in pairs]

    @retried
    async def counted(self, pool: str, tenant: str, tag: str | None) -> CountedJobs:
        """Return what one call of a script counts of a tenant's jobs, or of a tag of it, in a pool."""
        now_ms, fields, *rows = await scripts.call(self._redis, "count", pool, tenant, tag or "")
        texts = [one.decode(errors="replace") for one in fields]
        found = tuple((state.decode(), level.decode(errors="replace"), int(num)) for state, level, num in rows)
        return CountedJobs(int(now_ms), dict(zip(texts[::2], texts[1::2], strict=True)), found)

    async def _place_of(self, wanted: JobFilter, after: str | None) -> str:
        """Return the uuid that a cursor stands for. Raises RequestError."""
        if after is None:
            return ""
        if not is_job_id(after):
            return wanted.place_of(after)
        if wanted.pool is not None and pool_of(after) != wanted.pool:
            raise RequestError(f"after: this job is of pool {pool_of(after)}, not {wanted.pool}", param="after")
        return _uuid(after)

    async def _tenants(self, wanted: JobFilter, tenants: Sequence[str] | None) -> list[tuple[str, list[str]]]:
        """Return pools with tenants, as many together as one call takes."""
        with translated():
            pools = [wanted.pool] if wanted.pool is not None else await pool_names(self._redis)
        if wanted.tenant is not None or tenants is not None:
            return [(pool, list(tenants or [cast(str, wanted.tenant)])) for pool in pools]
        of_pools = await asyncio.gather(*map(self.tenants_of, pools))
        if (count := sum(map(len, of_pools))) > MAX_TENANTS:
            message = f"tenant: {count} tenants of pools have jobs; name a tenant or a pool to list at most "
            raise RequestError(f"{message}{MAX_TENANTS}", param="tenant")
        size = _LISTS_OF_CALL // len(wanted.lists)
        parts = zip(pools, of_pools, strict=True)
        return [(pool, names[at : at + size]) for pool, names in parts for at in range(0, len(names), size)]

    async def _search(self, source: _Source, wanted: JobFilter, limit: int) -> int:
        """Search on in a source, and return how many records were looked at."""
        asked = {
            "tenants": source.tenants,
            "lists": wanted.lists,
            "only_due": "queued" in wanted.states and "scheduled" not in wanted.states,
            "tag": wanted.tag or "",
            "custom": "" if wanted.custom_id is None else custom_mark(wanted.custom_id),
            "metadata": dict(wanted.metadata),
            "after": "" if source.place == _NEWEST else source.place,
            "since": id_time(wanted.submitted_after),
            "count": min(limit, _FOUND_AT_ONCE),
            "states": list(wanted.states),
            "levels": wanted.levels,
        }
        found, place, is_over, num_examined = await scripts.call(
            self._redis, "list", source.pool, scripts.packed(asked)
        )
        source.found.extend(job_id.decode() for job_id in found)
        source.place, source.is_over = place.decode() or source.place, bool(is_over)
        return int(num_examined)

    async def _statuses(self, job_ids: Sequence[str]) -> list[JobStatus | None]:
        """Return the states of these jobs, None for a record that has expired."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.time()
                for job_id in job_ids:
                    pipe.hget(keys.config(pool_of(job_id)), "ahead_ms")
                    pipe.hmget(keys.job(job_id), STATUS_FIELDS)
                    pipe.llen(keys.log(job_id))
                    pipe.get(keys.metadata(job_id))
                time, *values = await pipe.execute(raise_on_error=False)
        return [self._status(job_id, time, *values[4 * at : 4 * at + 4]) for at, job_id in enumerate(job_ids)]

    def _status(self, job_id: str, time: tuple[int, int], *answers: Any) -> JobStatus | None:
        """Return a job's state, None without a record. A damaged record is logged, and hides this job alone."""
        try:
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            ahead_ms, values, num_chunks, metadata = answers
            if not values[0]:
                return None
            texts = ((value or b"").decode(errors="replace") for value in values)
            fields = readable(dict(zip(STATUS_FIELDS, texts, strict=True)))
            return status_of(job_id, fields, pool_ms(time, ahead_ms), num_chunks, metadata=metadata)
        except (ValueError, KeyError, ResponseError) as error:
            self._logged.warn("unreadable job record", keys.job(job_id), error)
            return None


def merged(pages: Sequence[JobPage], wanted: JobFilter, limit: int) -> JobPage:
    """Return the page of the jobs of several Redis, each of which gave a page with the same cursor and limit."""
    # All of them were searched down to this place.
    searched = max((wanted.place_of(page.next_after) for page in pages if page.next_after is not None), default="")
    jobs = sorted((job for page in pages for job in page.jobs), key=lambda job: _uuid(job.job_id), reverse=True)
    shown = [job for job in jobs if _uuid(job.job_id) >= searched]
    if len(shown) > limit:
        return JobPage(tuple(shown[:limit]), wanted.cursor(_uuid(shown[limit - 1].job_id)))
    return JobPage(tuple(shown), wanted.cursor(searched) if searched else None)


def _newest_first(sources: Sequence[_Source], bound: str) -> Iterator[str]:
    """Take the ids of all sources, newest first, down to the uuid `bound`, which only its own source may have."""
    while True:
        heads = [source for source in sources if source.found and _uuid(source.found[0]) >= bound]
        if not heads:
            return
        yield max(heads, key=lambda source: _uuid(source.found[0])).found.popleft()


def _uuid(job_id: str) -> str:
    """Return the UUID of a job's id. It begins with the time, so it orders the jobs of all pools."""
    return job_id.rpartition(".")[2]


# Dead letters.

_FIELDS = ("tenant", "level", "weight", "cost", "submitted", "finished", "chunks", "preemptions", "loss_nodes")

_PURGED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that was lost while it ran the job, and when a sweep detected that, in Redis ms."""

    node_id: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The record of a dead letter, without its request.

    `losses` lists the losses since the job last made progress. Times are Redis ms.
    """

    job_id: str
    tenant: str
    priority: Priority
    is_background: bool
    weight: float
    cost: int
    submitted_ms: int
    died_ms: int
    num_chunks: int
    preemptions: int
    losses: tuple[Loss, ...]


class DeadLetters:
    """The dead letters of all pools. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis, self._logged = cast(Any, redis), LoggedOnce(_LOG)

    @retried
    async def newest(self, pool: str, limit: int = 100) -> list[DeadLetter]:
        """Return a pool's dead letters, newest first."""
        with translated():
            job_ids = await self._redis.zrevrange(keys.dead_letters(pool), 0, limit - 1)
            found = await asyncio.gather(*(self._read(job_id.decode()) for job_id in job_ids))
        return [letter for letter in found if letter is not None]

    @retried
    async def get(self, job_id: str) -> DeadLetter:
        """Return one dead letter. Raises NotFoundError."""
        with translated():
            died_ms = await self._redis.zscore(keys.dead_letters(pool_of(job_id)), job_id)
            letter = await self._read(job_id) if died_ms is not None else None
        if letter is None:
            raise _no_letter(job_id)
        return letter

    @retried
    async def request(self, job_id: str) -> Request:
        """Return the job's request. Raises NotFoundError."""
        with translated():
            data = await self._redis.get(keys.request(job_id))
        if data is None:
            raise _no_letter(job_id)
        return wire.decode_request(data)

    @retried
    async def purge(self, job_ids: Sequence[str]) -> int:
        """Delete dead letters and their requests. Returns how many were dead letters."""
        return sum([await scripts.call(self._redis, "purge", pool_of(job_id), job_id) for job_id in job_ids])

    @retried
    async def purge_all(self, pool: str) -> int:
        """Delete all dead letters of a pool, also those whose jobs' records are gone. Returns how many there were."""
        num_purged = 0
        while True:
            with translated():
                job_ids = await self._redis.zrange(keys.dead_letters(pool), 0, _PURGED_AT_ONCE - 1)
            if not job_ids:
                return num_purged
            num_purged += await scripts.call(self._redis, "purge", pool, *job_ids)

    async def _read(self, job_id: str) -> DeadLetter | None:
        try:
            values = await self._redis.hmget(keys.job(job_id), _FIELDS)
            return None if values[0] is None else _letter(job_id, values)
        except (ValueError, ResponseError) as error:
            if isinstance(error, ResponseError) and not is_wrong_type(error):
                raise
            self._logged.warn("unreadable job record", keys.job(job_id), error)
            return None


def _letter(job_id: str, values: Sequence[bytes | None]) -> DeadLetter:
    """Parse the fields of a dead letter. Raises ValueError."""
    tenant, level, weight, cost, submitted, finished, chunks, preemptions, losses = (
        (value or b"").decode() for value in values
    )
    numbers = (int(submitted), int(finished), int(chunks), int(preemptions))
    # `node@ms node@ms`
    parts = (loss.partition("@") for loss in losses.split())
    lost = tuple(Loss(node_id, int(at_ms or 0)) for node_id, _, at_ms in parts)
    kind = (class_of_level(int(level)), is_background(int(level)))
    return DeadLetter(job_id, tenant, *kind, float(weight or 1), int(cost), *numbers, lost)


def _no_letter(job_id: str) -> NotFoundError:
    return NotFoundError(f"no dead letter {job_id[:100]}", code="job_not_found", param="job_id")
