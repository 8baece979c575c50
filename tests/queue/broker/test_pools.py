"""The pool information that producers get, and the jobs that a pool refuses."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from fakes.queue.harness import CONFIG, LEASE_MS, POOL, RECORD, Queue, new_job

from penstock.contract.errors import TooLargeError
from penstock.queue import keys, wire
from penstock.queue.broker.node import NodeBroker
from penstock.queue.broker.producer import ServedPool, Submission
from penstock.queue.wire import MAX_BYTES


async def test_pool_is_alive_while_one_of_its_nodes_sends_heartbeats(queue: Queue) -> None:
    await queue.node("n1")
    await queue.node("n2")
    members = {field.name: getattr(RECORD, field.name) for field in fields(RECORD)}
    served = ServedPool(**members, is_alive=True, max_open_jobs=CONFIG["max_open_jobs"])
    assert await queue.producer.pools() == {POOL: served}
    await queue.age("nodes", "n1", LEASE_MS + 1)
    assert (await queue.producer.pools())[POOL].is_alive
    await queue.age("nodes", "n2", LEASE_MS + 1)
    assert not (await queue.producer.pools())[POOL].is_alive


async def test_a_pool_whose_node_has_left_is_known_and_dead(queue: Queue) -> None:
    node = await queue.node()
    await node.broker.leave()
    assert [pool.is_alive for pool in (await queue.producer.pools()).values()] == [False]


async def test_pools_with_a_live_node_come_first(queue: Queue) -> None:
    gone = NodeBroker(queue.redis, "a", "n9", "r1")
    await gone.join(CONFIG, replace(RECORD, pool="a"))
    await gone.leave()
    await queue.node()
    assert list(await queue.producer.pools()) == [POOL, "a"]


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x80", wire.encode_record(RECORD)[:-3]])
async def test_an_unreadable_pool_record_hides_no_other(
    queue: Queue, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await queue.node()
    await queue.redis.hset(keys.POOLS, "broken", data)
    for _ in range(2):
        assert list(await queue.producer.pools()) == [POOL]
    assert caplog.text.count("unreadable pool entry") == 1


async def test_a_request_above_the_wire_s_limit_is_refused_with_the_limit(queue: Queue) -> None:
    await queue.node()
    with pytest.raises(TooLargeError, match=f"limit is {MAX_BYTES}") as caught:
        await queue.producer.submit(Submission(new_job(prompt="x" * MAX_BYTES), 1))
    assert caught.value.param == "prompt"
    assert await queue.redis.keys(f"{keys.prefix(POOL)}:request:*") == []
