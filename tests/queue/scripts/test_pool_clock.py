"""Redis's clock jumps, as after a fail-over to another machine: the pool's clock goes on.

A jump is made by `ahead_ms` of P:config, since scripts see a pool's time as Redis's plus that. Tests in
tests/faults/test_clocks.py let a server start with another clock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from fakes.queue.harness import LEASE_MS, POOL, TENANT, FakeNode, P, Queue, id_minted_at, new_job

from penstock.contract.errors import BusyError, RequestError
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.queue.broker.scripts import PoolClocks

MINUTES_10 = 600_000
GAP_MS = LEASE_MS * 3 // 4
JUMPS = pytest.mark.parametrize("by_ms", [-3000, GAP_MS, -MINUTES_10, MINUTES_10])
SLACK_MS = 1000


async def clock_of(queue: Queue) -> tuple[int, int]:
    """Return the pool's time, and how far ahead of Redis's it is."""
    ahead_ms = int(await cast(Any, queue.redis.hget(keys.config(POOL), "ahead_ms")) or 0)
    return await queue.now_ms() + ahead_ms, ahead_ms


async def jump(queue: Queue, by_ms: int) -> None:
    """Let Redis's clock jump."""
    await cast(Any, queue.redis.hincrby(keys.config(POOL), "ahead_ms", by_ms))


async def watched(queue: Queue) -> FakeNode:
    """Return a node of a pool that a client has swept, and sweeps on."""
    node = await queue.node()
    await queue.producer.reader_heartbeat(POOL, "me")
    return node


async def sweep_again(queue: Queue, node: FakeNode) -> None:
    """Let two more sweeps pass, as time goes on."""
    for _ in range(2):
        await cast(Any, queue.redis.hincrby(keys.config(POOL), "swept_ms", -LEASE_MS // 4))
        await node.broker.sweep()


@JUMPS
async def test_no_node_is_lost_and_no_deadline_passes_when_redis_clock_jumps(queue: Queue, by_ms: int) -> None:
    node = await watched(queue)
    running = await queue.running(node, inbox="me", background=False, needs_reader=True, deadline_ms=120_000)
    waiting = await queue.submit(deadline_ms=120_000)
    later = await queue.submit(not_before_ms=120_000)
    await node.heartbeat([running.job_id])
    before_ms, _ = await clock_of(queue)

    await jump(queue, by_ms)
    assert len((await queue.producer.pressure(POOL)).nodes) == 1
    assert await node.emit(running, 0) == "OK"
    (taken,) = (await node.take()).jobs
    assert taken.job_id == waiting
    assert taken.deadline_in_ms >= LEASE_MS
    await queue.producer.reader_heartbeat(POOL, "me")
    await sweep_again(queue, node)

    now_ms, ahead_ms = await clock_of(queue)
    assert now_ms == pytest.approx(before_ms, abs=SLACK_MS)
    assert ahead_ms == pytest.approx(0, abs=SLACK_MS), "the jump was made by this field, and is taken back"
    assert {await queue.state(one) for one in (running.job_id, waiting)} == {"running"}
    assert (await queue.producer.status(later, TENANT)).state == "scheduled"
    assert await queue.ids("nodes") == {"n1"}
    assert await cast(Any, queue.redis.hget(f"{P}:counts", "clock_jumps")) == b"1"


@JUMPS
async def test_a_debt_of_a_tenant_stays_as_long_when_redis_clock_jumps(queue: Queue, by_ms: int) -> None:
    await watched(queue)
    terms = Terms(jobs_per_minute=6, burst_s=20)

    async def submit(producer: ProducerBroker) -> None:
        await producer.submit(Submission(new_job(), 1, terms=terms))

    for _ in range(2):
        await submit(queue.producer)
    await jump(queue, by_ms)
    with pytest.raises(BusyError) as caught:
        await submit(queue.producer)
    assert caught.value.retry_after_ms <= 20_000
    await queue.producer.reader_heartbeat(POOL, "me")
    with pytest.raises(BusyError) as caught:
        await submit(ProducerBroker(queue.redis))
    assert caught.value.retry_after_ms <= 20_000


async def test_a_job_submitted_before_the_first_sweep_has_the_time_that_its_client_knows(queue: Queue) -> None:
    await watched(queue)
    before_ms, _ = await clock_of(queue)
    await jump(queue, MINUTES_10)
    job_id = await queue.submit(deadline_ms=60_000)
    record = await queue.record(job_id)
    assert int(record["submitted"]) == pytest.approx(before_ms, abs=SLACK_MS)
    assert int(record["deadline"]) == pytest.approx(before_ms + 60_000, abs=SLACK_MS)


@pytest.mark.parametrize("by_ms", [-MINUTES_10, MINUTES_10])
async def test_without_a_process_that_watched_the_clock_never_goes_back(queue: Queue, by_ms: int) -> None:
    await watched(queue)
    before_ms, _ = await clock_of(queue)
    await jump(queue, by_ms)
    assert await queue.run_sweep() == ["SKIPPED"]
    await queue.wait_for_who_knows()
    assert await queue.run_sweep() == ["RESET"]
    now_ms, _ = await clock_of(queue)
    assert now_ms == pytest.approx(before_ms + max(0, by_ms), abs=SLACK_MS)
    assert await queue.run_sweep() == ["SKIPPED"]


@JUMPS
async def test_a_process_that_has_just_started_waits_for_one_that_knows_the_time(queue: Queue, by_ms: int) -> None:
    await watched(queue)
    before_ms, _ = await clock_of(queue)
    await jump(queue, by_ms)
    fresh = ProducerBroker(queue.redis)
    for _ in range(2):
        await fresh.reader_heartbeat(POOL, "fresh")
    await queue.producer.reader_heartbeat(POOL, "me")
    await fresh.reader_heartbeat(POOL, "fresh")
    assert (await clock_of(queue))[0] == pytest.approx(before_ms, abs=SLACK_MS)


@pytest.mark.parametrize("asked_ms_ago", [-MINUTES_10, 0, LEASE_MS // 4, LEASE_MS + 1000, MINUTES_10])
async def test_how_long_it_waits(queue: Queue, asked_ms_ago: int) -> None:
    await watched(queue)
    await jump(queue, MINUTES_10)
    await cast(Any, queue.redis.hset(keys.config(POOL), "asked_ms", str(await queue.now_ms() - asked_ms_ago)))
    assert await queue.run_sweep() == ["SKIPPED"]
    asked_ms = int(await cast(Any, queue.redis.hget(keys.config(POOL), "asked_ms")))
    is_kept = 0 <= asked_ms_ago < LEASE_MS
    assert asked_ms == pytest.approx(await queue.now_ms() - (asked_ms_ago if is_kept else 0), abs=SLACK_MS)


async def test_an_outage_is_no_jump(queue: Queue) -> None:
    await watched(queue)
    await queue.note_sweep(MINUTES_10)
    now_ms, _ = await clock_of(queue)
    assert await queue.run_sweep(seen_ms=now_ms) == ["RESET"]
    assert (await clock_of(queue))[1] == 0
    assert await cast(Any, queue.redis.hget(f"{P}:counts", "clock_jumps")) is None


@pytest.mark.parametrize(("ahead_ms", "then_ms"), [(50_000, 49_990), (-50_000, -49_990), (4, 0), (-4, 0)])
async def test_after_a_jump_the_clock_comes_back_slowly(queue: Queue, ahead_ms: int, then_ms: int) -> None:
    node = await watched(queue)
    await jump(queue, ahead_ms)
    await node.heartbeat([])
    now_ms, _ = await clock_of(queue)
    await cast(Any, queue.redis.hset(keys.config(POOL), "swept_ms", str(now_ms - 1000)))
    assert await queue.run_sweep() == ["OK", 0, 0, 0]
    assert (await clock_of(queue))[1] == pytest.approx(then_ms, abs=2)


@pytest.mark.parametrize(
    ("ahead_s", "minted_s", "is_right"),
    [(0, 600, False), (600, 600, True), (600, 0, True), (-600, 0, True), (-600, -600, True), (-600, 400, False)],
)
async def test_an_id_is_right_by_one_of_the_two_clocks(
    queue: Queue, ahead_s: int, minted_s: int, is_right: bool
) -> None:
    await watched(queue)
    await jump(queue, 1000 * ahead_s)
    await cast(Any, queue.redis.hincrby(keys.config(POOL), "swept_ms", 1000 * ahead_s))
    job = new_job(id_minted_at(time.time() + minted_s))
    if is_right:
        assert await queue.submit(job) == job.id
    else:
        with pytest.raises(RequestError, match="from the future"):
            await queue.submit(job)


async def test_what_a_process_knows_of_a_pools_time_goes_on_by_its_own_clock() -> None:
    clocks = PoolClocks()
    assert clocks.seen_ms("m") == 0
    assert clocks.alive_since_ms("m", 50_000, 15_000) == 35_000
    clocks.note("m", 1_000_000)
    await asyncio.sleep(0.02)
    assert 1_000_015 <= clocks.seen_ms("m") < 1_007_000
    assert clocks.alive_since_ms("m", 1_000_500, 15_000) == 985_500
    assert clocks.alive_since_ms("m", 400_000, 15_000) == pytest.approx(985_000, abs=7000)
