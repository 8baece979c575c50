"""Following completions: many jobs over one connection, across gaps, and the results of jobs as they end."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence

from penstock.contract.errors import RequestError, ResultTimeoutError, UnavailableError, error_of
from penstock.contract.job import pool_of
from penstock.contract.output import TERMINAL_STATES, Result
from penstock.producer.client.job import AsyncJob, checked_timeout
from penstock.producer.client.servers import QueueServer, QueueServers
from penstock.queue.broker.completions import Completion as Completion
from penstock.queue.broker.completions import CompletionCursor as CompletionCursor
from penstock.queue.broker.completions import CompletionGap, FeedPage, FeedPosition, merged
from penstock.queue.broker.completions import FeedEvent as FeedEvent
from penstock.runtime.event_loop import CALLS_AT_ONCE

_LOG = logging.getLogger(__package__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 0.5
"""Between two reads of a reader: the first one after a completion, and the longest one while none comes."""
MAX_TAG_CHARS = 64
_MAX_KNOWN = 10_000
_EDGE_MS = 1000
_LISTED_JOBS = 500
_CHECK_EVERY_S = 10.0
_CHECKED_JOBS = 1000
_MAX_SHOWN = 100
PAGE_PATIENCE_S = 2.0
"""How long a page of pools in several servers waits for each of them."""


class _Known:
    """The newest completions that a reader has, which a gap or another Redis may bring again."""

    def __init__(self) -> None:
        # Keyed by id: job id.
        self._ids: OrderedDict[str, None] = OrderedDict()

    def is_new(self, job_id: str, *, keeps_all: bool = False) -> bool:
        """Note a completion, and return whether it is a new one. With `keeps_all`, no other one is forgotten for it."""
        if job_id in self._ids:
            return False
        self._ids[job_id] = None
        if not keeps_all and len(self._ids) > _MAX_KNOWN:
            self._ids.popitem(last=False)
        return True


class CompletionFeed:
    """Reader of a tenant's completions."""

    def __init__(self, servers: QueueServers, pools: Callable[[], Awaitable[Mapping[str, object]]]) -> None:
        """`pools` returns the served pools by name."""
        self._servers = servers
        self._pools = pools

    async def cursor(self, tenant: str, pool: str | None = None) -> CompletionCursor:
        """Return the cursor behind all completions that there are now.

        Raises UnavailableError if one of several servers is away: without its position, old completions would follow.
        """
        if pool is None and self._servers.is_split:
            self._servers.require_all()
        positions: dict[str, FeedPosition] = {}
        for server, names in self._servers.grouped(await self._names(pool)):
            positions |= (await server.completions.cursor(tenant, names, pool)).positions
        return CompletionCursor(tenant, pool, positions)

    async def pages(self, cursor: CompletionCursor, tag: str | None = None) -> AsyncGenerator[FeedPage, None]:
        """Yield pages behind the cursor without end. A page may be empty if only jobs of other tags have ended."""
        pause_s = FIRST_PAUSE_S
        while True:
            names = [*dict.fromkeys((*cursor.positions, *await self._names(cursor.pool)))]
            page = await self._page(cursor, names)
            cursor = page.cursor
            pause_s = FIRST_PAUSE_S if page.events else min(2 * pause_s, LONGEST_PAUSE_S)
            yield FeedPage(tuple(event for event in page.events if _has_tag(event.item, tag)), cursor, page.has_more)
            if not page.has_more:
                await asyncio.sleep(pause_s)

    async def _page(self, cursor: CompletionCursor, names: Sequence[str]) -> FeedPage:
        """Return what follows a cursor. The pools of a server that is away keep their positions, and follow later."""
        asked = self._servers.grouped(names)
        if len(asked) == 1:
            return await asked[0][0].completions.page(cursor, names)
        found = await asyncio.gather(*(_page_soon(server, cursor, some) for server, some in asked))
        pages = [page for page in found if page is not None]
        if not pages:
            raise UnavailableError("Redis is unreachable", code="redis_away")
        return merged(cursor, pages)

    async def _names(self, pool: str | None) -> Sequence[str]:
        return [*await self._pools()] if pool is None else [pool]

    async def completions(
        self, cursor: CompletionCursor, tag: str | None = None
    ) -> AsyncGenerator[tuple[CompletionCursor, Completion], None]:
        """Yield each completion behind the cursor once, with the cursor behind it. Gaps are filled from the job list.

        A completion from the list comes with the cursor before the gap: a reader which ends there fills it again.
        """
        known = _Known()
        async for page in self.pages(cursor, tag):
            for event in page.events:
                if isinstance(event.item, CompletionGap):
                    async for missed in self.missed(cursor.tenant, event.item):
                        is_edge = missed.finished_ms >= event.item.until_ms - _EDGE_MS
                        if _has_tag(missed, tag) and known.is_new(missed.job_id, keeps_all=is_edge):
                            yield cursor, missed
                elif known.is_new(event.item.job_id):
                    yield event.cursor, event.item
                cursor = event.cursor

    async def missed(self, tenant: str, gap: CompletionGap) -> AsyncGenerator[Completion, None]:
        """Yield the completions of a gap that the job list still has."""
        facts = {"pool": gap.pool, "tenant": tenant, "reason": gap.reason, "from_ms": gap.from_ms}
        _LOG.info("completions are read from the job list", extra=facts)
        before: str | None = None
        while True:
            lists = self._servers.of(gap.pool).completions
            found, before = await lists.kept(tenant, gap.pool, before, _LISTED_JOBS)
            for one in found:
                if gap.from_ms <= one.finished_ms <= gap.until_ms:
                    yield one
            if before is None:
                return

    async def ended(self, tenant: str, jobs: Mapping[str, AsyncJob]) -> AsyncGenerator[list[AsyncJob], None]:
        """Yield these jobs in lists, as they end.

        Jobs that Redis has lost are submitted again if this client submitted them. Raises NotFoundError for others.
        """
        left = dict(jobs)
        cursor = await self.cursor(tenant)
        if found := await self._checked(tenant, left, [*left]):
            yield found
        clock, in_turn = asyncio.get_running_loop().time, list[str]()
        next_check_s = clock() + _CHECK_EVERY_S
        async for page in self.pages(cursor):
            if not left:
                return
            items = [event.item for event in page.events]
            if any(isinstance(item, CompletionGap) for item in items):
                found = await self._checked(tenant, left, [*left])
            else:
                ids = (item.job_id for item in items if isinstance(item, Completion))
                found = [job for job_id in ids if (job := left.pop(job_id, None)) is not None]
            if clock() >= next_check_s:
                # Tasks and rows of batches are in no feed.
                in_turn = in_turn or [*left]
                part, in_turn = in_turn[:_CHECKED_JOBS], in_turn[_CHECKED_JOBS:]
                found += await self._checked(tenant, left, [job_id for job_id in part if job_id in left])
                next_check_s = clock() + _CHECK_EVERY_S
            if found:
                yield found

    async def _checked(self, tenant: str, left: dict[str, AsyncJob], job_ids: Sequence[str]) -> list[AsyncJob]:
        """Take the ended ones of these jobs from `left` and return them."""
        ended = list[AsyncJob]()
        for at in range(0, len(job_ids), _CHECKED_JOBS):
            part = job_ids[at : at + _CHECKED_JOBS]
            for server, pools in self._servers.grouped(dict.fromkeys(map(pool_of, part))):
                some = [job_id for job_id in part if pool_of(job_id) in pools]
                for job_id, state in zip(some, await server.completions.states(tenant, some), strict=True):
                    if state is None:
                        await left[job_id].renew()
                    elif state in TERMINAL_STATES:
                        ended.append(left.pop(job_id))
        return ended


async def _page_soon(server: QueueServer, cursor: CompletionCursor, names: Sequence[str]) -> FeedPage | None:
    """Return what follows a cursor in these pools, or None if their server does not answer soon."""
    if server.is_away:
        return None
    try:
        async with asyncio.timeout(PAGE_PATIENCE_S):
            return await server.completions.page(cursor, names)
    except (TimeoutError, UnavailableError):
        return None


def _has_tag(item: Completion | CompletionGap, tag: str | None) -> bool:
    return tag is None or isinstance(item, CompletionGap) or tag in item.tags


def checked_tag(tag: str | None) -> str | None:
    """Return a filter of completions. Raises RequestError for a text that no job has as a tag."""
    if tag is not None and not (0 < len(tag) <= MAX_TAG_CHARS and not any(map(str.isspace, tag))):
        raise RequestError(f"tag must have 1 to {MAX_TAG_CHARS} characters, and no spaces", param="tag")
    return tag


async def as_completed(
    feed: CompletionFeed, jobs: Iterable[AsyncJob], *, timeout_s: float | None, check: bool
) -> AsyncGenerator[Result, None]:
    """Yield the results of jobs of one tenant as they end; see `AsyncClient.as_completed`."""
    by_id = {job.id: job for job in jobs}
    tenants = {job.tenant for job in by_id.values()}
    if len(tenants) > 1:
        shown = ", ".join(sorted(tenants))[:_MAX_SHOWN]
        raise RequestError(f"jobs must belong to one tenant, and these belong to {shown}", param="jobs")
    limit_s, num_left = checked_timeout(timeout_s), len(by_id)
    end_s = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
    ended = feed.ended(tenants.pop(), by_id) if by_id else None
    try:
        while ended is not None and num_left:
            limit = asyncio.timeout_at(end_s)
            try:
                async with limit:
                    found = await anext(ended)
            except TimeoutError:
                if not limit.expired():
                    raise
                message = f"{num_left} of {len(by_id)} jobs have not ended after {timeout_s} s; they go on"
                raise ResultTimeoutError(message) from None
            for at in range(0, len(found), CALLS_AT_ONCE):
                part = found[at : at + CALLS_AT_ONCE]
                for result in await asyncio.gather(*(job.ended_result() for job in part)):
                    num_left -= 1
                    if check and result.outcome.state != "succeeded":
                        raise error_of(result.outcome)
                    yield result
    finally:
        if ended is not None:
            await ended.aclose()
