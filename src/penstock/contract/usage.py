"""Usage of API keys: the days or hours of a report, its rows, and their shapes in JSON and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from typing import Any, Literal

from penstock.contract.errors import RequestError
from penstock.contract.schedule import MAX_SCHEDULES

Period = Literal["day", "hour"]
"""What a row of a report sums up: a day or an hour, in UTC."""
MAX_DAYS = 92
"""Days for which usage is kept; equals USAGE_DAYS of ending.lua."""
MAX_HOURS = 72
"""Hours for which usage by hour is kept; equals USAGE_HOURS of ending.lua."""
MAX_PAGE_ROWS = 10_000
_DAY_S, _HOUR_S = 86_400, 3_600
_PERIOD_S: dict[Period, int] = {"day": _DAY_S, "hour": _HOUR_S}
_NUM_KEPT: dict[Period, int] = {"day": MAX_DAYS, "hour": MAX_HOURS}
_NUM_BY_DEFAULT: dict[Period, int] = {"day": 31, "hour": 24}
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:T([0-9]{2}))?")
_EXAMPLES: dict[Period, str] = {"day": "a date such as 2026-11-22", "hour": "a date, or an hour such as 2026-11-22T05"}
_EPOCH = date(1970, 1, 1)

CSV_COLUMNS = (
    *("date", "hour", "pool", "model", "tenant", "key_id"),
    *("jobs", "prompt_tokens", "cached_tokens", "completion_tokens"),
)


@dataclass(frozen=True, slots=True, order=True)
class PeriodUsage:
    """Usage of one account in one pool in one day or hour. A job counts in the period in which it ends.

    `account` is an API key's id, or empty. `cached_tokens` is the part of `prompt_tokens` that the prefix cache
    supplied.
    """

    start: datetime
    by: Period
    pool: str
    tenant: str
    account: str
    jobs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def label(self) -> str:
        """The period's name: 2026-11-22, or 2026-11-22T05."""
        return _label(self.start, self.by)


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """What a report contains: the periods as a caller named them, and filters. None: no filter."""

    by: Period = "day"
    start: str | None = None
    end: str | None = None
    """First and last date (`2026-11-22`), or hour (`2026-11-22T05`) of a report by hour. Both are part of it."""
    days: int | None = None
    """Number of days up to the end, instead of a start."""
    pools: frozenset[str] | None = None
    tenant: str | None = None
    account: str | None = None


@dataclass(frozen=True, slots=True)
class Periods:
    """The days or hours from `first` to `last`, as numbers since 1970-01-01 UTC."""

    by: Period
    first: int
    last: int

    def start_of(self, number: int) -> datetime:
        """Return the time at which a period begins."""
        return datetime.fromtimestamp(number * _PERIOD_S[self.by], UTC)

    def number_of(self, start: datetime) -> int:
        """Return the number of the period that begins then."""
        return int(start.timestamp()) // _PERIOD_S[self.by]

    def label_of(self, number: int) -> str:
        """Return a period's name, as `start` and `end` of a query accept it."""
        return _label(self.start_of(number), self.by)


MAX_CONCURRENCY_KEYS = 10_000
"""Concurrency keys with open jobs that a tenant may have in a pool; equals MAX_KEYS of submit.lua."""


@dataclass(frozen=True, slots=True)
class TenantHoldings:
    """What a tenant has now of the things that have a limit."""

    schedules: int = 0
    open_batches: int = 0
    """Batches and flows that have not ended."""
    open_rows: int = 0
    """Rows of these that are not answered."""
    concurrency_keys: int = 0
    """Keys with open jobs, in the pool that has the most."""

    def with_limits(self, **others: int) -> dict[str, dict[str, int | None]]:
        """Return each number with its limit. `others`: limits that settings define; 0: none."""
        limits = {"schedules": MAX_SCHEDULES, "concurrency_keys": MAX_CONCURRENCY_KEYS, **others}
        return {name: {"used": used, "limit": limits.get(name) or None} for name, used in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class UsagePage:
    """A part of a report, and the `after` of its next part; None after the last part."""

    rows: list[PeriodUsage]
    periods: Periods
    next_after: str | None
    holdings: TenantHoldings | None = None
    """Of the tenant that the query names."""


def periods_of(query: UsageQuery, now_s: int) -> Periods:
    """Return the periods of a report. Raises RequestError for a time that is malformed, or older than kept usage."""
    by, now = query.by, now_s // _PERIOD_S[query.by]
    kept = Periods(by, now - _NUM_KEPT[by] + 1, now)
    if query.start is not None and query.days is not None:
        raise RequestError("days: cannot be combined with start", param="days")
    last = now if query.end is None else min(now, _period_of(query.end, "end", kept, is_end=True))
    if query.start is None:
        first = max(kept.first, last - _num_of(query) + 1)
    else:
        first = _period_of(query.start, "start", kept)
        if first > last:
            raise RequestError(f"start: must not be after end, nor after now ({kept.label_of(now)} UTC)", param="start")
    return Periods(by, first, last)


def _label(start: datetime, by: Period) -> str:
    return start.strftime("%Y-%m-%d" if by == "day" else "%Y-%m-%dT%H")


def _num_of(query: UsageQuery) -> int:
    num_per_day, num_kept = _DAY_S // _PERIOD_S[query.by], _NUM_KEPT[query.by]
    if query.days is None:
        return _NUM_BY_DEFAULT[query.by]
    if not 1 <= query.days <= num_kept // num_per_day:
        message = f"must be from 1 to {num_kept // num_per_day}; usage by {query.by} is kept for {num_kept} {query.by}s"
        raise RequestError(f"days: {message}", param="days")
    return query.days * num_per_day


def _period_of(text: str, name: str, kept: Periods, *, is_end: bool = False) -> int:
    """Parse a date or an hour, and check that its usage is kept. A date stands for its first or last hour."""
    by = kept.by
    match = _TIME.fullmatch(text)
    try:
        day = (date.fromisoformat(match[1] if match else "") - _EPOCH).days
        hour = int(match[2]) if match and match[2] else None
        if hour is not None and (by == "day" or hour > 23):
            raise ValueError
    except ValueError:
        raise RequestError(f"{name}: must be {_EXAMPLES[by]} (UTC)", param=name) from None
    number = day if by == "day" else day * 24 + (hour if hour is not None else 23 if is_end else 0)
    if number < kept.first:
        limit = f"usage by {by} is kept for {_NUM_KEPT[by]} {by}s"
        raise RequestError(f"{name}: {limit}; the oldest is {kept.label_of(kept.first)} (UTC)", param=name)
    return number


def usage_object(usage: PeriodUsage, model: str | None) -> dict[str, Any]:
    """Return a row as a JSON object. `model` is the one that the pool serves, if it is known."""
    return {
        "object": "usage",
        "date": usage.start.date().isoformat(),
        "hour": usage.start.hour if usage.by == "hour" else None,
        "pool": usage.pool,
        "model": model,
        "tenant": usage.tenant,
        "key_id": usage.account,
        "jobs": usage.jobs,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def csv_of(objects: Iterable[dict[str, Any]], *, with_head: bool = False) -> str:
    """Return rows from `usage_object` as lines of CSV, after a line of column names if `with_head`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    if with_head:
        writer.writeheader()
    writer.writerows(objects)
    return text.getvalue()
