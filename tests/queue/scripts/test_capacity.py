"""Jobs that wait for capacity: a node drains for a large job, isolated jobs run alone, no job waits forever."""

from __future__ import annotations

import pytest
from fakes.queue.harness import LEASE_MS, POOL, FakeNode, P, Queue, ids_of

from penstock.contract.priority import Priority
from penstock.queue import keys
from penstock.queue.broker.node import TakeAnswer, Taken

HOLDER = f"{P}:reservations"


# Large jobs


async def test_one_node_reserves_capacity_and_the_others_continue(queue: Queue) -> None:
    one, two = await queue.node("n1"), await queue.node("n2")
    large, small, smaller = [await queue.submit(cost=cost) for cost in (90, 20, 10)]

    assert ids_of(await one.take(50, kv_total=100)) == []
    assert ids_of(await two.take(20, kv_total=100)) == [small]
    assert ids_of(await one.take(80, kv_total=100)) == []
    assert ids_of(await one.take(95, kv_total=100)) == [large]
    assert ids_of(await two.take(50, kv_total=100)) == [smaller]
    assert await queue.keys("reservations") == set()


async def test_each_node_reserves_capacity_for_another_job(queue: Queue) -> None:
    one, two, three = [await queue.node(name) for name in ("n1", "n2", "n3")]
    first, second, third = [await queue.submit(cost=cost) for cost in (90, 91, 10)]
    assert ids_of(await one.take(50)) == ids_of(await two.take(50)) == []
    assert ids_of(await three.take(50)) == [third]
    assert ids_of(await two.take(95)) == [first], "whoever has room takes whatever comes first"
    assert ids_of(await one.take(95)) == [second]


async def test_another_node_reserves_capacity_when_the_first_stops_calling(queue: Queue) -> None:
    one, two = await queue.node("n1"), await queue.node("n2")
    large, small = [await queue.submit(cost=cost) for cost in (90, 20)]
    await one.take(50)
    assert await queue.redis.hget(HOLDER, "n1") == f"{large} {await _until(queue)}".encode()
    await queue.redis.hset(HOLDER, "n1", f"{large} {await queue.now_ms() - 1}")
    assert ids_of(await two.take(50)) == []
    assert ids_of(await one.take(50)) == [small]


async def _until(queue: Queue) -> int:
    """Return the end of the first node's reservation: a lease after its last renewal."""
    until_ms = int((await queue.redis.hget(HOLDER, "n1") or b"").split()[1])
    assert LEASE_MS - 2000 < until_ms - await queue.now_ms() <= LEASE_MS
    return until_ms


@pytest.mark.parametrize("how", ["leaves", "dies"])
async def test_node_that_is_gone_reserves_no_capacity(queue: Queue, how: str) -> None:
    one, two = await queue.node("n1"), await queue.node("n2")
    await queue.submit(cost=90)
    await one.take(50)
    if how == "leaves":
        await one.broker.leave()
    else:
        await queue.kill(one)
    assert await queue.keys("reservations") == set()
    await queue.submit(cost=20)
    assert ids_of(await two.take(50)) == []


async def test_a_job_larger_than_a_node_runs_where_it_has_the_whole_node(queue: Queue) -> None:
    small, large = await queue.node("n1"), await queue.node("n2")
    job_id = await queue.submit(cost=5000)
    assert ids_of(await small.take(999, kv_total=1000)) == []
    assert ids_of(await large.take(1000, kv_total=6000)) == []
    assert ids_of(await small.take(1000, kv_total=1000)) == [job_id]


async def test_large_job_starts_although_others_wait_and_occupies_one_node(queue: Queue) -> None:
    """Three full nodes, and always more small jobs than they can take: what runs longest ends first."""
    nodes = [await queue.node(f"n{number}", policy="fair") for number in range(3)]
    running: dict[str, list[Taken]] = {node.name: [] for node in nodes}
    large = ""
    for turn in range(60):
        for _ in range(3):
            await queue.submit(cost=10, tenant=f"t{turn % 4}")
        if turn == 20:
            large = await queue.submit(cost=100, tenant="large")
        for node in nodes:
            if len(running[node.name]) >= 9:
                await node.finish(running[node.name].pop(0), 0)
        for node in nodes:
            used = sum(job.cost for job in running[node.name])
            running[node.name] += (await node.take(100 - used, kv_total=100)).jobs
        assert sum(len(jobs) < 9 for jobs in running.values()) <= 1 or turn < 20
        if any(job.job_id == large for jobs in running.values() for job in jobs):
            return
        for node in nodes:
            if (await queue.redis.hget(HOLDER, node.name)) and running[node.name]:
                await node.finish(running[node.name].pop(0), 0)
    raise AssertionError("the large job was never taken")


# Isolated jobs


async def lost_with(queue: Queue, name: str, expected: int) -> FakeNode:
    """Create a node that takes this many jobs and dies."""
    node = await queue.node(name)
    assert len((await node.take()).jobs) == expected
    await queue.kill(node)
    return node


async def test_isolated_job_is_taken_by_an_empty_node_which_then_takes_no_other(queue: Queue) -> None:
    busy, empty = await queue.node("busy"), await queue.node("empty")
    await queue.running(busy)
    suspect = await queue.submit()
    for name in ("n1", "n2"):
        await lost_with(queue, name, 1)
    other = await queue.submit()

    assert ids_of(await busy.take()) == [], "it makes room"
    assert ids_of(await empty.take()) == [suspect]
    assert ids_of(await empty.take()) == []
    assert ids_of(await busy.take()) == [other]


async def test_isolated_job_with_progress_is_no_longer_isolated(queue: Queue) -> None:
    node, busy = await queue.node("n0"), await queue.node("busy")
    await queue.running(busy)
    job_id = await queue.submit()
    for name in ("n1", "n2"):
        await lost_with(queue, name, 1)
    suspect = await node.take_one()
    other = await queue.submit()
    await node.emit(suspect, 0, 63)
    assert ids_of(await node.take()) == []
    await node.emit(suspect, 63, 1)
    assert ids_of(await node.take()) == [other]
    await node.give_back(suspect)
    assert ids_of(await busy.take()) == [job_id], "nor when it is queued again"


async def test_isolated_jobs_occupy_one_node_at_a_time(queue: Queue) -> None:
    nodes = [await queue.node(f"busy{number}") for number in range(3)]
    for node in nodes:
        await queue.running(node)
    suspects = [await queue.submit() for _ in range(40)]
    for name in ("n1", "n2"):
        await lost_with(queue, name, 40)
    others = [await queue.submit() for _ in range(3)]
    assert ids_of(await nodes[0].take()) == []
    assert ids_of(await nodes[1].take(slots=1)) == others[:1]
    assert ids_of(await nodes[2].take(slots=1)) == others[1:2]
    assert {await queue.state(job_id) for job_id in suspects} == {"queued"}


async def test_job_that_kills_nodes_is_isolated_and_no_other_job_fails(queue: Queue) -> None:
    await queue.node("watcher")
    jobs = [await queue.submit(cost=10) for _ in range(12)]
    poison = jobs[5]
    for number in range(40):
        node = await queue.node(f"n{number}")
        taken = (await node.take()).jobs
        if poison in [job.job_id for job in taken]:
            await queue.kill(node)
            continue
        for job in taken:
            await node.emit(job, job.num_chunks, 64)
            await node.finish(job, job.num_chunks + 64)
    states = {job_id: await queue.state(job_id) for job_id in jobs}
    assert states.pop(poison) == "dead"
    assert set(states.values()) == {"succeeded"}
    lost = (await queue.record(poison))["loss_nodes"].split()
    assert len({entry.partition("@")[0] for entry in lost}) == 3


async def test_pool_that_forgives_no_loss_isolates_no_job(queue: Queue) -> None:
    node = await queue.node("n0", max_losses=1)
    jobs = [await queue.submit() for _ in range(2)]
    assert ids_of(await node.take()) == jobs


async def test_loss_of_a_draining_node_does_not_count_against_its_jobs(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    taken, second = await queue.running(node), await queue.running(other)
    await node.heartbeat(draining=True)
    await other.heartbeat(draining=True)
    await other.broker.leave()
    for dead in (node, other):
        await queue.kill(dead)
    for job in (taken, second):
        record = await queue.record(job.job_id)
        assert (record["state"], record["losses"]) == ("queued", "0")


# Given back for capacity


@pytest.mark.parametrize(
    ("free", "record", "answer"),
    [
        (100, {}, "OK"),
        (99, {}, "KEEP"),
        (100, {"max_num_seqs": 8, "num_running": 5, "num_waiting": 3}, "KEEP"),
        (100, {"revision": "r2"}, "KEEP"),
    ],
)
async def test_job_is_given_back_only_if_another_node_has_capacity(
    queue: Queue, free: int, record: dict[str, object], answer: str
) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(node, cost=50)
    await node.emit(taken, 0, 1)
    await node.heartbeat(free=1000)
    await other.heartbeat(free=free, **record)
    assert await node.give_back(taken, cost=100, why="pressure") == answer
    assert await queue.state(taken.job_id) == ("queued" if answer == "OK" else "running")


@pytest.mark.parametrize(
    ("free", "record", "pause", "answer"),
    [
        (100, {}, None, "OK"),
        (99, {}, None, "KEEP"),
        (0, {"draining": True}, None, "KEEP"),
        (100, {"revision": "r2"}, None, "KEEP"),
        (100, {}, "pool", "KEEP"),
        (100, {}, "level:1", "KEEP"),
        (100, {}, "tenant:default", "KEEP"),
        (100, {}, "tenant:other", "OK"),
    ],
)
async def test_running_job_is_handed_over_only_to_a_node_that_goes_on_at_once(
    queue: Queue, free: int, record: dict[str, object], pause: str | None, answer: str
) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(node, cost=50)
    await node.emit(taken, 0, 1)
    await node.heartbeat(free=0, draining=True)
    await other.heartbeat(free=free, **record)
    if pause is not None:
        await queue.redis.hset(keys.paused(POOL), pause, 1)
    assert await node.give_back(taken, cost=100, why="handover") == answer
    assert await queue.state(taken.job_id) == ("queued" if answer == "OK" else "running")
    ended = await queue.redis.hget(keys.job(taken.job_id), "past_leases")
    assert (ended is not None and ended.endswith(b":drain")) == (answer == "OK")


@pytest.mark.parametrize(("priority", "answer"), [("interactive", "KEEP"), ("standard", "KEEP"), ("batch", "OK")])
async def test_running_job_is_not_handed_over_behind_jobs_that_wait(queue: Queue, priority: str, answer: str) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(node, cost=50)
    await queue.submit(priority=Priority[priority.upper()])
    await other.heartbeat(free=1000)
    assert await node.give_back(taken, why="handover") == answer


async def test_jobs_that_a_node_holds_now_count_at_a_handover(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(node, cost=50)
    await other.heartbeat(free=1000, max_num_seqs=1)
    await queue.running(other)
    assert await node.give_back(taken, why="handover") == "KEEP"


async def test_job_that_was_lost_before_is_not_handed_over(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(node, cost=50)
    await queue.change(taken.job_id, losses="1")
    await other.heartbeat(free=1000)
    assert await node.give_back(taken, why="handover") == "KEEP"


async def test_free_capacity_of_a_node_is_counted_once(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    jobs = [await queue.submit() for _ in range(3)]
    taken = (await node.take()).jobs
    assert ids_of(TakeAnswer(taken, (0, 0, 0), 0)) == jobs
    await other.heartbeat(free=250)
    answers = [await node.give_back(job, why="pressure") for job in taken]
    assert answers == ["OK", "OK", "KEEP"]


async def test_often_moved_job_costs_its_maximum(queue: Queue) -> None:
    node = await queue.node("n1", avoid_ms=0)
    await queue.submit(cost=50)
    costs = []
    for _ in range(4):
        taken = await node.take_one()
        costs.append((taken.preemptions, taken.cost))
        await node.give_back(taken, cost=60, most=400)
    assert costs == [(0, 50), (1, 60), (2, 60), (3, 400)]
