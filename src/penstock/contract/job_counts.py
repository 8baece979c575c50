"""How many jobs of a set are in which state, how fast they end, and when the last one probably will."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.contract.job_actions import BulkReport
from penstock.contract.output import TERMINAL_STATES
from penstock.contract.priority import NUM_LEVELS, class_of_level, is_background

RATE_MS = 60_000
"""A job that ended so long ago counts e times less in a rate than one that ends now, as in rare.lua."""
_LEAST_RATE_MS = 1_000
"""The shortest time over which a rate is known."""
OPEN = "open"
"""The state of the rows of a batch that have not ended, and of jobs that a bulk action has not looked at."""
_ENDED = TERMINAL_STATES | {"changed", "already_over"}
"""The states of which nothing more is to be done. The last two are of the jobs of a bulk action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCounts:
    """The jobs of a tenant, of a tag of it, of a bulk action, or the rows of a batch, at one moment.

    `states` counts them by state. `by_class` does so for each class, first of foreground and then of background work:
    (class, background) → state → jobs. Of a tenant without a tag it has only the jobs that have not ended. Jobs of a
    tag count as long as one of them is kept.
    """

    tenant: str
    tag: str | None = None
    batch_id: str | None = None
    bulk_id: str | None = None
    now_ms: int
    states: Mapping[str, int]
    by_class: Mapping[tuple[str, bool], Mapping[str, int]] = field(default_factory=dict)
    rate_per_s: float | None = None
    """Ends per second in the last minutes, of a tag or a batch, and of a bulk action since its begin; None if none is
    known."""
    is_partial: bool = False
    """Whether the tenant has more than 1,000 running or scheduled jobs, so that the tag's count as queued."""

    @property
    def total(self) -> int:
        """Number of all jobs."""
        return sum(self.states.values())

    @property
    def num_open(self) -> int:
        """Number of the jobs that have not ended."""
        return sum(count for state, count in self.states.items() if state not in _ENDED)

    @property
    def num_ended(self) -> int:
        """Number of the jobs that have ended."""
        return self.total - self.num_open

    @property
    def expected_end_ms(self) -> int | None:
        """When the last open job will have ended at the present rate, in Unix ms; None if that is not known."""
        if not self.num_open or not self.rate_per_s:
            return None
        return self.now_ms + math.ceil(1000 * self.num_open / self.rate_per_s)

    def as_object(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        named = {"tag": self.tag, "batch": self.batch_id, "bulk": self.bulk_id}
        return {
            "object": "job_counts",
            "tenant": self.tenant,
            **{name: value for name, value in named.items() if value is not None},
            "total": self.total,
            "open": self.num_open,
            "states": dict(self.states),
            "classes": [
                {"priority": priority, "background": in_background, "states": dict(states)}
                for (priority, in_background), states in self.by_class.items()
            ],
            "rate_per_s": None if self.rate_per_s is None else round(self.rate_per_s, 3),
            "expected_end_ms": self.expected_end_ms,
            "partial": self.is_partial,
            "now_ms": self.now_ms,
        }


class CountedJobs(NamedTuple):
    """What `count.lua` answers for a pool."""

    now_ms: int
    fields: Mapping[str, str]
    """Of a tag, its counts as rare.lua writes them."""
    rows: Sequence[tuple[str, str, int]]
    """(state, level, jobs). Level '' stands for jobs of which only the state is counted; -1 jobs for too many to look
    at."""


@dataclass(slots=True)
class CountsOfPools:
    """Sums of what `count.lua` answers for the pools of a set."""

    of_level: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(state, level) → jobs. Level '' stands for jobs of which only the state is counted."""
    rate_per_s: float | None = None
    is_partial: bool = False
    now_ms: int = 0

    def add(self, answer: CountedJobs, *, has_tag: bool) -> None:
        """Add the answer of one pool. A damaged number counts as 0."""
        now_ms, fields, rows = answer
        self.now_ms = max(self.now_ms, now_ms)
        self.is_partial |= any(num < 0 for *_, num in rows)
        known = Counter({(state, level): num for state, level, num in rows if num > 0})
        if has_tag:
            for level in map(str, range(NUM_LEVELS)):
                ended = {state: _whole(fields.get(f"{state}:{level}")) for state in sorted(TERMINAL_STATES)}
                under_way = known["running", level] + known["scheduled", level]
                known["queued", level] = max(0, _whole(fields.get(level)) - sum(ended.values()) - under_way)
                known.update({(state, level): count for state, count in ended.items()})
            if (rate := _rate_of(now_ms, fields)) is not None:
                self.rate_per_s = (self.rate_per_s or 0.0) + rate
        self.of_level.update(known)

    def counts(self, tenant: str, tag: str | None) -> JobCounts:
        """Return the sums."""
        states, by_class = Counter[str](), dict[tuple[str, bool], dict[str, int]]()
        for (state, _), num in sorted(self.of_level.items()):
            if num:
                states[state] += num
        for level in range(NUM_LEVELS):
            own = {state: num for (state, of), num in sorted(self.of_level.items()) if of == str(level) and num}
            if own:
                by_class[class_of_level(level).label, is_background(level)] = own
        return JobCounts(
            tenant=tenant,
            tag=tag,
            now_ms=self.now_ms,
            states=dict(states),
            by_class=by_class,
            rate_per_s=self.rate_per_s,
            is_partial=self.is_partial,
        )


def counts_of_batch(
    batch_id: str, tenant: str, rows: tuple[int, int, int], rate_per_s: float | None, *, now_ms: int
) -> JobCounts:
    """Return the rows of a batch by state. `rows`: all, those that succeeded, and those that failed."""
    total, num_succeeded, num_failed = rows
    states = {OPEN: total - num_succeeded - num_failed, "succeeded": num_succeeded, "failed": num_failed}
    shown = {state: count for state, count in states.items() if count > 0}
    return JobCounts(tenant=tenant, batch_id=batch_id, now_ms=now_ms, states=shown, rate_per_s=rate_per_s)


def counts_of_bulk(report: BulkReport) -> JobCounts:
    """Return the jobs of a bulk action by what has become of them."""
    states = {
        OPEN: report.num_left or 0,
        "asked_to_stop": report.num_asked_to_stop,
        "changed": report.num_changed,
        "already_over": report.num_already_over,
        "failed": report.num_failed,
    }
    shown = {state: count for state, count in states.items() if count > 0}
    now_ms, rate = report.now_ms, report.rate_per_s
    return JobCounts(tenant=report.tenant, bulk_id=report.bulk_id, now_ms=now_ms, states=shown, rate_per_s=rate)


def _rate_of(now_ms: int, fields: Mapping[str, str]) -> float | None:
    """Return the ends per second of a tag: those that its counts remember, over the time that they remember."""
    begun, at, recent = (_number(fields.get(name)) for name in ("begun", "at", "recent"))
    if begun is None or at is None or not recent or now_ms - begun < _LEAST_RATE_MS:
        return None
    remembered = recent * math.exp(min(0.0, at - now_ms) / RATE_MS)
    return 1000 * remembered / (RATE_MS * (1 - math.exp(-(now_ms - begun) / RATE_MS)))


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else 0


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
