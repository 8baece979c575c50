"""Runs of schedules start once, whatever several gateways and their clocks do. Clocks are given, Redis is real."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from fakes.fake_node import MODEL, FakeNode
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, NotFoundError, RequestError
from penstock.contract.schedule import MAX_SCHEDULES, Schedule, tag_of
from penstock.contract.tenant import Terms
from penstock.gateway.apis.schedules import runner as runner_module
from penstock.gateway.apis.schedules.runner import ScheduleRunner
from penstock.producer.client import AsyncClient
from penstock.producer.client.schedule_times import dues
from penstock.queue.broker.schedules import SCHEDULES
from penstock.queue.tenants.deletion import TenantBroker

HOUR_S, DAY_S = 3_600, 86_400
START_S = datetime(2026, 3, 20, tzinfo=UTC).timestamp()


@dataclass
class GivenClock:
    """A clock that a test moves."""

    at_s: float = START_S

    def __call__(self) -> float:
        return self.at_s


class World:
    """A client, a node that takes jobs when it is told, and one clock for all."""

    def __init__(self, client: AsyncClient, node: FakeNode, clock: GivenClock) -> None:
        self.client, self.node, self.clock = client, node, clock
        self.runner = ScheduleRunner(client, 10, clock)

    async def at(self, seconds: float) -> None:
        """Let the clock show so many seconds after the start, and let a gateway look until nothing is due."""
        self.clock.at_s = START_S + seconds
        for _ in range(20):
            if not await self.runner.look():
                return

    async def started(self, schedule: Schedule) -> list[tuple[float, str]]:
        """Return due time, in seconds since the start, and job of each run that started, oldest first."""
        runs = await self.client.schedules.runs(schedule.id, tenant=schedule.tenant)
        return [(run.due_ms / 1000 - START_S, run.object_id) for run in reversed(runs) if run.state == "started"]

    async def states(self, schedule: Schedule) -> list[str]:
        runs = await self.client.schedules.runs(schedule.id, tenant=schedule.tenant)
        return [run.state for run in reversed(runs)]


@pytest.fixture
async def world(redis: Redis, redis_url: str) -> AsyncIterator[World]:
    await redis.flushall()  # the tests of a gateway share a Redis
    clock = GivenClock()
    async with FakeNode(redis_url, auto=False) as node, AsyncClient(redis_url) as client:
        client.schedules._clock = clock
        yield World(client, node, clock)


async def test_a_schedule_starts_its_job_at_its_times_as_the_caller_said(world: World) -> None:
    options: dict[str, Any] = {"max_tokens": 3, "seed": 7, "tags": ["night"], "metadata": {"a": "b"}, "tenant": "acme"}
    schedule = await world.client.schedules.create("hello", model=MODEL, cron="0 3 * * *", zone="UTC", **options)
    await world.at(3 * HOUR_S - 1)
    assert await world.started(schedule) == []
    await world.at(3 * HOUR_S + 0.5)
    ((due_s, job_id),) = await world.started(schedule)
    assert due_s == 3 * HOUR_S
    status = await world.client.status(job_id, tenant="acme")
    assert (status.tags, status.metadata, status.is_background) == (("night", tag_of(schedule.id)), {"a": "b"}, True)
    (job,) = await world.node.take()
    assert (job.request.prompt, job.request.params.max_tokens, job.request.params.seed) == ("hello", 3, 7)
    await world.at(3 * HOUR_S + 30)
    assert len(await world.started(schedule)) == 1
    shown = await world.client.schedules.get(schedule.id, tenant="acme")
    assert (shown.last_id, shown.num_started, shown.next_ms) == (job_id, 1, round(1000 * (START_S + 27 * HOUR_S)))
    with pytest.raises(NotFoundError):
        await world.client.schedules.get(schedule.id, tenant="rival")


@pytest.mark.parametrize(
    ("overlap", "states"),
    [("skip", ["started", "skipped", "started"]), ("wait", ["started", "started"]), ("cancel", ["started"] * 3)],
)
async def test_a_run_that_is_due_before_the_last_one_ended(world: World, overlap: Any, states: list[str]) -> None:
    schedule = await world.client.schedules.create("hello", every_s=HOUR_S, overlap=overlap)
    await world.at(HOUR_S)
    ((_, first),) = await world.started(schedule)
    await world.at(2 * HOUR_S)
    assert (await world.client.status(first)).state == ("cancelled" if overlap == "cancel" else "queued")
    waiting = await world.client.schedules.get(schedule.id)
    assert (waiting.problem != "", len(waiting.pending)) == ((True, 1) if overlap == "wait" else (False, 0))
    await world.client.cancel(first)
    await world.at(3 * HOUR_S - 10)
    await world.at(3 * HOUR_S)
    assert await world.states(schedule) == states


@pytest.mark.parametrize(("missed", "num_started"), [("skip", 0), ("one", 1), ("all", 5)])
async def test_runs_that_no_gateway_saw_start_as_the_rule_says(world: World, missed: Any, num_started: int) -> None:
    schedule = await world.client.schedules.create("hello", every_s=HOUR_S, missed=missed, overlap="cancel")
    await world.at(5 * HOUR_S + 600)
    assert len(await world.started(schedule)) == num_started
    shown = await world.client.schedules.get(schedule.id)
    assert shown.num_missed == 5 - num_started
    totals = await world.client.schedules.store.totals()
    assert (totals.counts["missed"], totals.counts["started"]) == (5 - num_started, num_started)


async def test_a_paused_schedule_starts_nothing_until_it_is_resumed_except_what_is_asked_for(world: World) -> None:
    schedule = await world.client.schedules.create("hello", every_s=HOUR_S, missed="all")
    await world.client.schedules.pause(schedule.id)
    await world.at(5 * HOUR_S)
    assert await world.started(schedule) == []
    assert world.client.schedules.next_runs(await world.client.schedules.get(schedule.id)) == ()
    await world.client.schedules.run_now(schedule.id)
    await world.at(5 * HOUR_S)
    assert [due_s for due_s, _ in await world.started(schedule)] == [5 * HOUR_S]
    await world.client.cancel((await world.started(schedule))[0][1])
    resumed = await world.client.schedules.resume(schedule.id)
    assert resumed.next_ms == round(1000 * (START_S + 6 * HOUR_S))
    await world.at(6 * HOUR_S)
    assert [due_s for due_s, _ in await world.started(schedule)] == [5 * HOUR_S, 6 * HOUR_S]


async def test_a_moment_starts_one_run_and_no_more(world: World) -> None:
    at = datetime.fromtimestamp(START_S + 90, UTC)
    schedule = await world.client.schedules.create("hello", at=at)
    for seconds in (89, 90, 200):
        await world.at(seconds)
    assert [due_s for due_s, _ in await world.started(schedule)] == [90]
    assert (await world.client.schedules.get(schedule.id)).next_ms == 0


async def test_a_run_that_cannot_start_is_shown_with_its_reason_and_the_next_one_is_tried(world: World) -> None:
    schedule = await world.client.schedules.create("hello", every_s=HOUR_S, key_id="0" * 16)
    await world.at(HOUR_S)
    await world.at(2 * HOUR_S)
    runs = await world.client.schedules.runs(schedule.id)
    assert [(run.state, run.reason.split(":")[0]) for run in runs] == [("failed", "key_revoked")] * 2
    assert (await world.client.schedules.get(schedule.id)).num_failed == 2


async def test_a_run_that_a_limit_refuses_waits(world: World) -> None:
    schedule = await world.client.schedules.create("hello", every_s=HOUR_S, terms=Terms(max_open_jobs=1))
    other = await world.client.submit("hello")
    await world.at(HOUR_S)
    assert await world.started(schedule) == []
    assert "open jobs" in (await world.client.schedules.get(schedule.id)).problem
    await other.cancel()
    await world.at(HOUR_S + 700)
    assert len(await world.started(schedule)) == 1


async def test_wrong_schedules_are_refused_by_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    create = world.client.schedules.create
    for given, param in (
        ({"model": "unknown"}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"idempotency_key": "k"}, "idempotency_key"),
        ({"not_before_s": 5}, "not_before_s"),
        ({"tags": ["a", "b", "c", "d"]}, "tags"),
        ({"missed": "never"}, "missed"),
        ({"name": "x" * 200}, "name"),
        ({"webhooks": ["we_0000000000000000"]}, "webhooks"),
    ):
        with pytest.raises(RequestError) as caught:
            await create("hello", every_s=60, **given)  # type: ignore[arg-type]
        assert caught.value.param == param
    assert await world.client.schedules.all() == []
    monkeypatch.setattr("penstock.queue.broker.schedules.MAX_SCHEDULES", 1)
    await create("hello", every_s=60)
    with pytest.raises(ConflictError, match="1 schedules"):
        await create("hello", every_s=60)
    assert MAX_SCHEDULES == 1_000


async def test_deletion_of_a_tenant_takes_its_schedules(world: World, redis: Redis) -> None:
    await world.client.schedules.create("hello", every_s=60, tenant="acme")
    kept = await world.client.schedules.create("hello", every_s=60, tenant="rival")
    assert (await TenantBroker(redis).delete("acme")).num_schedules == 1
    left = [key.decode() async for key in redis.scan_iter(f"{SCHEDULES.replace('{', '[{]')}*")]
    assert not any("acme" in key for key in left)
    assert [one.id for one in await world.client.schedules.all(tenant="rival")] == [kept.id]


async def test_a_damaged_schedule_holds_up_no_other(world: World, redis: Redis) -> None:
    damaged = await world.client.schedules.create("hello", every_s=60)
    whole = await world.client.schedules.create("hello", every_s=60)
    await redis.hset(f"{SCHEDULES}:schedule:{damaged.id}", "record", "{")  # type: ignore[misc]
    await redis.zadd(f"{SCHEDULES}:due", {"sched_unknown": 1})
    await world.at(60)
    assert len(await world.started(whole)) == 1
    assert [one.id for one in await world.client.schedules.all()] == [whole.id]


async def test_each_run_starts_once_beside_kills_and_wrong_clocks(
    world: World, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three gateways with clocks that step by an hour look at the same time, and are killed in the middle."""
    monkeypatch.setattr(runner_module, "WAIT_MS", 1)
    rng = random.Random(72)
    lines = ("0 */6 * * *", "30 2 * * *", "15 9 * * 1-5", "0 0 1 * *")
    given: list[dict[str, Any]] = [{"cron": line, "zone": "Europe/Berlin"} for line in lines]
    given += [{"every_s": 7 * HOUR_S}, {"at": START_S + 3 * DAY_S}]
    made = [
        await world.client.schedules.create("hello", missed="all", overlap="cancel", max_tokens=1, **one)
        for one in given
    ]
    clocks = [GivenClock() for _ in range(3)]
    runners = [ScheduleRunner(world.client, 10, clock, lease_ms=1_000) for clock in clocks]
    latest_s, true_s = START_S, START_S
    while true_s < START_S + 12 * DAY_S:
        true_s += rng.randrange(600, 10 * HOUR_S)
        for clock in clocks:
            clock.at_s = true_s + rng.choice((0, 0, HOUR_S, -HOUR_S))
        latest_s = max(latest_s, *(clock.at_s for clock in clocks))
        looks = [asyncio.create_task(one.look()) for one in runners]
        if rng.random() < 0.5:
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            rng.choice(looks).cancel()
        await asyncio.gather(*looks, return_exceptions=True)
    for clock in clocks:
        clock.at_s = latest_s + 60
    for _ in range(30):
        await runners[0].look()
        clocks[0].at_s += 2
    for schedule in made:
        runs = await world.client.schedules.runs(schedule.id)
        started = Counter(run.due_ms for run in runs if run.state == "started")
        last_ms = round(1000 * latest_s)
        expected = []
        for due_ms in dues(schedule.record.timing, round(1000 * START_S)):
            if due_ms > last_ms:
                break
            expected.append(due_ms)
        assert sorted(started) == expected
        assert set(started.values()) <= {1}
        page = await world.client.jobs(tag=tag_of(schedule.id), limit=100)
        assert len({job.job_id for job in page.jobs}) == len(page.jobs) == len(expected)
