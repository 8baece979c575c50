"""A dead letter keeps its request and its ledger until an operator deletes it or a week has passed."""

from __future__ import annotations

import pytest
from fakes.queue.harness import LEASE_MS, P, Queue, new_job

from penstock.contract.errors import NotFoundError
from penstock.contract.job import JobDef, Priority, SamplingParams
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.job_lists import DeadLetters
from penstock.queue.wire import decode_request, encode_request

WEEK_MS = 7 * 24 * 3600 * 1000


async def die(queue: Queue, job: JobDef, first: int = 0) -> None:
    """Let three nodes die while they run a job, each after it has written a chunk."""
    await queue.node("watcher")
    await queue.submit(job, cost=30, weight=2.0)
    for number in range(first, first + 3):
        node = await queue.node(f"n{number}")
        taken = await node.take_one()
        await node.emit(taken, taken.num_chunks, 1)
        await queue.kill(node)


async def test_dead_letter_has_its_history_and_its_request(queue: Queue) -> None:
    job = new_job(priority=Priority.BATCH, tenant="acme", params=SamplingParams(max_tokens=9))
    started_ms = await queue.now_ms()
    await die(queue, job)

    letters = DeadLetters(queue.redis)
    (letter,) = await letters.newest("m")

    assert (letter.job_id, letter.tenant, letter.priority, letter.weight) == (job.id, "acme", Priority.BATCH, 2.0)
    assert (letter.cost, letter.num_chunks, letter.preemptions) == (30, 4, 0)
    assert [loss.node_id for loss in letter.losses] == ["n0", "n1", "n2"]
    times_ms = [started_ms, letter.submitted_ms, *(loss.at_ms for loss in letter.losses)]
    assert times_ms == sorted(times_ms)
    assert letter.died_ms == times_ms[-1]
    assert await letters.get(job.id) == letter
    assert await letters.request(job.id) == decode_request(encode_request(job))
    for key in (keys.job(job.id), keys.request(job.id)):
        assert WEEK_MS - 60_000 < await queue.redis.pttl(key) <= WEEK_MS
    assert await audit(AdminBroker(queue.redis), "m") == []


async def test_the_newest_come_first_and_no_more_than_asked_for(queue: Queue) -> None:
    jobs = [new_job() for _ in range(3)]
    for number, job in enumerate(jobs):
        await die(queue, job, 3 * number)
        await queue.redis.zincrby(f"{P}:dead_letters", number, job.id)  # they may have died in one millisecond
    letters = await DeadLetters(queue.redis).newest("m", limit=2)
    assert [letter.job_id for letter in letters] == [jobs[2].id, jobs[1].id]


async def test_purged_dead_letter_is_gone(queue: Queue) -> None:
    job = new_job()
    await die(queue, job)
    letters = DeadLetters(queue.redis)
    assert [await letters.purge([job.id, "m.never"]) for _ in range(2)] == [1, 0]
    assert await letters.newest("m") == []
    for call in (letters.get, letters.request):
        with pytest.raises(NotFoundError):
            await call(job.id)
    assert (await queue.producer.status(job.id, "default")).state == "dead", "its end is still told"
    assert await audit(AdminBroker(queue.redis), "m") == []


async def test_all_are_purged_although_the_records_of_the_newest_are_gone(queue: Queue) -> None:
    job = new_job()
    await die(queue, job)
    now_ms = await queue.now_ms()
    await queue.redis.zadd(f"{P}:dead_letters", {f"m.gone{number}": now_ms + number for number in range(100)})
    letters = DeadLetters(queue.redis)
    assert await letters.newest("m") == []
    assert [await letters.purge_all("m") for _ in range(2)] == [101, 0]
    assert await queue.redis.exists(keys.request(job.id), f"{P}:dead_letters") == 0


async def test_an_open_job_that_is_purged_by_mistake_runs(queue: Queue) -> None:
    node, job_id = await queue.node(), await queue.submit()
    assert await DeadLetters(queue.redis).purge([job_id]) == 0
    assert await audit(AdminBroker(queue.redis), "m") == []
    (taken,) = (await node.take()).jobs
    await node.finish(taken, 0, 3)
    assert (await queue.producer.status(job_id, "default")).state == "succeeded"


async def test_a_job_that_ended_otherwise_is_no_dead_letter(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.finish(taken, 0)
    waiting = await queue.submit()
    for job_id in (taken.job_id, waiting):
        with pytest.raises(NotFoundError):
            await DeadLetters(queue.redis).get(job_id)


async def test_dead_letters_are_kept_for_a_week_and_up_to_a_limit(queue: Queue) -> None:
    now_ms = await queue.now_ms()
    fillers = {f"m.{number:05}": now_ms - 10_000_000 + number for number in range(10_000)}
    await queue.redis.zadd(f"{P}:dead_letters", fillers)
    await queue.redis.set(keys.request("m.00000"), b"request")
    job = new_job()
    await die(queue, job)
    assert await queue.redis.zcard(f"{P}:dead_letters") == 10_000
    assert await queue.redis.zscore(f"{P}:dead_letters", "m.00000") is None
    assert await queue.redis.exists(keys.request("m.00000")) == 0
    await queue.redis.zadd(f"{P}:dead_letters", {"m.00001": now_ms - WEEK_MS - 1})
    await queue.sweep(since_last_ms=LEASE_MS // 4)
    assert await queue.redis.zscore(f"{P}:dead_letters", "m.00001") is None


async def test_progress_clears_the_history(queue: Queue) -> None:
    await queue.node("watcher")
    job_id = await queue.submit()
    for name, chunks in (("n0", 1), ("n1", 1), ("n2", 64), ("n3", 1)):
        node = await queue.node(name)
        taken = await node.take_one()
        await node.emit(taken, taken.num_chunks, chunks)
        await queue.kill(node)
    record = await queue.record(job_id)
    assert (record["state"], record["losses"]) == ("queued", "1")
    assert [entry.partition("@")[0] for entry in record["loss_nodes"].split()] == ["n2", "n3"]
