"""take: several nodes share a burst by their paces, and what a node leaves for another one is soon taken by any."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fakes.cover import examples
from fakes.queue.harness import LEASE_MS, POOL, FakeNode, P, Queue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.contract.job import Priority
from penstock.contract.tasks import Tokenize
from penstock.queue import keys
from penstock.queue.broker.node import TakeAnswer

LEFT_MS = 50
KV_BLOCKS = 100_000


async def nodes_of(queue: Queue, paces: Sequence[float], **config: int | str) -> list[FakeNode]:
    nodes = [await queue.node(f"n{number}", **config) for number in range(1, 1 + len(paces))]
    for node, pace in zip(nodes, paces, strict=True):
        await tell(node, pace)
    return nodes


async def tell(node: FakeNode, pace: float = 100.0, **record: object) -> None:
    """Send a heartbeat that counts for an hour, however slow the machine is."""
    await node.heartbeat(**{"drain_cost_per_s": pace, "kv_blocks_total": KV_BLOCKS, **record})
    await node.broker._redis.zincrby(keys.nodes(POOL), 3_600_000, node.name)


async def burst(queue: Queue, size: int, **fields: object) -> None:
    """Submit jobs in one call."""
    await asyncio.gather(*(queue.submit(**fields) for _ in range(size)))


async def left_ago(queue: Queue, ms: int) -> None:
    """Let the jobs that were left have waited for other nodes so long."""
    at, job_id = (await queue.redis.get(f"{P}:left")).split()
    await queue.redis.set(f"{P}:left", f"{int(at) - ms} {job_id.decode()}")


async def take_at_once(queue: Queue, node: FakeNode, **room: int) -> TakeAnswer:
    """Take, however slow the machine is, before what was left has waited long enough for any node."""
    answer = await node.take(**room)
    if await queue.redis.exists(f"{P}:left"):
        await left_ago(queue, -3_600_000)
    return answer


async def num_taken(queue: Queue, node: FakeNode, **room: int) -> int:
    return len((await take_at_once(queue, node, **room)).jobs)


@pytest.mark.parametrize("first", [0, -1])
@pytest.mark.parametrize(
    ("paces", "size", "shares"),
    [
        ((100, 100), 20, (10, 10)),
        ((100, 100), 7, (3.5, 3.5)),
        ((1000, 1000, 1000), 20, (6.7, 6.7, 6.7)),
        ((1000, 1000, 1000), 7, (2.3, 2.3, 2.3)),
        ((1150, 1000, 850), 20, (6.7, 6.7, 6.7)),
        ((100, 300), 20, (5, 15)),
        ((100, 300), 7, (1.75, 5.25)),
        ((0, 0), 20, (10, 10)),
        ((0, 300), 20, (10, 10)),
    ],
)
async def test_bursts_are_divided_by_pace(
    queue: Queue, paces: tuple[float, ...], size: int, shares: tuple[float, ...], first: int
) -> None:
    nodes = await nodes_of(queue, paces)
    order = nodes[first:] + nodes[:first]
    for _ in range(10):
        await burst(queue, size)
        taken = {node.name: (await take_at_once(queue, node)).jobs for node in order}
        counts = [len(taken[node.name]) for node in nodes]
        assert sum(counts) == size
        assert all(abs(count - share) <= 1 for count, share in zip(counts, shares, strict=True)), counts
        for node in nodes:
            for job in taken[node.name]:
                await node.finish(job, 0)


async def test_a_node_that_is_rung_again_takes_nothing_of_what_it_left(queue: Queue) -> None:
    nodes = await nodes_of(queue, (100, 100, 100))
    await burst(queue, 20)
    assert [len((await take_at_once(queue, node)).jobs) for node in nodes[:2]] == [7, 7]
    rung = await take_at_once(queue, nodes[1], left_some=True)
    assert not rung.jobs and rung.again_in_ms
    # Of other jobs it gets its share at once.
    await burst(queue, 10)
    assert len((await take_at_once(queue, nodes[1], left_some=True)).jobs) == 3
    await left_ago(queue, LEFT_MS + 3_600_000)
    assert len((await nodes[0].take(left_some=True)).jobs) == 13


async def test_burst_of_many_calls_is_divided(queue: Queue) -> None:
    """Each node takes when its doorbell rings, the second one later than the first."""
    nodes = await nodes_of(queue, (100, 100))
    bells = [await queue.listen(keys.doorbell(POOL, node.name)) for node in nodes]
    counts = [0, 0]
    for number in range(20):
        await queue.submit()
        for at, node in enumerate(nodes):
            if (at == 0 or number % 3 == 1) and await bells[at].messages():
                counts[at] += await num_taken(queue, node)
    assert sum(counts) == 20 and abs(counts[0] - counts[1]) <= 4, counts


async def test_a_burst_of_many_calls_is_divided_however_long_ago_the_nodes_had_a_heartbeat(queue: Queue) -> None:
    """The ends of an earlier burst count at once, also at the node that tells its free capacity later."""
    nodes = await nodes_of(queue, (100, 100))
    bells = [await queue.listen(keys.doorbell(POOL, node.name)) for node in nodes]
    for size, has_heartbeat in ((10, False), (20, True)):
        counts = [0, 0]
        if has_heartbeat:
            await tell(nodes[0])
        taken = []
        for _ in range(size):
            await queue.submit()
            for at, node in enumerate(nodes):
                if await bells[at].messages():
                    taken += [(node, job) for job in (await take_at_once(queue, node)).jobs]
                    counts[at] = sum(one is node for one, _ in taken)
        assert sum(counts) == size and abs(counts[0] - counts[1]) <= 2, counts
        for node, job in taken:
            await node.finish(job, 0)


async def test_no_doorbell_rings_a_node_that_drains_whatever_ends_there(queue: Queue) -> None:
    node, other = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(node, cost=10**6)
    await other.heartbeat(free=10)
    await node.heartbeat(free=-1, draining=True)
    await node.finish(taken, 0)
    bells = [await queue.listen(keys.doorbell(POOL, one.name)) for one in (node, other)]
    await queue.submit()
    assert [await bell.messages() for bell in bells] == [[], [b""]]


async def test_jobs_that_nodes_hold_now_count(queue: Queue) -> None:
    (first,) = await nodes_of(queue, (100,))
    await burst(queue, 6)
    assert await num_taken(queue, first) == 6
    second = await queue.node("n2")
    await tell(second)
    await burst(queue, 10)
    assert [await num_taken(queue, first), await num_taken(queue, second)] == [2, 8]


async def test_what_is_left_rings_its_node_and_is_taken_by_any_soon(queue: Queue) -> None:
    first, second = await nodes_of(queue, (100, 100))
    await burst(queue, 20)
    doorbell = await queue.listen(keys.doorbell(POOL, second.name))
    answer = await take_at_once(queue, first)
    assert (len(answer.jobs), answer.again_in_ms) == (10, LEFT_MS)
    assert await doorbell.messages() == [b""]
    # The other node hangs. A call in between takes a job, and does not begin the time anew.
    await left_ago(queue, 3_600_000 + LEFT_MS // 2)
    answer = await first.take()
    assert len(answer.jobs) in (1, 10)
    if len(answer.jobs) == 1:
        assert answer.again_in_ms <= LEFT_MS // 2
        await left_ago(queue, LEFT_MS // 2)
        assert len((await first.take()).jobs) == 9
    # The next burst waits for that node again.
    await burst(queue, 4)
    assert await num_taken(queue, first) == 1


async def test_begun_jobs_are_left_only_for_nodes_of_their_revision(queue: Queue) -> None:
    first = await queue.node("n1")
    await burst(queue, 4)
    for job in (await first.take()).jobs:
        await first.emit(job, 0)
        await first.give_back(job)
        await queue.change(job.job_id, avoid="")
    other = await queue.node("n2", revision="r2")
    await tell(first)
    await tell(other)
    assert await num_taken(queue, first) == 4


@pytest.mark.parametrize("why", ["drains", "is silent", "is full", "has few blocks", "left"])
async def test_nothing_is_left_for_a_node_that_takes_no_job(queue: Queue, why: str) -> None:
    first, other = await nodes_of(queue, (100, 100))
    match why:
        case "drains":
            await tell(other, draining=True)
        case "is silent":
            await queue.age("nodes", other.name, 3_600_000 + LEASE_MS // 2)
        case "is full":
            await tell(other, max_num_seqs=0)
        case "has few blocks":
            await tell(other, kv_blocks_total=5)
        case _:
            await other.broker.leave()
            await queue.node("n3")
    await burst(queue, 20)
    assert await num_taken(queue, first) == 20


async def test_backlog_above_the_room_of_all_nodes_is_not_divided(queue: Queue) -> None:
    nodes = await nodes_of(queue, (100, 100))
    for node in nodes:
        await tell(node, max_num_seqs=8)
    await burst(queue, 20)
    assert [await num_taken(queue, node, slots=8, slots_total=8) for node in nodes] == [8, 8]


async def test_more_than_a_nodes_room_is_not_left_for_it(queue: Queue) -> None:
    first, small = await nodes_of(queue, (100, 100))
    await tell(small, max_num_seqs=4)
    await burst(queue, 20)
    assert [await num_taken(queue, first), await num_taken(queue, small, slots=4, slots_total=4)] == [16, 4]


async def test_tasks_are_not_divided(queue: Queue) -> None:
    first, _ = await nodes_of(queue, (100, 100))
    await burst(queue, 8, task=Tokenize(), prompt="hi")
    assert await num_taken(queue, first, tasks=32) == 8


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paces=st.lists(st.sampled_from((0.0, 1e4, 2e4, 8e4)), min_size=1, max_size=4),
    seqs=st.lists(st.sampled_from((1, 4, 16, 256)), min_size=4, max_size=4),
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    order=st.permutations(range(4)),
    policy=st.sampled_from(("fcfs", "priority", "fair")),
    classes=st.lists(st.sampled_from(Priority), min_size=3, max_size=3),
)
async def test_any_burst_starts_in_order_and_at_once(
    queue: Queue,
    paces: list[float],
    seqs: list[int],
    sizes: list[int],
    order: list[int],
    policy: str,
    classes: list[Priority],
) -> None:
    """No job is given twice or lost, more urgent ones start first, and each that fits starts."""
    await queue.redis.flushall()
    nodes = await nodes_of(queue, paces, policy=policy)
    room = [*seqs[: len(nodes)]]
    for node, most, pace in zip(nodes, room, paces, strict=True):
        await tell(node, pace, max_num_seqs=most)
    waiting: dict[int, list[str]] = {}
    for size, urgency in zip(sizes, classes, strict=False):
        ids = await queue.submit_many(size, priority=urgency)
        waiting.setdefault(int(urgency), []).extend(ids)
    left = {level: set(ids) for level, ids in waiting.items()}
    for _ in range(3):
        for at in order:
            if at < len(nodes):
                answer = await nodes[at].take(slots=room[at], slots_total=seqs[at])
                room[at] -= len(answer.jobs)
                for job in answer.jobs:
                    left[job.level].remove(job.job_id)
        if await queue.redis.exists(f"{P}:left"):
            await left_ago(queue, LEFT_MS)
    assert sum(map(len, left.values())) == max(0, sum(map(len, waiting.values())) - sum(seqs[: len(nodes)]))
    # The most urgent jobs have started.
    if any(left.values()):
        least = [level for level, ids in left.items() if ids]
        assert all(not left[level] for level in left if level < min(least))
