"""Jobs with a concurrency key: at most so many are queued or running, and so many join the queue in a second."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.queue.harness import POOL, P, Queue, ids_of, new_job
from fakes.waiting import until

from penstock.contract.errors import BusyError
from penstock.contract.job import Priority
from penstock.contract.tenant import Terms
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.producer import Submission

KEY: dict[str, Any] = {"concurrency_key": "user:7", "background": True, "priority": Priority.BATCH}


async def taken_ids(queue: Queue, node: Any) -> list[str]:
    return ids_of(await node.take())


async def findings(queue: Queue) -> list[str]:
    return [str(found) for found in await audit(AdminBroker(queue.redis), POOL) if found.invariant == "I5"]


async def test_jobs_beyond_the_limit_of_their_key_wait_for_an_end(queue: Queue) -> None:
    node = await queue.node()
    ids = [await queue.submit(max_concurrency=2, **KEY) for _ in range(5)]
    other = await queue.submit(max_concurrency=2, **{**KEY, "concurrency_key": "user:8"})
    taken = list((await node.take()).jobs)
    assert {one.job_id for one in taken} == {*ids[:2], other}
    assert await queue.ids("awaiting:default:user:7") == {*ids[2:]}
    assert await findings(queue) == []
    assert await taken_ids(queue, node) == []
    first = next(one for one in taken if one.job_id == ids[0])
    await node.finish(first, 0)
    assert await taken_ids(queue, node) == [ids[2]], "the oldest one follows"
    assert await findings(queue) == []


async def test_a_job_that_returns_to_the_queue_keeps_its_place(queue: Queue) -> None:
    node = await queue.node()
    first, second = [await queue.submit(max_concurrency=1, **KEY) for _ in range(2)]
    (taken,) = (await node.take()).jobs
    assert await node.give_back(taken) == "OK"
    other = await queue.node("n2")
    assert await taken_ids(queue, other) == [first]
    assert await queue.ids("awaiting:default:user:7") == {second}
    assert await findings(queue) == []


async def test_a_lost_node_frees_no_place_and_a_cancel_does(queue: Queue) -> None:
    node = await queue.node()
    first, second, third = [await queue.submit(max_concurrency=1, **KEY) for _ in range(3)]
    await node.take()
    await queue.kill(node)
    other = await queue.node("n2")
    assert await taken_ids(queue, other) == [first]
    assert await queue.producer.cancel(second, "default") == "cancelled"
    assert await queue.ids("awaiting:default:user:7") == {third}
    assert await queue.producer.cancel(first, "default") == "cancelling"
    taken = (await other.take_again()).jobs[0]
    await other.finish(taken, 0)
    assert await taken_ids(queue, other) == [third]
    assert await findings(queue) == []


async def test_an_urgent_job_passes_the_others_of_its_key(queue: Queue) -> None:
    node = await queue.node()
    first, second = [await queue.submit(max_concurrency=1, **KEY) for _ in range(2)]
    urgent = await queue.submit(max_concurrency=1, **{**KEY, "priority": Priority.STANDARD})
    (taken,) = (await node.take()).jobs
    assert taken.job_id == first
    await node.finish(taken, 0)
    assert await taken_ids(queue, node) == [urgent]
    assert await queue.ids("awaiting:default:user:7") == {second}


async def test_so_many_jobs_of_a_key_join_the_queue_in_a_second(queue: Queue) -> None:
    node = await queue.node()
    ids = [await queue.submit(max_per_second=2, **KEY) for _ in range(5)]
    assert await taken_ids(queue, node) == ids[:2]
    assert await taken_ids(queue, node) == []
    now_ms = await queue.now_ms()
    await queue.redis.delete(f"{P}:paced:default:user:7")
    await queue.redis.lpush(f"{P}:paced:default:user:7", now_ms - 900, now_ms - 300)
    await queue.redis.zadd(f"{P}:awaiting", {"default:user:7": 0})
    assert await taken_ids(queue, node) == [], "the second of the first one has not passed"
    due_ms = await queue.redis.zscore(f"{P}:awaiting", "default:user:7")
    assert due_ms is not None
    assert 0 < due_ms - now_ms <= 100
    found = await until(lambda: taken_ids(queue, node))
    assert found == ids[2:3]
    assert await findings(queue) == []


async def test_a_fraction_of_a_job_in_a_second(queue: Queue) -> None:
    await queue.node()
    first = await queue.submit(max_per_second=0.01, **KEY)
    await queue.submit(max_per_second=0.01, **KEY)
    assert (await queue.record(first))["key_terms"] == "- 1 100000"
    due_ms = await queue.redis.zscore(f"{P}:awaiting", "default:user:7")
    assert due_ms is not None
    assert due_ms - await queue.now_ms() == pytest.approx(100_000, abs=2_000)


async def test_a_tenant_shares_no_key_with_another_one(queue: Queue) -> None:
    node = await queue.node()
    mine = await queue.submit(max_concurrency=1, **KEY)
    theirs = await queue.submit(max_concurrency=1, tenant="other", **KEY)
    assert {*await taken_ids(queue, node)} == {mine, theirs}


async def test_a_tenant_has_so_many_keys(queue: Queue) -> None:
    await queue.node()
    await queue.redis.sadd(f"{P}:keys:default", *(f"k{number}" for number in range(10_000)))
    with pytest.raises(BusyError, match="10000 concurrency keys"):
        await queue.submit(max_concurrency=1, **KEY)
    await queue.submit(max_concurrency=1, **{**KEY, "concurrency_key": "k5"})


async def test_a_key_leaves_nothing_behind(queue: Queue) -> None:
    node = await queue.node()
    for _ in range(2):
        await queue.submit(max_concurrency=1, **KEY)
    for _ in range(2):
        (taken,) = (await node.take()).jobs
        await node.finish(taken, 0)
    await node.take()
    left = {name for name in await queue.keys() if "user:7" in name or name.startswith("keys:")}
    assert left == set()
    assert await queue.redis.zcard(f"{P}:awaiting") == 0


async def test_a_delayed_job_waits_for_its_key_when_it_is_due(queue: Queue) -> None:
    node = await queue.node()
    late = await queue.submit(max_concurrency=1, not_before_ms=60_000, **KEY)
    first = await queue.submit(max_concurrency=1, **KEY)
    await queue.delay(late, await queue.now_ms() - 10)
    (taken,) = (await node.take()).jobs
    assert taken.job_id == first
    assert await queue.ids("awaiting:default:user:7") == {late}
    await node.finish(taken, 0)
    assert await taken_ids(queue, node) == [late]
    assert await findings(queue) == []


# Rates of a tenant.


async def ask(queue: Queue, terms: Terms, **fields: Any) -> str:
    job = new_job(tenant="acme", **fields)
    return (await queue.producer.submit(Submission(job, 10, terms=terms))).job_id


async def test_background_work_over_a_tenants_rate_waits_and_chats_are_refused(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(jobs_per_minute=60, burst_s=2)
    ids = [await ask(queue, terms, background=True, priority=Priority.BATCH) for _ in range(6)]
    taken = await taken_ids(queue, node)
    assert taken == ids[: len(taken)]
    assert 1 <= len(taken) <= 3
    assert await queue.ids("awaiting:acme") == {*ids[len(taken) :]}
    with pytest.raises(BusyError, match="60 jobs per minute"):
        await ask(queue, terms)
    await queue.pass_time("acme", 10_000)
    await queue.redis.zadd(f"{P}:awaiting", {"acme": 0})
    following = await taken_ids(queue, node)
    assert following == ids[len(taken) : len(taken) + 1], "waiting work leaves half of the burst to chats"
    await ask(queue, terms)
    assert await findings(queue) == []


async def test_background_work_waits_for_its_tenants_tokens(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=60, burst_s=1)
    ids = [await ask(queue, terms, background=True, priority=Priority.BATCH) for _ in range(2)]
    (taken,) = (await node.take()).jobs
    assert taken.job_id == ids[0]
    assert (await queue.record(ids[1]))["charged"] == "0"
    await node.finish(taken, 0)
    await queue.pass_time("acme", 200_000)
    await queue.redis.zadd(f"{P}:awaiting", {"acme": 0})
    assert await taken_ids(queue, node) == [ids[1]]
    assert (await queue.record(ids[1]))["charged"] == "10"
    assert await findings(queue) == []
