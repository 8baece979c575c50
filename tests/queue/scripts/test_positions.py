"""positions: where jobs are in the queue, for many jobs in one call that writes nothing."""

from __future__ import annotations

import pytest
from fakes.queue.harness import POOL, Queue, new_id

from penstock.contract.job import Priority
from penstock.queue.broker.jobs import JobWait, QueuePositions
from penstock.queue.job_cost import Ahead


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

    assert found == [JobWait(Ahead(*ahead)) for ahead in ((3, 230), (2, 130), (0, 0), (1, 30))]


async def test_a_job_moves_up_as_nodes_take_those_ahead_of_it(queue: Queue, positions: QueuePositions) -> None:
    node = await queue.node()
    ids = await queue.submit_many(3)
    assert [wait.ahead.num_jobs for wait in await positions.of(POOL, ids) if wait and wait.ahead] == [0, 1, 2]
    await node.take(slots=2)
    taken = JobWait(None, is_taken=True)
    assert await positions.of(POOL, ids) == [taken, taken, JobWait(Ahead(0, 0))]


async def test_a_job_that_was_given_back_is_in_the_queue_again(queue: Queue, positions: QueuePositions) -> None:
    node = await queue.node()
    job_id = await queue.submit()
    await node.give_back(await node.take_one(), 50)
    assert await positions.of(POOL, [job_id]) == [JobWait(Ahead(0, 0))]


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


async def test_background_jobs_wait_for_both_kinds_of_work(queue: Queue, positions: QueuePositions) -> None:
    await queue.node()
    await queue.submit(cost=40)
    for _ in range(2):
        last = await queue.submit(cost=10, background=True, priority=Priority.BATCH)
    assert await positions.of(POOL, [last]) == [JobWait(Ahead(2, 40, 10), is_background=True)]


def cost_ahead(waits: list[JobWait | None]) -> list[float]:
    return [wait.ahead.foreground_cost for wait in waits if wait is not None and wait.ahead is not None]


async def test_under_fair_shares_other_tenants_count_as_far_as_they_are_served(
    queue: Queue, positions: QueuePositions
) -> None:
    await queue.node(policy="fair")
    flood = [await queue.submit(cost=100, tenant="flood") for _ in range(10)]
    few = [await queue.submit(cost=100, tenant="few") for _ in range(3)]
    heavy = [await queue.submit(cost=100, tenant="heavy", weight=4) for _ in range(3)]
    assert cost_ahead(await positions.of(POOL, few)) == [0, 300, 600]
    assert cost_ahead(await positions.of(POOL, heavy)) == [0, 150, 300], "a weight is part of the share"
    # After the others have been served, only its own jobs are left.
    assert cost_ahead(await positions.of(POOL, flood[-2:])) == [800 + 600, 900 + 600]


async def test_a_long_queue_of_a_tenant_is_not_read_as_a_whole(queue: Queue, positions: QueuePositions) -> None:
    await queue.node(policy="fair")
    ids = [await queue.submit(cost=10, tenant="a") for _ in range(60)]
    await queue.submit(cost=10, tenant="b")
    found = cost_ahead(await positions.of(POOL, [ids[3], ids[-1]]))
    assert found[0] == 30 + 10
    assert found[1] == pytest.approx(590 + 10, abs=10)
    assert 150 <= cost_ahead(await positions.of(POOL, [ids[30]]))[0] <= 600
    assert cost_ahead(await positions.of(POOL, ids)) == sorted(cost_ahead(await positions.of(POOL, ids)))


async def test_costs_of_very_many_tenants_are_not_read(queue: Queue, positions: QueuePositions) -> None:
    await queue.node(policy="fair")
    for number in range(150):
        await queue.submit(cost=10, tenant=f"t{number}")
    last = await queue.submit(cost=10, tenant="t0")
    assert cost_ahead(await positions.of(POOL, [last])) == [1500]
