"""A job whose adapter a node lacks goes to one that may have it, each node at most once, and then fails."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fakes.queue.harness import CONFIG, POOL, RECORD, Queue

from penstock.contract.output import Outcome
from penstock.contract.pool import PoolRecord
from penstock.queue import keys
from penstock.queue.broker.node import NodeBroker

NOT_FOUND = Outcome("failed", "adapter_not_found", "it is not here", "adapter")


async def test_job_is_offered_once_to_each_node_without_its_adapter(queue: Queue) -> None:
    nodes = [await queue.node(f"n{i}") for i in range(3)]
    job_id = await queue.submit()
    for place, node in enumerate(nodes[:2]):
        assert await node.give_back(await node.take_one(), 100, why="lacking") == "OK"
        await queue.change(job_id, avoid_until=0)
        for asked in nodes[: place + 1]:
            assert (await asked.take()).jobs == ()
    taken = await nodes[2].take_one()
    assert (taken.job_id, taken.losses, taken.preemptions, taken.cost) == (job_id, 0, 0, 100)
    assert await nodes[2].finish(taken, 0, 1) == "OK"
    assert await cast(Any, queue.redis.hget(keys.counts(POOL), "given_back_lacking")) == b"2"


async def test_last_node_keeps_the_job_and_ends_it_once(queue: Queue) -> None:
    nodes = [await queue.node(f"n{i}") for i in range(2)]
    job_id = await queue.submit()
    assert await nodes[0].give_back(await nodes[0].take_one(), why="lacking") == "OK"
    taken = await nodes[1].take_one()
    assert [await nodes[1].give_back(taken, why="lacking") for _ in range(2)] == ["KEEP"] * 2
    assert await nodes[1].finish(taken, 0, outcome=NOT_FOUND) == "OK"
    assert (await queue.state(job_id), len(await queue.log(job_id))) == ("failed", 1)


async def test_repeated_give_back_is_fenced(queue: Queue) -> None:
    node, _ = await queue.node("n1"), await queue.node("n2")
    await queue.submit()
    taken = await node.take_one()
    assert [await node.give_back(taken, why="lacking") for _ in range(2)] == ["OK", "FENCED"]


async def test_node_that_lacks_the_adapter_takes_the_job_once_the_other_node_has_died(queue: Queue) -> None:
    first, other = await queue.node("n1"), await queue.node("n2")
    job_id = await queue.submit()
    assert await first.give_back(await first.take_one(), why="lacking") == "OK"
    await queue.change(job_id, avoid_until=0)
    assert (await first.take()).jobs == ()
    await queue.kill(other)
    taken = await first.take_one()
    assert (taken.job_id, await first.give_back(taken, why="lacking")) == (job_id, "KEEP")


async def test_node_that_joins_later_is_offered_the_job_too(queue: Queue) -> None:
    first = await queue.node("n1")
    job_id = await queue.submit()
    taken = await first.take_one()
    assert await first.give_back(taken, why="lacking") == "KEEP"
    late = await queue.node("n2")
    assert await first.give_back(taken, why="lacking") == "OK"
    assert (await late.take_one()).job_id == job_id


@pytest.mark.parametrize(("num_chunks", "answer"), [(0, "OK"), (1, "KEEP")])
async def test_only_a_node_that_could_continue_the_job_counts_as_another(
    queue: Queue, num_chunks: int, answer: str
) -> None:
    """One that drains does not; one of another revision does for a job that has no tokens yet."""
    node, foreign = await queue.node("n1", "r1"), await queue.node("n2", "r2")
    await queue.submit()
    taken = await node.take_one()
    await node.emit(taken, 0, num_chunks)
    await foreign.heartbeat([], draining=True)
    assert await node.give_back(taken, why="lacking") == "KEEP"
    await foreign.heartbeat([], draining=False)
    assert await node.give_back(taken, why="lacking") == answer


async def test_a_pool_serves_what_any_of_its_nodes_has(queue: Queue) -> None:
    async def join(name: str, *adapters: str) -> NodeBroker:
        node = NodeBroker(queue.redis, POOL, name, "r1")
        await node.join(CONFIG, PoolRecord(POOL, RECORD.model, adapters=dict.fromkeys(adapters, "1" * 32)))
        return node

    async def served() -> set[str]:
        return set((await queue.producer.pools())[POOL].adapters)

    one, other = await join("n1", "sql", "law"), await join("n2", "art")
    await join("n3")
    assert await served() == {"sql", "law", "art"}
    await one.announce(PoolRecord(POOL, RECORD.model, adapters={"law": "2" * 32}))
    assert await served() == {"law", "art"}
    await one.announce(PoolRecord(POOL, RECORD.model))
    assert await served() == {"art"}
    await other.leave()
    assert await served() == set()
    await join("n2", "art")
    await queue.age("nodes", "n2", 10**6)
    await queue.sweep()
    assert await served() == set()
