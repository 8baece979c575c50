"""Reader of tenants' token usage and stored bytes, as the scripts have counted them."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError, RequestError
from penstock.contract.usage import (
    MAX_PAGE_ROWS,
    Periods,
    PeriodUsage,
    TenantHoldings,
    UsagePage,
    UsageQuery,
    periods_of,
)
from penstock.queue import keys
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.pools import pool_names
from penstock.queue.broker.schedules import schedules_of
from penstock.queue.record_fields import sums_of, unless_wrong_type, whole

_COUNTERS = ("jobs", "prompt", "completion", "cached")
_FIELD = re.compile(rb"([\w-]{1,64}):([\w-]*):(jobs|prompt|completion|cached)")
_FIELDS_AT_ONCE = 400
_ROWS_AT_ONCE = 500
"""Fields that one call reads, and rows that are made between two pauses, so that neither holds the event loop."""
_MAX_NUMBER_DIGITS = 9
MAX_SHOWN = 69
"""Characters of a name that an error message shows."""

Owner = tuple[str, str]
"""Tenant and account."""
Position = tuple[int, str, str, str]
"""Period, pool, tenant and account of a row. Rows are in this order."""


class UsageBroker:
    """Reader of usage. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)

    @retried
    async def page(self, query: UsageQuery, *, after: str | None = None, limit: int = MAX_PAGE_ROWS) -> UsagePage:
        """Return up to `limit` rows in the order of period, pool, tenant and account.

        `after` is the `next_after` of the page before. Raises RequestError that names the invalid part of the query.
        """
        if not 1 <= limit <= MAX_PAGE_ROWS:
            raise RequestError(f"limit: must be from 1 to {MAX_PAGE_ROWS}", param="limit")
        begin = None if after is None else _position_of(after)
        with translated():
            (now_s, _), pools = await asyncio.gather(self._redis.time(), pool_names(self._redis))
        periods = periods_of(query, now_s)
        if unknown := sorted((query.pools or frozenset()).difference(pools)):
            raise NotFoundError(f"no pool {unknown[0][:MAX_SHOWN]!r} exists", code="pool_not_found", param="pool")
        holdings = None if query.tenant is None else await self._holdings(query.tenant, pools)
        rows: list[PeriodUsage] = []
        last: Position | None = None
        for number, pool in _hashes(periods, pools, query, begin):
            counts = await self._counts(query, pool, number)
            owners = sorted(owner for owner in counts if begin is None or (number, pool, *owner) > begin)
            for at in range(0, len(owners), _ROWS_AT_ONCE):
                for owner in owners[at : at + _ROWS_AT_ONCE]:
                    if len(rows) == limit:
                        return UsagePage(rows, periods, ":".join(map(str, last or ())), holdings)
                    used = (counts[owner].get(counter, 0) for counter in _COUNTERS)
                    rows.append(PeriodUsage(periods.start_of(number), periods.by, pool, *owner, *used))
                    last = (number, pool, *owner)
                await asyncio.sleep(0)
        return UsagePage(rows, periods, None, holdings)

    async def per_owner(self, query: UsageQuery) -> dict[Owner, list[int]]:
        """Return the sums of jobs and of prompt, completion and cached tokens over the whole report, by owner."""
        return await per_owner(self.page, query)

    async def kept(self) -> dict[str, int]:
        """Return the bytes of Redis memory that each tenant occupies or has reserved, in all pools."""
        sums: dict[str, int] = defaultdict(int)
        with translated():
            pools = await pool_names(self._redis)
            names = [key(name) for name in pools for key in (keys.stored, keys.reserved)]
            no_sums = dict[bytes, bytes]()
            reads = (unless_wrong_type(no_sums, self._redis.hgetall, name) for name in names)
            for kept in await asyncio.gather(*reads):
                for tenant, num_bytes in sums_of(kept).items():
                    sums[tenant] += num_bytes
        return dict(sums)

    async def _holdings(self, tenant: str, pools: Sequence[str]) -> TenantHoldings:
        redis, of_files = self._redis, (keys.open_batches(), keys.rows_left())
        of_pools = [keys.concurrency_keys(pool, tenant) for pool in pools]
        with translated():
            schedules: int = await unless_wrong_type(0, redis.zcard, schedules_of(tenant))
            found = await asyncio.gather(*(unless_wrong_type(None, redis.hget, name, tenant) for name in of_files))
            counts: list[int] = await asyncio.gather(*(unless_wrong_type(0, redis.scard, name) for name in of_pools))
        batches, rows = map(whole, found)
        return TenantHoldings(schedules, batches, rows, max(counts, default=0))

    async def _counts(self, query: UsageQuery, pool: str, number: int) -> dict[Owner, dict[str, int]]:
        """Return the counters of each owner in one pool and period that matches the query."""
        name = keys.usage(pool, number) if query.by == "day" else keys.hour_usage(pool, number)
        if query.tenant is not None and query.account is not None:
            fields = [f"{query.tenant}:{query.account}:{counter}" for counter in _COUNTERS]
            with translated():
                values = await unless_wrong_type([None] * len(fields), self._redis.hmget, name, fields)
            counts = {counter: whole(value) for counter, value in zip(_COUNTERS, values, strict=True) if value}
            return {(query.tenant, query.account): counts} if counts else {}
        found: dict[Owner, dict[str, int]] = defaultdict(dict)
        cursor = 0
        while True:
            with translated():
                no_page = 0, dict[bytes, bytes]()
                cursor, page = await unless_wrong_type(no_page, self._redis.hscan, name, cursor, count=_FIELDS_AT_ONCE)
            for field, value in page.items():
                if (named := _FIELD.fullmatch(field)) is None:
                    continue  # It is not ours.
                tenant, account, counter = (part.decode() for part in named.groups())
                if query.tenant in (None, tenant) and query.account in (None, account):
                    found[tenant, account][counter] = whole(value)
            if not cursor:
                return found


async def per_owner(page: Callable[..., Awaitable[UsagePage]], query: UsageQuery) -> dict[Owner, list[int]]:
    """Return the sums of jobs and of prompt, completion and cached tokens over the whole report, by owner.

    `page` returns the pages of the report.
    """
    sums: dict[Owner, list[int]] = defaultdict(lambda: [0] * len(_COUNTERS))
    after = None
    while True:
        found = await page(query, after=after)
        for row in found.rows:
            counts = (row.jobs, row.prompt_tokens, row.completion_tokens, row.cached_tokens)
            owner = (row.tenant, row.account)
            sums[owner] = [a + b for a, b in zip(sums[owner], counts, strict=True)]
        if (after := found.next_after) is None:
            return dict(sums)


def merged(pages: Sequence[UsagePage], limit: int) -> UsagePage:
    """Return the page of the usage in several Redis, each of which gave a page with the same position and limit."""
    rows = sorted(row for page in pages for row in page.rows)
    # Each of them was read up to its last row, which is the last one of all if no row follows it.
    ends = [page.rows[-1] for page in pages if page.next_after is not None]
    shown = [row for row in rows if not ends or row <= min(ends)][:limit]
    periods, holdings = pages[0].periods, _merged_holdings([page.holdings for page in pages if page.holdings])
    if len(shown) == len(rows) and not ends:
        return UsagePage(shown, periods, None, holdings)
    last = shown[-1]
    next_after = f"{periods.number_of(last.start)}:{last.pool}:{last.tenant}:{last.account}"
    return UsagePage(shown, periods, next_after, holdings)


def _merged_holdings(found: Sequence[TenantHoldings]) -> TenantHoldings | None:
    """Return those of all servers. Schedules and batches are in one of them, and keys count in each pool."""
    return TenantHoldings(*(max(values) for values in zip(*map(astuple, found), strict=True))) if found else None


def _hashes(periods: Periods, pools: list[str], query: UsageQuery, begin: Position | None) -> Iterator[tuple[int, str]]:
    """Yield the periods and pools of a report, from the position after which it continues."""
    for number in range(periods.first, periods.last + 1):
        for pool in pools:
            if (query.pools is None or pool in query.pools) and (begin is None or (number, pool) >= begin[:2]):
                yield number, pool


def _position_of(after: str) -> Position:
    number, *names = after.split(":", 4)
    if len(names) != 3 or not (number.isdecimal() and len(number) <= _MAX_NUMBER_DIGITS):
        raise RequestError("after: must be the `next` of an earlier page", param="after")
    return int(number), names[0], names[1], names[2]
