"""The ways to a terminal state, the keys that each leaves, and their expiry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest
from fakes.queue.harness import CONFIG, POOL, P, Queue, new_job

from penstock.contract.output import Chunk, Outcome, TerminalState
from penstock.queue import keys
from penstock.queue.wire import decode_chunks

DEADLINE = Outcome("expired", "deadline_exceeded", "the deadline passed before the job was done")
NOT_STARTED = Outcome("expired", "not_started_in_time", "no node started the job within its ttl_s")
CANCELLED = Outcome("cancelled", "cancelled", "the job was cancelled")


async def outcome_of(queue: Queue, job_id: str) -> Outcome | None:
    return (await queue.producer.status(job_id, "default")).outcome


# Cancel


async def test_queued_job_is_cancelled_at_once(queue: Queue) -> None:
    node = await queue.node()
    job_id = await queue.submit(inbox="me", deadline_ms=60_000)
    inbox = await queue.listen(keys.inbox_channel(POOL, "me"))

    assert await queue.producer.cancel(job_id, "default") == "cancelled"

    assert await outcome_of(queue, job_id) == CANCELLED
    (message,) = await inbox.messages()
    assert decode_chunks(message) == [Chunk(job_id, 0, outcome=CANCELLED)]
    assert (await node.take()).jobs == ()
    result = await queue.producer.result(job_id, "default")
    assert result is not None
    assert (result.outcome, result.choices, result.usage, result.taken_ms) == (CANCELLED, (), None, 0)


async def test_running_job_is_flagged_and_its_node_told(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    bell = await queue.listen(keys.doorbell(POOL, node.name))

    assert await queue.producer.cancel(taken.job_id, "default") == "cancelling"

    assert await bell.messages() == [taken.job_id.encode()]
    assert await queue.producer.result(taken.job_id, "default") is None
    assert (await node.heartbeat([taken.job_id])).cancelled == (taken.job_id,)
    assert await node.finish(taken, 0, outcome=Outcome("cancelled", "cancelled")) == "OK"
    assert await queue.producer.cancel(taken.job_id, "default") == "cancelled"


@pytest.mark.parametrize("state", ["succeeded", "failed", "expired"])
async def test_ended_job_cannot_be_cancelled(queue: Queue, state: TerminalState) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    reason = () if state == "succeeded" else ("code", "why", "field")
    await node.finish(taken, 0, 1, outcome=Outcome(state, *reason))
    before = await queue.record(taken.job_id)
    assert await queue.producer.cancel(taken.job_id, "default") == state
    assert await queue.record(taken.job_id) == before
    assert await outcome_of(queue, taken.job_id) == Outcome(state, *reason)


async def test_job_that_ends_before_it_saw_the_flag_stays_done(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await queue.producer.cancel(taken.job_id, "default")
    assert await node.finish(taken, 0, 1) == "OK"
    assert await queue.state(taken.job_id) == "succeeded"


async def test_cancelled_given_back_job_leaves_its_queue(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.give_back(taken)
    assert await queue.producer.cancel(taken.job_id, "default") == "cancelled"
    assert await queue.keys("requeued:*") == await queue.keys("waiting:*") == set()
    assert (await queue.producer.pressure(POOL)).backlog_cost[:3] == (0, 0, 0)


# Deadlines: test_scripts_take and test_scripts_emit show take's and emit's part


async def test_sweep_ends_queued_jobs_whose_deadline_passed(queue: Queue) -> None:
    await queue.node()
    due, later = await queue.submit(deadline_ms=60_000), await queue.submit(deadline_ms=60_000)
    past = await queue.now_ms() - 1
    await queue.change(due, deadline=past)
    await queue.redis.zadd(f"{P}:deadlines", {due: past})

    assert await queue.sweep() == ["OK", 0, 0, 1]

    assert await outcome_of(queue, due) == DEADLINE
    assert await queue.ids("deadlines") == await queue.ids("waiting:1") == {later}


async def test_node_ends_an_expired_job_with_the_tokens_it_had(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, deadline_ms=60_000)
    await node.emit(taken, 0, 2)
    await queue.change(taken.job_id, deadline=await queue.now_ms())
    assert await node.emit(taken, 2, 1) == "EXPIRED"
    assert (await node.heartbeat([taken.job_id])).expired == (taken.job_id,)
    assert await node.finish(taken, 3, 0, outcome=DEADLINE) == "OK"
    assert [chunk.outcome for chunk in await queue.producer.log(taken.job_id, 0)] == [None] * 3 + [DEADLINE]


async def test_expired_job_of_a_dead_node_ends_with_it(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, deadline_ms=60_000)
    await queue.change(taken.job_id, deadline=await queue.now_ms())
    await queue.kill(node)
    assert await outcome_of(queue, taken.job_id) == DEADLINE


# TTLs


async def pass_ttl(queue: Queue, job_id: str) -> None:
    """Let the time pass at which a queued job's TTL ends."""
    past = await queue.now_ms() - 1
    await queue.change(job_id, deadline=past)
    await queue.redis.zadd(f"{P}:deadlines", {job_id: past}, xx=True)


@pytest.mark.parametrize("times", [{"ttl_ms": 60_000}, {"ttl_ms": 60_000, "deadline_ms": 90_000}])
@pytest.mark.parametrize("ended_by", ["sweep", "take"])
async def test_a_job_that_no_node_took_within_its_ttl_expires(
    queue: Queue, times: dict[str, Any], ended_by: str
) -> None:
    node = await queue.node()
    job_id, other = await queue.submit(**times), await queue.submit(**times)
    assert await queue.ids("deadlines") == {job_id, other}
    await pass_ttl(queue, job_id)
    if ended_by == "sweep":
        assert await queue.sweep() == ["OK", 0, 0, 1]
    assert [taken.job_id for taken in (await node.take()).jobs] == [other]
    assert await outcome_of(queue, job_id) == NOT_STARTED
    assert await queue.ids("deadlines") == await queue.ids("waiting:1") == set()


@pytest.mark.parametrize(
    ("times", "deadline_in_ms"), [({"ttl_ms": 60_000}, 0), ({"ttl_ms": 60_000, "deadline_ms": 90_000}, 90_000)]
)
async def test_a_ttl_ends_no_job_that_a_node_has_taken(
    queue: Queue, times: dict[str, Any], deadline_in_ms: int
) -> None:
    node, other = await queue.node(), await queue.node("n2")
    submitted_ms = await queue.now_ms()
    taken = await queue.running(node, **times)
    assert deadline_in_ms - 5000 <= taken.deadline_in_ms <= deadline_in_ms or not deadline_in_ms
    assert bool(taken.deadline_in_ms) == bool(deadline_in_ms)
    record = await queue.record(taken.job_id)
    assert "begun_deadline" not in record
    assert record["deadline"] == "" if not deadline_in_ms else int(record["deadline"]) >= submitted_ms + deadline_in_ms
    assert await node.emit(taken, 0, 1) == "OK"
    await node.give_back(taken)
    assert await queue.ids("deadlines") == ({taken.job_id} if deadline_in_ms else set())
    again = await other.take_one()
    assert (again.job_id, again.num_chunks) == (taken.job_id, 1)
    assert bool(again.deadline_in_ms) == bool(deadline_in_ms)


async def test_a_deadline_before_the_ttl_counts_alone(queue: Queue) -> None:
    await queue.node()
    job_id = await queue.submit(ttl_ms=60_000, deadline_ms=60_000)
    assert "begun_deadline" not in await queue.record(job_id)
    await pass_ttl(queue, job_id)
    assert await queue.sweep() == ["OK", 0, 0, 1]
    assert await outcome_of(queue, job_id) == DEADLINE


async def test_a_ttl_may_end_while_a_job_waits_for_its_time(queue: Queue) -> None:
    await queue.node()
    job_id = await queue.submit(not_before_ms=60_000, ttl_ms=70_000)
    await pass_ttl(queue, job_id)
    assert await queue.sweep() == ["OK", 0, 0, 1]
    assert await outcome_of(queue, job_id) == NOT_STARTED
    assert await queue.keys("delayed*") == await queue.keys("deadlines") == set()


async def test_a_damaged_deadline_of_a_job_with_a_ttl_ends_no_take(queue: Queue) -> None:
    node = await queue.node()
    job_id = await queue.submit(ttl_ms=60_000, deadline_ms=90_000)
    await queue.change(job_id, begun_deadline="x")
    taken = await node.take_one()
    assert (taken.job_id, taken.deadline_in_ms) == (job_id, 0)


# The terminal chunk


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("succeeded"),
        Outcome("failed", "context_length_exceeded", "prompt has 9 tokens", "prompt"),
        Outcome("failed", "c" * 31, "m" * 32, "p" * 255),
        Outcome("failed", "x", "ß" * 500, "p" * 256),
        Outcome("cancelled", "cancelled", 'line\nbreak \x00 and quote "'),
    ],
)
@pytest.mark.parametrize("num_chunks", [0, 127, 128, 256, 70_000])
async def test_terminal_chunk_is_what_msgpack_makes_of_the_same_map(
    queue: Queue, outcome: Outcome, num_chunks: int
) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    if num_chunks:
        await queue.redis.rpush(keys.log(taken.job_id), *[b"x"] * num_chunks)

    assert await node.finish(taken, num_chunks, outcome=outcome) == "OK"

    data = (await queue.log(taken.job_id))[-1]
    end = {"state": outcome.state, "code": outcome.code, "message": outcome.message, "param": outcome.param}
    assert data == msgpack.packb({"v": 1, "j": taken.job_id, "i": num_chunks, "e": end})
    assert decode_chunks(data) == [Chunk(taken.job_id, num_chunks, outcome=outcome)]


async def test_overlong_message_is_cut_not_refused(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    assert await node.finish(taken, 0, outcome=Outcome("failed", "boom", "m" * 100_000)) == "OK"
    outcome = await outcome_of(queue, taken.job_id)
    assert outcome is not None
    assert outcome.message == "m" * 1000


# What stays


async def end_by_finish(queue: Queue) -> str:
    node = await queue.node()
    taken = await queue.running(node, inbox="me", deadline_ms=60_000)
    await node.emit(taken, 0, 1)
    await node.finish(taken, 1, 1)
    return taken.job_id


async def end_in_the_queue(queue: Queue) -> str:
    await queue.node()
    job_id = await queue.submit(inbox="me", deadline_ms=60_000)
    await queue.producer.cancel(job_id, "default")
    return job_id


async def end_after_give_back(queue: Queue) -> str:
    node, other = await queue.node(), await queue.node("other")
    taken = await queue.running(node, inbox="me", deadline_ms=60_000)
    await node.give_back(taken)
    await other.finish(await other.take_one(), 0)
    return taken.job_id


async def end_by_sweep(queue: Queue) -> str:
    for number in range(3):
        node = await queue.node(f"n{number}")
        taken = await (queue.running(node, inbox="me", deadline_ms=60_000) if number == 0 else node.take_one())
        await queue.kill(node)
    return taken.job_id


DEAD_LIFE_MS = 7 * 24 * 3600 * 1000


@pytest.mark.parametrize("end", [end_by_finish, end_in_the_queue, end_after_give_back, end_by_sweep])
async def test_all_keys_of_an_ended_job_expire(queue: Queue, end: Callable[[Queue], Awaitable[str]]) -> None:
    job_id = await end(queue)

    limits = {f"job:{job_id}": CONFIG["result_ttl_ms"], f"log:{job_id}": CONFIG["log_ttl_ms"]}
    if end in (end_by_finish, end_after_give_back):
        limits[f"result:{job_id}"] = CONFIG["result_ttl_ms"]
    if end is end_in_the_queue:
        # It can be retried.
        limits[f"request:{job_id}"] = CONFIG["result_ttl_ms"]
    if end is end_by_sweep:
        # A dead letter can be looked at for a week.
        limits |= {f"job:{job_id}": DEAD_LIFE_MS, f"request:{job_id}": DEAD_LIFE_MS}
    of_the_pool = {
        "config",
        "record",
        "schema",
        "nodes",
        "revisions",
        "free",
        "pressure",
        "adapters",
        "backlog",
        "readers",
        "sweep",
        "dead_letters",
        "counts",
        "events",
        "node_events",
    }
    of_the_pool |= {"head_served", "virtual_clock", "debt", "stored", "expiry", "recent_use", "jobs"}
    of_the_pool |= {"usage", "hour_usage", "ended"}
    names = await queue.keys()
    assert {name for name in names if name.partition(":")[0] not in ("last_take", *of_the_pool)} == set(limits)
    for name, limit in limits.items():
        assert limit - 5000 < await queue.redis.pttl(f"{P}:{name}") <= limit
    for name in names:
        if name.startswith(("last_take:", "usage:", "recent_use:")):
            assert await queue.redis.pttl(f"{P}:{name}") > 0
    assert set(await queue.redis.hvals(f"{P}:backlog")) <= {b"0"}


async def test_keys_of_an_open_job_do_not_expire(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit(new_job())
    taken = await node.take_one()
    await node.emit(taken, 0, 1)
    for name in ("job", "log", "request"):
        assert await queue.redis.pttl(f"{P}:{name}:{taken.job_id}") == -1
    await node.give_back(taken)
    for name in ("job", "log", "request"):
        assert await queue.redis.pttl(f"{P}:{name}:{taken.job_id}") == -1
