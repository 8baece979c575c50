"""join, heartbeats, leave and sweep: which nodes count as alive, by which clock, and a dead node's jobs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from fakes.queue.harness import CONFIG, LEASE_MS, POOL, RECORD, FakeNode, P, Queue

from penstock.contract.errors import ConfigError
from penstock.contract.output import Outcome
from penstock.contract.pool import NodePressure
from penstock.queue.broker.node import HeartbeatAnswer, LeaseLostError, NodeBroker

# The guard


async def test_sweep_without_a_pool_does_nothing(queue: Queue) -> None:
    assert await queue.sweep(since_last_ms=None) == ["SKIPPED"]
    assert await queue.redis.dbsize() == 0


@pytest.mark.parametrize("since_last_ms", [None, -5000, LEASE_MS // 2 + 200])
async def test_first_sweep_after_a_gap_restarts_all_leases(queue: Queue, since_last_ms: int | None) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="me")
    await queue.age("nodes", "n1", 10 * LEASE_MS)
    await queue.age("readers", "me", 3_600_000)

    assert await queue.sweep(since_last_ms=since_last_ms) == ["RESET"]

    now = await queue.now_ms() + max(0, -(since_last_ms or 0))
    assert await queue.state(taken.job_id) == "running"
    assert await queue.redis.zscore(f"{P}:nodes", "n1") == pytest.approx(now, abs=1000)
    assert await queue.redis.zscore(f"{P}:readers", "me") == pytest.approx(now, abs=1000)
    swept_ms = await cast(Any, queue.redis.hget(f"{P}:config", "swept_ms"))
    assert int(swept_ms) == pytest.approx(now, abs=1000)
    assert await queue.sweep() == ["OK", 0, 0, 0]


async def test_sweeps_that_follow_each_other_closely_are_skipped(queue: Queue) -> None:
    node = await queue.node()
    await queue.age("nodes", "n1", 10 * LEASE_MS)
    assert await queue.sweep(since_last_ms=LEASE_MS // 30) == ["SKIPPED"]
    assert await queue.ids("nodes") == {node.name}


async def test_a_lease_that_has_just_ended_is_not_left_to_a_later_sweep(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(node)
    await queue.age("nodes", "n1", LEASE_MS - 400)
    await queue.note_sweep(0)
    left_s = await other.broker.sweep()
    assert left_s is not None and 0 < left_s <= 0.4
    await asyncio.sleep(left_s)
    left_s = await other.broker.sweep()
    assert await queue.state(taken.job_id) == "queued"
    assert left_s == pytest.approx(LEASE_MS / 1000, abs=1)


async def test_reading_processes_sweep_too(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await queue.age("nodes", "n1", LEASE_MS + 1)
    await queue.note_sweep(LEASE_MS // 4)
    await queue.producer.reader_heartbeat(POOL, "me")
    assert await queue.state(taken.job_id) == "queued"


# Lost nodes


async def test_jobs_of_a_silent_node_are_queued_again(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    await node.heartbeat(free=500)
    one, two = await queue.submit_many(2, cost=30)
    await node.take()
    await queue.age("nodes", "n1", LEASE_MS + 1)

    assert await queue.sweep() == ["OK", 1, 2, 0]

    assert await queue.ids("nodes") == {"n2"}
    assert await queue.ids("free") == await queue.ids("running:n1") == set()
    pressure = await queue.producer.pressure(POOL)
    assert (pressure.nodes, pressure.backlog_cost[:3]) == ((), (0, 60, 0))
    taken = (await other.take()).jobs
    assert {job.job_id for job in taken} == {one, two}
    assert {job.losses for job in taken} == {1}


async def test_process_that_finds_a_dead_node_logs_it_once(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    node = await queue.node("n1")
    await queue.submit_many(2, cost=30)
    await node.take()
    await queue.age("nodes", "n1", LEASE_MS + 1)
    await queue.note_sweep(LEASE_MS // 4)

    await asyncio.gather(*(queue.producer.reader_heartbeat(POOL, name) for name in ("me", "you")))

    (said,) = (vars(record) for record in caplog.records if record.message == "nodes are lost")
    assert (said["pool"], said["node_ids"], said["num_requeued"], said["num_ended"]) == (POOL, ["n1"], 2, 0)


async def test_process_that_ends_a_job_which_no_node_has_writes_its_line(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await queue.node("n1")
    job_id = await queue.submit(deadline_ms=1)
    await asyncio.sleep(0.01)
    await queue.note_sweep(LEASE_MS // 4)

    await asyncio.gather(*(queue.producer.reader_heartbeat(POOL, name) for name in ("me", "you")))

    (line,) = (vars(record) for record in caplog.records if record.message == "job.ended")
    assert (line["job_id"], line["finish_reason"], line["code"]) == (job_id, "expired", "deadline_exceeded")


async def test_node_with_a_heartbeat_within_its_lease_keeps_its_jobs(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await queue.age("nodes", "n1", LEASE_MS - 500)
    assert await queue.sweep() == ["OK", 0, 0, 0]
    assert await queue.state(taken.job_id) == "running"


async def test_node_with_many_jobs_is_emptied_over_several_sweeps(queue: Queue) -> None:
    node = await queue.node()
    for _ in range(150):
        await queue.submit(cost=1)
    await node.take()
    await node.take()
    await queue.age("nodes", "n1", LEASE_MS + 1)
    assert await queue.sweep() == ["OK", 0, 128, 0]
    assert await queue.ids("nodes") == {"n1"}
    assert await queue.sweep() == ["OK", 1, 22, 0]
    assert await queue.ids("nodes") == set()


async def lose(queue: Queue, name: str, *, chunks: int = 0, earlier: FakeNode | None = None) -> FakeNode:
    """Have a node with this name take the only job, log some chunks and die."""
    node = earlier or FakeNode(queue.redis, name, "r1")
    await node.join()
    taken = await node.take_one()
    if chunks:
        await node.emit(taken, taken.num_chunks, chunks)
    await queue.kill(node)
    return node


async def test_third_loss_without_progress_ends_the_job(queue: Queue) -> None:
    await queue.node("watcher")
    job_id = await queue.submit()
    for number in range(2):
        await lose(queue, f"n{number}", chunks=10)
        status = await queue.producer.status(job_id, "default")
        assert (status.state, status.losses) == ("queued", number + 1)

    await lose(queue, "n2", chunks=10)

    status = await queue.producer.status(job_id, "default")
    assert (status.state, status.losses, status.num_chunks) == ("dead", 3, 31)
    assert status.outcome is not None
    assert status.outcome.code == "node_lost"
    assert await queue.ids("open") == set()


async def test_progress_forgives_losses(queue: Queue) -> None:
    await queue.node("watcher")
    job_id = await queue.submit()
    await lose(queue, "n0", chunks=63)
    await lose(queue, "n1", chunks=63)
    assert (await queue.record(job_id))["losses"] == "2"
    await lose(queue, "n2", chunks=64)
    record = await queue.record(job_id)
    assert (record["state"], record["losses"], record["loss_mark"]) == ("queued", "0", "190")
    await lose(queue, "n3", chunks=63)
    assert (await queue.record(job_id))["losses"] == "1"


async def test_several_losses_by_one_node_count_once(queue: Queue) -> None:
    await queue.node("watcher")
    job_id = await queue.submit()
    node = await lose(queue, "same")
    for _ in range(3):
        await lose(queue, "same", earlier=node)
    assert (await queue.record(job_id))["losses"] == "1"
    await lose(queue, "sam")
    assert (await queue.record(job_id))["losses"] == "2"


async def test_cancelled_job_of_a_dead_node_ends_cancelled(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await queue.producer.cancel(taken.job_id, "default")
    await queue.age("nodes", "n1", LEASE_MS + 1)
    assert await queue.sweep() == ["OK", 1, 0, 1]
    assert await queue.state(taken.job_id) == "cancelled"


async def test_long_silent_readers_and_revisions_are_forgotten(queue: Queue) -> None:
    await queue.node("n1", "old")
    await queue.node("n2", "new")
    await queue.submit(inbox="gone")
    await queue.submit(inbox="here")
    await queue.age("readers", "gone", 601_000)
    await queue.age("revisions", "old", 601_000)
    await queue.sweep()
    assert await queue.ids("readers") == {"here"}
    assert await queue.ids("revisions") == {"new"}


async def test_a_reader_is_remembered_for_as_long_as_it_may_be_silent(queue: Queue) -> None:
    await queue.node("n1", abandon_after_ms=1_000_000)
    await queue.submit(inbox="slow")
    await queue.age("readers", "slow", 999_000)
    await queue.sweep()
    assert await queue.ids("readers") == {"slow"}
    await queue.age("readers", "slow", 2_000)
    await queue.sweep()
    assert await queue.ids("readers") == set()


# Heartbeats


async def test_heartbeat_stores_the_pressure_record(queue: Queue) -> None:
    node = await queue.node()
    pressure = NodePressure("n1", kv_blocks_total=100, kv_blocks_free=40, num_running=3, draining=True, revision="r1")
    assert await node.broker.heartbeat(pressure, free=640, answered_call=0, held=None) == HeartbeatAnswer()
    assert (await queue.producer.pressure(POOL)).nodes == (pressure,)
    assert await queue.redis.zscore(f"{P}:free", "n1") == 640


async def test_swept_node_learns_of_it_and_may_join_again(queue: Queue) -> None:
    node = await queue.node()
    await queue.kill(node)
    with pytest.raises(LeaseLostError):
        await node.heartbeat()
    assert (await queue.producer.pressure(POOL)).nodes == ()
    await node.join()
    await node.heartbeat()


async def test_job_whose_take_was_answered_but_is_not_held_goes_back_without_a_loss(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    await queue.submit_many(2)
    lost, held = (await node.take()).jobs

    assert await node.heartbeat([held.job_id]) == HeartbeatAnswer()

    status = await queue.producer.status(lost.job_id, "default")
    assert (status.state, status.losses, status.preemptions) == ("queued", 0, 0)
    assert await queue.ids("running:n1") == {held.job_id}
    assert await node.emit(lost, 0, 1) == "FENCED"
    assert (await other.take_one()).job_id == lost.job_id


async def test_job_whose_take_was_not_answered_yet_stays(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.heartbeat([], answered=node.call - 1)
    assert await queue.state(taken.job_id) == "running"
    await node.heartbeat(None)
    assert await queue.state(taken.job_id) == "running"


async def test_held_jobs_that_belong_to_others_are_named(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.finish(taken, 0)
    assert await node.heartbeat([taken.job_id, "m.never"]) == HeartbeatAnswer(fenced=(taken.job_id, "m.never"))


# Join and leave


async def test_node_with_another_configuration_is_refused_while_a_node_is_alive(queue: Queue) -> None:
    await queue.node("n1")
    with pytest.raises(ConfigError, match="max_losses=3, this node with 5") as caught:
        await queue.node("n2", max_losses=5)
    assert caught.value.param == "max_losses"
    assert await queue.ids("nodes") == {"n1"}


@pytest.mark.parametrize("how", ["left", "died"])
async def test_configuration_may_change_once_no_node_is_alive(queue: Queue, how: str) -> None:
    node = await queue.node("n1")
    await queue.running(node)
    if how == "left":
        await queue.kill(node)
    else:
        await queue.age("nodes", "n1", LEASE_MS + 1)
    await queue.node("n2", max_losses=5)
    assert await queue.redis.hget(f"{P}:config", "max_losses") == b"5"


async def test_joining_announces_the_pool(queue: Queue) -> None:
    assert await queue.producer.pools() == {}
    await queue.node()
    other = NodeBroker(queue.redis, "x", "n9", "r1")
    await other.join(CONFIG, replace(RECORD, pool="x"))
    assert set(await queue.producer.pools()) == {POOL, "x"}


async def test_leaving_node_is_neither_rung_nor_counted(queue: Queue) -> None:
    node = await queue.node()
    await node.heartbeat()
    await node.take()
    assert await node.broker.leave() == 0
    assert await queue.keys("nodes") == await queue.keys("free") == await queue.keys("last_take:*") == set()
    assert (await queue.producer.pressure(POOL)).nodes == ()
    with pytest.raises(LeaseLostError):
        await node.heartbeat()


async def test_what_a_leaving_node_still_holds_is_left_to_sweep(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    assert await node.broker.leave() == 1
    assert await node.finish(taken, 0, outcome=Outcome("succeeded")) == "OK"
    other = FakeNode(queue.redis, "n2", "r1")
    await other.join()
    second = await queue.running(other)
    await other.broker.leave()
    await queue.kill(other)
    assert await queue.state(second.job_id) == "queued"
