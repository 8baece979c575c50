"""The times at which a schedule is due, and what is decided about those that have come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import islice
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.contract.errors import RequestError
from penstock.contract.schedule import MissedRule, Schedule, Timing

MISSED_AFTER_MS = 60_000
"""A run that is found so long after its time was missed."""
MAX_DECIDED = 1_000
"""Times that one decision looks at. Further ones are left for the next."""
MAX_PENDING = 100
"""Runs of a schedule that are due and have not begun."""
_CRON_PARTS = 5
_LINES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
"""The names that cron knows for a line."""


# Keyed by id: time zone.
@lru_cache(maxsize=256)
def zone_of(name: str) -> ZoneInfo:
    """Return a time zone. Raises RequestError for a name that is none."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        message = f"zone: {name[:64]!r} is no time zone, such as Europe/Berlin or UTC"
        raise RequestError(message, param="zone") from None


def check_timing(timing: Timing, now_ms: int) -> None:
    """Raise RequestError for a cron line that is wrong or never due, a wrong zone, or a moment that has passed."""
    if timing.at_ms is not None and timing.at_ms < now_ms:
        raise RequestError("at: this moment has passed", param="at")
    if timing.cron is not None and due_after(timing, now_ms) is None:
        raise RequestError(f"cron: {timing.cron!r} is never due", param="cron")


def due_after(timing: Timing, after_ms: int) -> int | None:
    """Return the first time at which a schedule is due after `after_ms`, None without one. Raises RequestError."""
    return next(dues(timing, after_ms), None)


def dues(timing: Timing, after_ms: int) -> Iterator[int]:
    """Yield the times at which a schedule is due after `after_ms`, in order."""
    if timing.at_ms is not None:
        if timing.at_ms > after_ms:
            yield timing.at_ms
    elif timing.every_s is not None:
        every_ms = 1000 * timing.every_s
        number = max(1, math.floor((after_ms - timing.start_ms) / every_ms) + 1)
        while True:
            # Each from the start, so that no rounding adds up.
            if (due_ms := timing.start_ms + round(number * every_ms)) > after_ms:
                yield due_ms
            number += 1
    else:
        yield from _cron_dues(timing, after_ms)


def _cron_dues(timing: Timing, after_ms: int) -> Iterator[int]:
    """Yield the times of a cron line.

    In a time zone whose clocks go forward, a line with a fixed time in the hour that is left out is due right after it.
    When clocks go back, such a line is due once.
    """
    # Only processes that have schedules need it.
    from cronsim import CronSim, CronSimError

    line, zone = _LINES.get(timing.cron or "", timing.cron or ""), zone_of(timing.zone)
    if len(line.split()) != _CRON_PARTS:
        message = (
            f"cron: {line!r} must have {_CRON_PARTS} parts: minute, hour, day, month and day of the week, or be one of "
        )
        message += ", ".join(_LINES)
        raise RequestError(message, param="cron")
    try:
        times = CronSim(line, datetime.fromtimestamp(after_ms / 1000, zone))
    except CronSimError as error:
        raise RequestError(f"cron: {line!r}: {error}", param="cron") from None
    last_ms = after_ms
    for at in times:
        due_ms = round(at.timestamp() * 1000)
        # Of a skipped hour, several times of a line may come to the same moment.
        if due_ms > last_ms:
            yield due_ms
            last_ms = due_ms


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about the times of a schedule that have come."""

    schedule: Schedule
    """With its runs that are due, and its next time."""
    num_missed: int
    """Runs that will not start."""
    is_whole: bool
    """Whether no time that has come is left."""


def decided(schedule: Schedule, now_ms: int) -> Decision:
    """Decide about the times of a schedule that have come by `now_ms`."""
    if schedule.paused_ms or not schedule.next_ms or schedule.next_ms > now_ms:
        return Decision(schedule, 0, is_whole=True)
    record = schedule.record
    most = MAX_DECIDED if record.missed != "all" else max(0, MAX_PENDING - len(schedule.pending))
    if most == 0:
        return Decision(schedule, 0, is_whole=True)
    times = dues(record.timing, schedule.next_ms - 1)
    found, next_ms = list[int](), 0
    for due_ms in islice(times, most + 1):
        if due_ms > now_ms or len(found) == most:
            next_ms = due_ms
            break
        found.append(due_ms)
    is_whole = not 0 < next_ms <= now_ms
    runs = _runs_of(found, record.missed, now_ms, is_whole=is_whole)
    pending = (*schedule.pending, *runs)
    kept = pending[-MAX_PENDING:] if record.missed != "all" else pending
    num_missed = len(found) - len(runs) + len(pending) - len(kept)
    return Decision(replace(schedule, pending=kept, next_ms=next_ms), num_missed, is_whole)


def _runs_of(found: list[int], rule: MissedRule, now_ms: int, *, is_whole: bool) -> list[int]:
    """Return those of the times that have come at which a run starts."""
    if rule == "all":
        return found
    late = [due_ms for due_ms in found if due_ms < now_ms - MISSED_AFTER_MS]
    in_time = found[len(late) :]
    # Later times follow: one of them is the newest.
    one_late = late[-1:] if rule == "one" and is_whole and not in_time else []
    return [*one_late, *in_time]
