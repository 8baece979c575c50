"""Ends that Redis has lost are repeated, and no others. The jobs' logs, results and the pool's sums then agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.queue.harness import POOL, FakeNode, Queue, chunks_of
from fakes.queue.older_history import saved, set_back
from redis.asyncio import Redis

from penstock.contract.output import Outcome, Usage
from penstock.gpu_node.jobs.times import NodeCounts
from penstock.gpu_node.publishing.ended_jobs import EndedJobs
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.node import MAX_EMIT_BYTES, Emission, JobEnd, Taken, UsedTokens

NUM_CHUNKS = 5


@pytest.fixture
async def queue(redis: Redis) -> Queue:
    return Queue(redis)


def end_of(taken: Taken) -> JobEnd:
    """Return the end of a job with all its chunks."""
    chunks = chunks_of(taken.job_id, 0, NUM_CHUNKS)
    used = UsedTokens(kv_token_ms=7.0, usage=Usage(3, NUM_CHUNKS), log_bytes=sum(map(len, chunks)))
    return JobEnd(Emission(taken.job_id, taken.lease, 0, chunks), Outcome("succeeded"), b"result", used)


class Ended:
    """A job that a node has ended; `before` is what Redis knew before one of its steps."""

    def __init__(self, queue: Queue, node: FakeNode, **limits: Any) -> None:
        self.queue, self.node, self.counts = queue, node, NodeCounts()
        self.kept = EndedJobs(node.broker, self.counts, **{"keep_s": 30, "max_bytes": 1 << 20, **limits})
        self.before: dict[str, Any] = {}

    async def run(self, **fields: Any) -> str:
        """Submit, take, log a part and end a job."""
        self.before["submit"] = await saved(self.queue.redis)
        job_id = await self.queue.submit(**fields)
        self.before["take"] = await saved(self.queue.redis)
        taken = await self.node.take_one()
        self.before["emit"] = await saved(self.queue.redis)
        assert await self.node.emit(taken, 0, 2) == "OK"
        self.before["finish"] = await saved(self.queue.redis)
        whole = end_of(taken)
        last = Emission(taken.job_id, taken.lease, 2, whole.last.chunks[2:])
        assert await self.node.broker.finish_many([replace(whole, last=last)]) == ["OK"]
        self.kept.keep(whole)
        return job_id

    async def check_ended(self, job_id: str) -> None:
        record = await self.queue.record(job_id)
        assert (record["state"], record["node"], record["used"].split()[:2]) == (
            "succeeded",
            "n1",
            ["3", str(NUM_CHUNKS)],
        )
        log = await self.queue.log(job_id)
        assert log[:-1] == list(chunks_of(job_id, 0, NUM_CHUNKS)) and len(log) == NUM_CHUNKS + 1
        assert await self.queue.redis.get(keys.result(job_id)) == b"result"
        assert [one for one in await audit(AdminBroker(self.queue.redis), POOL) if one.name != "unreadable"] == []


@pytest.mark.parametrize("lost_from", ["take", "emit", "finish"])
@pytest.mark.parametrize("background", [False, True])
async def test_an_end_that_redis_lost_is_repeated_with_what_the_log_lacks(
    queue: Queue, lost_from: str, background: bool
) -> None:
    ended = Ended(queue, await queue.node())
    job_id = await ended.run(background=background, tenant="acme", deadline_ms=60_000)
    await set_back(queue.redis, ended.before[lost_from])
    await ended.kept.repeat()
    await ended.check_ended(job_id)
    await ended.kept.repeat()
    await ended.check_ended(job_id)
    assert ended.counts.repeated_ends == 1


async def test_ends_that_redis_has_are_not_repeated(queue: Queue) -> None:
    ended = Ended(queue, await queue.node())
    await ended.run()
    await ended.kept.repeat()
    assert not ended.counts.repeated_ends


async def test_a_job_that_redis_does_not_know_is_left_to_its_client(queue: Queue) -> None:
    ended = Ended(queue, await queue.node())
    job_id = await ended.run()
    await set_back(queue.redis, ended.before["submit"])
    await ended.kept.repeat()
    assert not ended.counts.repeated_ends and await queue.state(job_id) == ""


async def test_a_job_that_another_lease_holds_or_held_is_not_ended(queue: Queue) -> None:
    """The new lease was given in this history of Redis, so the old end is fenced."""
    node = await queue.node()
    ended = Ended(queue, node)
    job_id = await ended.run()
    await set_back(queue.redis, ended.before["take"])
    other = await queue.node("n2")
    taken = await other.take_one()
    await ended.kept.repeat()
    assert await queue.state(job_id) == "running"
    assert await other.give_back(taken) == "OK"
    await ended.kept.repeat()
    assert await queue.state(job_id) == "queued" and not ended.counts.repeated_ends
    assert await node.broker.finish_many([ended.kept._kept[0].end]) == ["FENCED"]


async def test_a_running_job_whose_take_was_lost_ends_with_its_whole_log(queue: Queue) -> None:
    """The node has not noticed yet: its finish names the part that Redis had acknowledged."""
    node = await queue.node()
    ended = Ended(queue, node)
    job_id = await ended.run()
    await set_back(queue.redis, ended.before["take"])
    whole = ended.kept._kept[0].end
    late = replace(whole, last=replace(whole.last, index=2, chunks=whole.last.chunks[2:]))
    assert await node.broker.finish_many([late]) == ["NEED 0"]
    assert await node.broker.finish_many([whole]) == ["OK"]
    await ended.check_ended(job_id)


async def test_what_is_kept_is_bounded_in_time_and_bytes(queue: Queue) -> None:
    node = await queue.node()
    taken = Taken("m.1", "1:n:1", losses=0, num_chunks=0, cost=9, deadline_in_ms=0)
    size = end_of(taken).num_bytes
    small = EndedJobs(node.broker, NodeCounts(), keep_s=30, max_bytes=2 * size)
    for _ in range(4):
        small.keep(end_of(taken))
    assert small.num_bytes == 2 * size
    none = EndedJobs(node.broker, NodeCounts(), keep_s=0, max_bytes=2 * size)
    none.keep(end_of(taken))
    none.keep(end_of(taken))
    await none.repeat()
    assert not none.num_bytes
    long_log = replace(end_of(taken), last=Emission("m.1", "1:n:1", 0, (b"x" * (MAX_EMIT_BYTES + 1),)))
    small.keep(long_log)
    assert small.num_bytes == 2 * size
