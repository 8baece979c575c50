"""positions: where jobs are in the queue, for many jobs in one call that writes nothing."""

from __future__ import annotations

import pytest
from fakes.queue.harness import POOL, Queue, new_id

from penstock.contract.job import Priority
from penstock.queue.broker.jobs import JobWait, QueuePositions


@pytest.fixture
def positions(queue: Queue) -> QueuePositions:
    return QueuePositions(queue.redis)


async def test_more_urgent_classes_and_older_jobs_of_the_class_are_ahead(
    queue: Queue, positions: QueuePositions
) -> None:
    await queue.node()
    batch = await queue.submit(cost=7, priority=Priority.BATCH)
    first, second = await queue.submit_many(2)
    urgent = await queue.submit(cost=30, priority=Priority.INTERACTIVE)

    found = await positions.of(POOL, [batch, second, urgent, first])

    assert found == [JobWait(3, 230), JobWait(2, 130), JobWait(0, 0), JobWait(1, 30)]


async def test_a_job_moves_up_as_nodes_take_those_ahead_of_it(queue: Queue, positions: QueuePositions) -> None:
    node = await queue.node()
    ids = await queue.submit_many(3)
    assert [wait.num_ahead for wait in await positions.of(POOL, ids) if wait] == [0, 1, 2]
    await node.take(slots=2)
    taken = JobWait(None, is_taken=True)
    assert await positions.of(POOL, ids) == [taken, taken, JobWait(0)]


async def test_a_job_that_was_given_back_is_in_the_queue_again(queue: Queue, positions: QueuePositions) -> None:
    node = await queue.node()
    job_id = await queue.submit()
    await node.give_back(await node.take_one(), 50)
    assert await positions.of(POOL, [job_id]) == [JobWait(0)]


async def test_a_delayed_job_has_no_position_yet(queue: Queue, positions: QueuePositions) -> None:
    await queue.node()
    job_id = await queue.submit(not_before_ms=60_000)
    assert await positions.of(POOL, [job_id]) == [JobWait(None)]


async def test_jobs_that_have_begun_or_ended_or_are_unknown_have_none(queue: Queue, positions: QueuePositions) -> None:
    node = await queue.node()
    begun, ended = await queue.submit(), await queue.submit()
    taken = {job.job_id: job for job in (await node.take()).jobs}
    await node.emit(taken[begun], 0)
    await node.finish(taken[ended], 0)
    assert await positions.of(POOL, [begun, ended, new_id()]) == [None, None, None]


async def test_a_read_changes_nothing(queue: Queue, positions: QueuePositions) -> None:
    await queue.node()
    job_id = await queue.submit()
    before = {key: await queue.redis.dump(key) for key in await queue.redis.keys()}
    await positions.of(POOL, [job_id])
    assert {key: await queue.redis.dump(key) for key in await queue.redis.keys()} == before
