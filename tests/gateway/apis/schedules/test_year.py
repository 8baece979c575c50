"""A thousand schedules over a simulated year: each due run starts once. Clocks are given, Redis is real."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fakes.cover import FULL
from fakes.fake_node import MODEL, FakeNode

from penstock.contract.schedule import Schedule, tag_of
from penstock.gateway.apis.schedules import runner as runner_module
from penstock.gateway.apis.schedules.runner import ScheduleRunner
from penstock.producer.client import AsyncClient
from penstock.producer.client.schedule_times import dues
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.gateway.apis.schedules.test_runner import DAY_S, HOUR_S, START_S, GivenClock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]
NUM_SCHEDULES, RUNS_A_YEAR = (1_000, 100) if FULL else (1_000, 10)
YEAR_S = 365 * DAY_S
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC")
SHOWN_RUNS = 100


def timing_of(number: int, rng: random.Random) -> dict[str, Any]:
    """Return when a schedule is due, about RUNS_A_YEAR times a year. Some times come twice or never in a zone."""
    step_days = 365 // RUNS_A_YEAR
    match number % 3:
        case 0:
            return {"every_s": step_days * DAY_S + rng.randrange(HOUR_S)}
        case 1:
            # At the hours at which clocks are changed, on every few days of the month.
            days = ",".join(map(str, range(1 + number % 3, 29, step_days)))
            return {"cron": f"{rng.randrange(60)} {rng.choice((1, 2, 3))} {days} * *", "zone": rng.choice(ZONES)}
        case _:
            weekdays = "*" if step_days < 7 else "0"
            return {"cron": f"{rng.randrange(60)} 2 */{min(28, step_days)} * {weekdays}", "zone": rng.choice(ZONES)}


def expected(schedule: Schedule, until_s: float) -> list[int]:
    """Return the due times until then, in ms."""
    found = list[int]()
    for due_ms in dues(schedule.record.timing, round(1000 * START_S)):
        if due_ms > 1000 * until_s:
            break
        found.append(due_ms)
    return found


async def test_each_due_run_of_a_year_starts_once_beside_kills_and_wrong_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three gateways look at the same time, with clocks that step by an hour, and are killed in the middle."""
    monkeypatch.setattr(runner_module, "WAIT_MS", 1)
    rng, begun_s = random.Random(72), time.monotonic()
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis(maxmemory_mib=4096))
        await stack.enter_async_context(FakeNode(server.url, auto=False))
        clients = [await stack.enter_async_context(AsyncClient(server.url)) for _ in range(3)]
        clocks = [GivenClock() for _ in clients]
        for client, clock in zip(clients, clocks, strict=True):
            client.schedules._clock = clock
        runners = [ScheduleRunner(client, 10, clock, 1_000) for client, clock in zip(clients, clocks, strict=True)]
        rules: dict[str, Any] = {"missed": "all", "overlap": "cancel", "model": MODEL, "max_tokens": 1}
        made = [
            await clients[0].schedules.create("hello", **timing_of(number, rng), **rules)
            for number in range(NUM_SCHEDULES)
        ]
        true_s = latest_s = START_S
        while true_s < START_S + YEAR_S:
            true_s += rng.randrange(HOUR_S, 60 * HOUR_S)
            for clock in clocks:
                clock.at_s = true_s + rng.choice((0, 0, HOUR_S, -HOUR_S))
            latest_s = max(latest_s, *(clock.at_s for clock in clocks))
            looks = [asyncio.create_task(one.look()) for one in runners]
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() / 50)
                rng.choice(looks).cancel()
            await asyncio.gather(*looks, return_exceptions=True)
        quiet = 0
        while quiet < 3:
            clocks[0].at_s = latest_s = latest_s + 2
            quiet = 0 if await runners[0].look() else quiet + 1
        num_due = 0
        for schedule in made:
            due = expected(schedule, latest_s)
            num_due += len(due)
            runs = await clients[0].schedules.runs(schedule.id)
            started = Counter(run.due_ms for run in runs)
            assert {run.state for run in runs} <= {"started"}, runs
            assert set(started.values()) <= {1}, "a run twice"
            assert sorted(started) == due[-SHOWN_RUNS:]
            assert (await clients[0].sets.counts(tag=tag_of(schedule.id))).total == len(due)
        totals = await clients[0].schedules.store.totals()
        assert totals.counts["started"] == num_due
        print(f"{num_due} due runs of {NUM_SCHEDULES} schedules in {time.monotonic() - begun_s:.0f} s")
        assert num_due >= 0.7 * NUM_SCHEDULES * RUNS_A_YEAR
