"""The completions of tenants: their ended jobs in the order of their ends, and cursors into them.

`end_job` appends each completion to a stream, one for each tenant and pool. A cursor has a position in the stream of
each pool: the id of the last entry that was read, and the pool's incarnation. The presence of that entry proves that
Redis lost nothing before it. The incarnation changes when Redis lost all of a pool.
"""

from __future__ import annotations

import base64
import hashlib
import re
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import msgpack
from redis.asyncio import Redis

from penstock.contract.errors import RequestError
from penstock.contract.fields import NAME_PATTERN
from penstock.contract.job import MAX_TAGS, is_job_id, pool_of
from penstock.contract.output import TERMINAL_STATES
from penstock.queue import keys
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.record_fields import executed, whole
from penstock.queue.wire import pack

MAX_CURSOR_CHARS = 16_384
MAX_CURSOR_POOLS = 128
"""Pools that one cursor has a position of. A reader of more pools names one."""
PAGE_COMPLETIONS = 500
"""Completions of one pool that one read returns at most."""
_VERSION = 1
_CURSOR = re.compile("[A-Za-z0-9_-]+")
_NAME = re.compile(NAME_PATTERN)
_MAX_NUMBER = (1 << 63) - 1
_CLOCK_STEP_MS = 60_000
"""By how much the clock of a Redis that takes over may be behind that of the one that died."""


class EntryId(NamedTuple):
    """The id of an entry of a stream: its time in Redis ms, and its number among the entries of that time."""

    ms: int
    number: int

    @classmethod
    def of(cls, text: bytes) -> EntryId:
        """Parse `<ms>-<number>`."""
        ms, _, number = text.partition(b"-")
        return cls(int(ms), int(number))

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"


_NO_ENTRY = EntryId(0, 0)


@dataclass(frozen=True, slots=True)
class Completion:
    """A job that has ended: `succeeded`, `failed`, `cancelled`, `expired` or `dead`. `finished_ms` is Redis's time."""

    job_id: str
    state: str
    tags: tuple[str, ...]
    finished_ms: int

    @property
    def pool(self) -> str:
        """The pool of the job."""
        return pool_of(self.job_id)


@dataclass(frozen=True, slots=True)
class CompletionGap:
    """Completions of a pool that a reader cannot read any more; they ended from `from_ms` until `until_ms`.

    `trimmed`: the reader fell behind what is kept. `lost`: Redis lost writes, or all of the pool. Completions that the
    reader knows may follow again.
    """

    pool: str
    reason: Literal["trimmed", "lost"]
    from_ms: int
    until_ms: int


# Cursors ------------------------------------------------------------------------------------------


class FeedPosition(NamedTuple):
    """The last entry of a pool that was read, in this incarnation of the pool."""

    incarnation: int
    entry: EntryId = _NO_ENTRY


@dataclass(frozen=True, slots=True)
class CompletionCursor:
    """A place in a tenant's completions. A pool without a position is read from its first completion on."""

    tenant: str
    pool: str | None = None
    """The only pool that is read; None: all pools."""
    positions: Mapping[str, FeedPosition] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, tenant: str, pool: str | None = None) -> CompletionCursor:
        """Return the cursor that `text` states, for a reader of `pool`. Raises RequestError for any other text."""
        if not isinstance(text, str) or not 0 < len(text) <= MAX_CURSOR_CHARS or not _CURSOR.fullmatch(text):
            raise _bad_cursor()
        try:
            values = msgpack.unpackb(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), max_ext_len=0)
            version, owner, scope, rows = values
            positions = {
                _checked_name(name): FeedPosition(_checked(known), EntryId(_checked(ms), _checked(number)))
                for name, known, ms, number in rows
            }
            is_right = version == _VERSION and isinstance(scope, str) and len(positions) <= MAX_CURSOR_POOLS
        except (Base64Error, ValueError, TypeError, RecursionError, msgpack.UnpackException):
            raise _bad_cursor() from None
        if not is_right:
            raise _bad_cursor()
        if owner != _digest(tenant):
            raise RequestError("after: this cursor belongs to another tenant", param="after")
        if scope not in ("", pool):
            raise RequestError(
                f"after: this cursor belongs to pool {scope[:64]!r} alone; name it as pool", param="after"
            )
        return cls(tenant, pool, {name: one for name, one in positions.items() if pool in (None, name)})

    def __str__(self) -> str:
        rows = [[pool, one.incarnation, *one.entry] for pool, one in self.positions.items()]
        if len(rows) > MAX_CURSOR_POOLS:
            # Without a position, a pool without completions is read from its start, which is the same.
            rows = [row for row in rows if tuple(row[2:]) != _NO_ENTRY]
        if len(rows) > MAX_CURSOR_POOLS:
            message = (
                f"pool: the tenant has completions in {len(rows)} pools; name one, or use at most {MAX_CURSOR_POOLS}"
            )
            raise RequestError(message, param="pool")
        data = pack([_VERSION, _digest(self.tenant), self.pool or "", rows])
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    def moved(self, pool: str, position: FeedPosition) -> CompletionCursor:
        """Return this cursor with another position in one pool."""
        return replace(self, positions={**self.positions, pool: position})


def _digest(tenant: str) -> bytes:
    return hashlib.blake2b(tenant.encode(), digest_size=8).digest()


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("not a pool's name")
    return name


def _checked(number: object) -> int:
    if not isinstance(number, int) or not 0 <= number <= _MAX_NUMBER:
        raise ValueError("not a number of a cursor")
    return number


def _bad_cursor() -> RequestError:
    message = (
        f"after: not a cursor of completions, which has at most {MAX_CURSOR_CHARS} characters; omit it to begin now"
    )
    return RequestError(message, param="after")


# Reading ------------------------------------------------------------------------------------------


class FeedEvent(NamedTuple):
    """A completion or a gap, and the cursor behind it."""

    cursor: CompletionCursor
    item: Completion | CompletionGap


@dataclass(frozen=True, slots=True)
class FeedPage:
    """What follows a cursor: events in order, and the cursor of the next page. `has_more`: there is one now."""

    events: tuple[FeedEvent, ...]
    cursor: CompletionCursor
    has_more: bool


class _Entry(NamedTuple):
    """An entry of a stream. `after`: the last entry before it, of the first one of a stream, else None."""

    id: EntryId
    text: str
    after: EntryId | None


class CompletionBroker:
    """Reader of completions. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)

    @retried
    async def cursor(self, tenant: str, pools: Sequence[str], pool: str | None = None) -> CompletionCursor:
        """Return the cursor behind the last completion of each of these pools."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in pools:
                    pipe.xrevrange(keys.ended(name, tenant), "+", "-", 1)
                    pipe.hget(keys.ended_before(name), tenant)
                    pipe.hget(keys.config(name), "incarnation")
                found = await executed(pipe)
        positions = {}
        for at, name in enumerate(pools):
            newest, before, known = found[3 * at : 3 * at + 3]
            if incarnation := whole(known):
                last = newest[0][0] if newest else _known_id(before)
                positions[name] = FeedPosition(incarnation, _NO_ENTRY if last is None else EntryId.of(last))
        return CompletionCursor(tenant, pool, positions)

    @retried
    async def page(self, cursor: CompletionCursor, pools: Sequence[str], count: int = PAGE_COMPLETIONS) -> FeedPage:
        """Return what follows a cursor in these pools, by time, up to `count` completions of each pool."""
        starts = [cursor.positions.get(name) for name in pools]
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for name, start in zip(pools, starts, strict=True):
                    # In this order: what one of them shows as gone is in those behind it.
                    first = str(start.entry) if start else "-"
                    pipe.xrange(keys.ended(name, cursor.tenant), first, "+", count + 1)
                    pipe.hget(keys.ended_before(name), cursor.tenant)
                    pipe.hget(keys.config(name), "incarnation")
                found = await executed(pipe)
        rows, has_more = list[tuple[str, FeedPosition, Completion | CompletionGap]](), False
        for at, (name, start) in enumerate(zip(pools, starts, strict=True)):
            raw, before, known = found[3 * at], _known_id(found[3 * at + 1]), found[3 * at + 2]
            if not (incarnation := whole(known)):
                continue  # Redis knows no such pool, or lost it. Its next node tells which.
            entries = list(map(_entry, raw or ()))
            if start is None:
                start = FeedPosition(incarnation)
                cursor = cursor.moved(name, start)
            new = _behind(start, incarnation, entries, None if before is None else EntryId.of(before))
            if new is None:
                gap, position, new = await self._after_gap(name, cursor.tenant, start, incarnation, count)
                rows.append((name, position, gap))
            has_more |= len(new) >= count
            completions = ((one, _completion(name, one)) for one in new[:count])
            rows += [(name, FeedPosition(incarnation, one.id), item) for one, item in completions if item is not None]
        events = tuple(_events(cursor, rows))
        return FeedPage(events, events[-1].cursor if events else cursor, has_more)

    async def _after_gap(
        self, pool: str, tenant: str, start: FeedPosition, incarnation: int, count: int
    ) -> tuple[CompletionGap, FeedPosition, list[_Entry]]:
        """Return the gap behind a position that is gone, a position behind the gap, and what follows it.

        If no entry proves the position behind the gap, it is the old one: a reader that goes no further is told again.
        After a loss, the completions of the last minute before it follow again: another Redis has another clock.
        """
        key, is_same = keys.ended(pool, tenant), start.incarnation == incarnation
        since = f"{max(0, start.entry.ms - _CLOCK_STEP_MS)}-0"
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.xrange(key, "-", "+", count)
                pipe.xrevrange(key, since, "-", 1)
                pipe.xrange(key, f"({since}", "+", count)
                pipe.hget(keys.ended_before(pool), tenant)
                pipe.time()
                *found, before, time = await executed(pipe)
        entries, known, recent = ([_entry(raw) for raw in rows or ()] for rows in found)
        before = _known_id(before)
        last, now_ms = EntryId.of(before) if before else _NO_ENTRY, time[0] * 1000 + time[1] // 1000
        at_last = FeedPosition(incarnation, last)
        if is_same and not entries and start.entry < last:
            return CompletionGap(pool, "trimmed", start.entry.ms, last.ms), at_last, []
        if is_same and entries and start.entry < (entries[0].after or entries[0].id):
            return CompletionGap(pool, "trimmed", start.entry.ms, entries[0].id.ms), start, entries
        gap = CompletionGap(pool, "lost", start.entry.ms if is_same else 0, now_ms)
        if is_same and known:
            return gap, FeedPosition(incarnation, known[0].id), recent
        return gap, start if entries else at_last, entries

    @retried
    async def kept(self, tenant: str, pool: str, before: str | None, count: int) -> tuple[list[Completion], str | None]:
        """Return the ended jobs among `count` of a tenant's stored jobs, newest first, and where to continue.

        `before`: the id behind which to continue. The next one is None at the end of the list.
        """
        start = f"({before}" if before else "+"
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for state in sorted(TERMINAL_STATES):
                    key = keys.jobs_in(pool, tenant, state)
                    pipe.zrange(key, start, "-", desc=True, bylex=True, offset=0, num=count)
                pages = await executed(pipe, default=())
            found_ids = (job_id.decode(errors="replace") for page in pages for job_id in page)
            job_ids = sorted(filter(is_job_id, found_ids), reverse=True)[:count]
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hmget(keys.job(job_id), *_KEPT_FIELDS)
                records = await pipe.execute(raise_on_error=False)
        found = [_kept(job_id, record) for job_id, record in zip(job_ids, records, strict=True)]
        return [one for one in found if one is not None], job_ids[-1] if len(job_ids) == count else None

    @retried
    async def states(self, tenant: str, job_ids: Sequence[str]) -> list[str | None]:
        """Return the states of jobs; None for a job that is unknown or of another tenant."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hmget(keys.job(job_id), "state", "tenant")
                found = await executed(pipe, default=(None, None))
        own = tenant.encode()
        return [state.decode("latin-1") if state and owner == own else None for state, owner in found]


def merged(cursor: CompletionCursor, pages: Sequence[FeedPage]) -> FeedPage:
    """Return the page of several Redis, each of which gave a page with the same cursor and pools of its own."""
    rows, has_events = list[tuple[str, FeedPosition, Completion | CompletionGap]](), set[str]()
    for page in pages:
        for behind, item in page.events:
            rows.append((item.pool, behind.positions[item.pool], item))
            has_events.add(item.pool)
    for page in pages:
        for pool, position in page.cursor.positions.items():
            if pool not in cursor.positions and pool not in has_events:
                cursor = cursor.moved(pool, position)
    events = tuple(_events(cursor, rows))
    return FeedPage(events, events[-1].cursor if events else cursor, any(page.has_more for page in pages))


def _entry(raw: tuple[bytes, Mapping[bytes, bytes]]) -> _Entry:
    entry_id, fields = raw
    after = _known_id(fields.get(b"after"))
    text = fields.get(b"j", b"").decode(errors="replace")
    return _Entry(EntryId.of(entry_id), text, None if after is None else EntryId.of(after))


def _known_id(data: bytes | None) -> bytes | None:
    """Return the id of an entry, None for a damaged one."""
    return data if data is not None and re.fullmatch(rb"[0-9]{1,16}-[0-9]{1,16}", data) else None


def _behind(
    start: FeedPosition, incarnation: int, entries: Sequence[_Entry], before: EntryId | None
) -> Sequence[_Entry] | None:
    """Return the entries behind a position, or None if some between them are gone.

    `entries` are those from the position on. `before`: the last one of an earlier stream, which has expired.
    """
    if start.incarnation != incarnation:
        return None
    if not entries:
        return entries if start.entry == (before or _NO_ENTRY) else None
    if entries[0].id == start.entry:
        return entries[1:]
    return entries if entries[0].after == start.entry else None


def _completion(pool: str, entry: _Entry) -> Completion | None:
    """Return the completion of an entry, None for a damaged one."""
    uuid, _, rest = entry.text.partition(" ")
    state, *tags = rest.split(" ")
    if state not in TERMINAL_STATES or not uuid:
        return None
    return Completion(f"{pool}.{uuid}", state, tuple(tags), entry.id.ms)


_KEPT_FIELDS = ("state", "finished", "n", "in_feed", *(f"tag{number}" for number in range(1, MAX_TAGS + 1)))


def _kept(job_id: str, record: Any) -> Completion | None:
    """Return the completion of a job from its record; None for an open job, and one that is in no feed."""
    if isinstance(record, Exception):
        return None  # A damaged record hides this job alone.
    state, finished, num_sequences, in_feed, *tags = ((value or b"").decode(errors="replace") for value in record)
    if state not in TERMINAL_STATES or num_sequences == "0" or in_feed == "0":
        return None
    finished_ms = whole(finished)
    return Completion(job_id, state, tuple(filter(None, tags)), finished_ms) if finished_ms else None


def _events(
    cursor: CompletionCursor, rows: Sequence[tuple[str, FeedPosition, Completion | CompletionGap]]
) -> Iterator[FeedEvent]:
    """Yield the events of several pools: gaps first, then completions by time."""
    gaps = [row for row in rows if isinstance(row[2], CompletionGap)]
    others = [row for row in rows if not isinstance(row[2], CompletionGap)]
    for pool, position, item in (*gaps, *sorted(others, key=lambda row: row[1].entry)):
        cursor = cursor.moved(pool, position)
        yield FeedEvent(cursor, item)
