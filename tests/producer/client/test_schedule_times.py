"""When schedules are due: cron lines in time zones, intervals and moments, and what is decided about missed times."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.errors import RequestError
from penstock.contract.schedule import MissedRule, Schedule, ScheduledBatch, ScheduleRecord, Timing
from penstock.producer.client.schedule_times import MAX_PENDING, check_timing, decided, due_after, dues
from penstock.producer.client.schedules import timing_of

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
BERLIN = ZoneInfo("Europe/Berlin")
START_MS = round(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)


def cron(line: str, zone: str = "Europe/Berlin") -> Timing:
    return Timing(cron=line, zone=zone)


def local_times(timing: Timing, start: datetime, end: datetime) -> list[str]:
    found = []
    for due_ms in dues(timing, round(start.timestamp() * 1000) - 1):
        at = datetime.fromtimestamp(due_ms / 1000, ZoneInfo(timing.zone))
        if at >= end:
            return found
        found.append(at.strftime("%d %H:%M %Z"))
    return found


@pytest.mark.parametrize(
    ("line", "first", "expected"),
    [
        # 02:30 does not exist on 29 March 2026, and exists twice on 25 October.
        ("30 2 * * *", datetime(2026, 3, 28, tzinfo=BERLIN), ["28 02:30 CET", "29 03:00 CEST", "30 02:30 CEST"]),
        ("30 2 * * *", datetime(2026, 10, 24, tzinfo=BERLIN), ["24 02:30 CEST", "25 02:30 CEST", "26 02:30 CET"]),
    ],
)
def test_a_daily_run_starts_once_where_clocks_change(line: str, first: datetime, expected: list[str]) -> None:
    assert local_times(cron(line), first, first + timedelta(days=3)) == expected


def test_an_hourly_run_starts_once_each_real_hour_where_clocks_change() -> None:
    for day in (datetime(2026, 3, 29, tzinfo=BERLIN), datetime(2026, 10, 25, tzinfo=BERLIN)):
        start_ms = round(day.timestamp() * 1000) - 1
        found = list(islice(dues(cron("0 * * * *"), start_ms), 30))
        assert {later - earlier for earlier, later in pairwise(found)} == {HOUR_MS}


@settings(max_examples=40, deadline=None)
@given(
    minute=st.integers(0, 59),
    hours=st.sets(st.integers(0, 23), min_size=1, max_size=4),
    weekdays=st.sets(st.integers(0, 6), min_size=1, max_size=7),
    after_ms=st.integers(START_MS, START_MS + 365 * DAY_MS),
)
def test_a_cron_line_in_utc_is_due_exactly_at_the_minutes_that_it_names(
    minute: int, hours: set[int], weekdays: set[int], after_ms: int
) -> None:
    line = f"{minute} {','.join(map(str, sorted(hours)))} * * {','.join(map(str, sorted(weekdays)))}"
    found = list(islice(dues(cron(line, "UTC"), after_ms), 3))
    expected, at_ms = list[int](), (after_ms // MINUTE_MS + 1) * MINUTE_MS
    while len(expected) < 3:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
        if at.minute == minute and at.hour in hours and at.isoweekday() % 7 in weekdays:
            expected.append(at_ms)
        at_ms += MINUTE_MS
    assert found == expected


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * SUN"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 JAN *"),
        ("@annually", "0 0 1 JAN *"),
    ],
)
def test_the_names_of_cron_are_lines(name: str, line: str) -> None:
    zone = "Europe/Berlin"
    assert [*islice(dues(cron(name, zone), START_MS), 5)] == [*islice(dues(cron(line, zone), START_MS), 5)]


def test_intervals_count_from_their_start_without_drift() -> None:
    timing = Timing(every_s=0.7 * 3600, start_ms=START_MS)
    found = list(islice(dues(timing, START_MS), 100))
    assert found == [START_MS + number * 2_520_000 for number in range(1, 101)]
    assert due_after(timing, found[41]) == found[42]
    assert due_after(timing, found[41] - 1) == found[41]


def test_a_moment_is_due_once() -> None:
    timing = Timing(at_ms=START_MS)
    assert (due_after(timing, START_MS - 1), due_after(timing, START_MS)) == (START_MS, None)


@pytest.mark.parametrize(
    ("given_parts", "param"),
    [
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": "* * * *"}, "cron"),
        ({"cron": "* * * * * *"}, "cron"),
        ({"cron": "0 0 30 2 *"}, "cron"),
        ({"cron": "0 0 * * *", "zone": "Europe/Atlantis"}, "zone"),
        ({"cron": "0 0 * * *", "zone": "../../etc/passwd"}, "zone"),
        ({"cron": "0 0 * * *", "every_s": 5}, "every_s"),
        ({}, "cron"),
        ({"every_s": 0}, "every_s"),
        ({"every_s": float("nan")}, "every_s"),
        ({"every_s": timedelta(days=400)}, "every_s"),
        ({"at": datetime(2030, 1, 1)}, "at"),
        ({"at": START_MS / 1000 - 1}, "at"),
        ({"at": START_MS / 1000 + 400 * 86_400}, "at"),
    ],
)
def test_wrong_times_are_refused_by_name(given_parts: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_timing(timing_of(given_parts, START_MS), START_MS)  # type: ignore[arg-type]
    assert caught.value.param == param


def schedule(missed: MissedRule, *, next_ms: int, every_s: float = 60.0, pending: tuple[int, ...] = ()) -> Schedule:
    record = ScheduleRecord(
        id=f"sched_{'0' * 24}",
        tenant="acme",
        timing=Timing(every_s=every_s, start_ms=START_MS),
        missed=missed,
        action=ScheduledBatch(input_file_id="file-1", endpoint="/v1/completions"),
        created_ms=START_MS,
    )
    return Schedule(record, 1, next_ms=next_ms, pending=pending)


@pytest.mark.parametrize(("missed", "late"), [("skip", []), ("one", [9]), ("all", [*range(1, 10)])])
def test_missed_runs_start_as_the_rule_says(missed: MissedRule, late: list[int]) -> None:
    found = decided(schedule(missed, next_ms=START_MS + 60_000), START_MS + 600_001)
    # The tenth has just come. It is newer than all that were missed.
    expected = [*(late if missed == "all" else []), 10]
    assert list(found.schedule.pending) == [START_MS + number * 60_000 for number in expected]
    # Ten minutes later, with an interval of an hour, there is none in time.
    hourly = schedule(missed, next_ms=START_MS + HOUR_MS, every_s=3_600)
    found = decided(hourly, START_MS + 9 * HOUR_MS + 600_000)
    assert list(found.schedule.pending) == [START_MS + number * HOUR_MS for number in late]
    assert (found.num_missed, found.schedule.next_ms) == (9 - len(late), START_MS + 10 * HOUR_MS)


@settings(max_examples=60, deadline=None)
@given(
    missed=st.sampled_from(["skip", "one", "all"]),
    steps_s=st.lists(st.integers(-3_600, 90_000), min_size=1, max_size=12),
    every_s=st.integers(30, 5_000),
)
def test_each_time_that_has_come_is_decided_once_whatever_the_clock_does(
    missed: MissedRule, steps_s: list[int], every_s: int
) -> None:
    known = schedule(missed, next_ms=START_MS + 1000 * every_s, every_s=every_s)
    run, num_missed, now_ms, latest_ms = list[int](), 0, START_MS, START_MS
    for step_s in steps_s:
        now_ms += 1000 * step_s
        latest_ms = max(latest_ms, now_ms)
        while True:
            found = decided(known, now_ms)
            num_missed += found.num_missed
            run += found.schedule.pending
            known = replace(found.schedule, pending=())
            if found.is_whole and not 0 < known.next_ms <= now_ms:
                break
    num_due = (latest_ms - START_MS) // (1000 * every_s)
    assert len(run) + num_missed == num_due
    assert run == sorted(set(run))
    assert all((due_ms - START_MS) % (1000 * every_s) == 0 for due_ms in run)
    if missed == "all":
        assert len(run) == num_due


def test_no_more_runs_wait_than_a_schedule_may_have() -> None:
    full = schedule("all", next_ms=START_MS + 60_000, pending=tuple(range(1, MAX_PENDING + 1)))
    assert decided(full, START_MS + DAY_MS).schedule == full
    rest = decided(replace(full, pending=full.pending[:-1]), START_MS + DAY_MS)
    assert (len(rest.schedule.pending), rest.is_whole) == (MAX_PENDING, False)
