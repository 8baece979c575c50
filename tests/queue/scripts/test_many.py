"""Many jobs in one call of a script: each has its own answer, counts for the next ones, and harms none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from fakes.queue.harness import POOL, FakeNode, P, Queue, chunks_of, ids_of, new_id, new_job

from penstock.contract.errors import BusyError, ConflictError, InvariantError, RequestError
from penstock.contract.job import JobDef
from penstock.contract.output import Outcome, Usage
from penstock.contract.tenant import UNLIMITED, Terms
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.node import MAX_FINISH_JOBS, Emission, JobEnd, Taken, UsedTokens
from penstock.queue.broker.producer import Submission, Submitted
from penstock.queue.broker.submitting import MAX_SHARED_ITEMS

DONE = Outcome("succeeded")


async def num_calls(queue: Queue) -> int:
    stats = await queue.redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


async def submit_together(
    queue: Queue, jobs: Iterable[JobDef], terms: Terms = UNLIMITED, cost: int = 100
) -> list[Submitted | BaseException]:
    submissions = [Submission(job, cost, terms=terms) for job in jobs]
    return await asyncio.gather(*map(queue.producer.submit, submissions), return_exceptions=True)


def kinds(answers: Sequence[Submitted | BaseException]) -> list[str]:
    return [type(one).__name__ for one in answers]


async def nothing_is_wrong(queue: Queue) -> bool:
    """Whether an audit finds all sums and sets right. The results of these tests are none that can be read."""
    return [one for one in await audit(AdminBroker(queue.redis), POOL) if one.name != "unreadable"] == []


def end_of(taken: Taken, index: int = 0, result: bytes = b"result", **used: Any) -> JobEnd:
    chunks = chunks_of(taken.job_id, 0, 1)
    last = Emission(taken.job_id, taken.lease, index, chunks)
    return JobEnd(last, DONE, result, cast(UsedTokens, used or {"usage": Usage(3, 1), "log_bytes": len(chunks[0])}))


async def taken_by(queue: Queue, node: FakeNode, count: int, **fields: Any) -> list[Taken]:
    for _ in range(count):
        await queue.submit(**fields)
    return list((await node.take()).jobs)


# Submit


async def test_jobs_that_are_submitted_together_share_a_call(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit()
    before = await num_calls(queue)
    jobs = [new_job() for _ in range(MAX_SHARED_ITEMS + 1)]
    answers = await submit_together(queue, jobs)
    assert await num_calls(queue) == before + 2
    assert kinds(answers) == ["Submitted"] * len(jobs)
    assert len((await node.take()).jobs) == MAX_SHARED_ITEMS
    assert await nothing_is_wrong(queue)


async def test_large_requests_are_spread_over_calls(queue: Queue) -> None:
    await queue.node()
    await queue.submit()
    before = await num_calls(queue)
    await submit_together(queue, [new_job(prompt="x" * 200_000) for _ in range(6)])
    assert await num_calls(queue) == before + 3


async def test_a_repeated_job_of_the_same_call_is_the_same_job(queue: Queue) -> None:
    await queue.node()
    job, keyed = new_job(), new_job(idempotency_key="k")
    other = new_job(job.id, prompt="another")
    jobs = [job, job, other, keyed, new_job(idempotency_key="k"), new_job(idempotency_key="k", prompt="another")]
    first, again, conflict, of_key, same_key, of_other = await submit_together(queue, jobs)
    assert isinstance(first, Submitted) and isinstance(again, Submitted)
    assert (first.existed, again.existed) == (False, True)
    assert isinstance(of_key, Submitted) and isinstance(same_key, Submitted)
    assert (same_key.job_id, same_key.existed) == (keyed.id, True)
    assert isinstance(conflict, ConflictError) and isinstance(of_other, ConflictError)
    assert await queue.ids("open") == {job.id, keyed.id}
    assert await nothing_is_wrong(queue)


async def test_a_repeated_call_is_harmless(queue: Queue) -> None:
    await queue.node()
    jobs = [new_job() for _ in range(5)]
    await submit_together(queue, jobs)
    before = await queue.keys()
    answers = await submit_together(queue, jobs)
    assert [isinstance(one, Submitted) and one.existed for one in answers] == [True] * 5
    assert await queue.keys() == before
    assert await nothing_is_wrong(queue)


@pytest.mark.parametrize(
    ("terms", "num_accepted"),
    [
        (Terms(max_open_jobs=3), 3),
        (Terms(max_queued_cost=250), 2),
        (Terms(jobs_per_minute=6, burst_s=40), 4),
        (Terms(tokens_per_minute=600, burst_s=30), 3),
    ],
    ids=["open jobs", "queued cost", "jobs per minute", "tokens per minute"],
)
async def test_an_accepted_job_counts_for_the_limits_of_the_next_ones(
    queue: Queue, terms: Terms, num_accepted: int
) -> None:
    await queue.node()
    answers = await submit_together(queue, [new_job() for _ in range(6)], terms)
    assert kinds(answers) == ["Submitted"] * num_accepted + ["BusyError"] * (6 - num_accepted)
    assert await nothing_is_wrong(queue)


async def test_an_accepted_job_counts_for_the_limits_of_the_pool(queue: Queue) -> None:
    await queue.node(max_open_jobs=3)
    assert kinds(await submit_together(queue, [new_job() for _ in range(5)])) == ["Submitted"] * 3 + ["BusyError"] * 2
    await queue.node("n1", max_open_jobs=3)
    others = await submit_together(queue, [new_job(tenant="other") for _ in range(3)])
    assert kinds(others) == ["Submitted"] * 2 + ["BusyError"], "while the pool is full, each tenant has its part"


async def test_an_accepted_job_counts_for_the_memory_of_the_next_ones(queue: Queue) -> None:
    await queue.node()
    used = (await queue.redis.info("memory"))["used_memory"]
    await queue.redis.config_set("maxmemory", used + 64 * (1 << 20))
    try:
        share = (used + 64 * (1 << 20)) / 100
        num_fitting = int(share // 110_000)
        answers = await submit_together(
            queue, [new_job(prompt="x" * 100_000) for _ in range(num_fitting + 5)], Terms(memory_percent=1)
        )
    finally:
        await queue.redis.config_set("maxmemory", "512mb")
    errors = [one for one in answers if isinstance(one, BusyError)]
    assert errors and {error.code for error in errors} == {"memory_share_exceeded"}
    assert len(answers) - len(errors) <= share / 100_000


async def test_tenants_of_one_call_have_their_own_limits(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit()
    before = await num_calls(queue)
    strict, wide = Terms(max_open_jobs=1, weight=2), Terms(account="a1")
    submissions = [
        Submission(new_job(tenant=tenant), 10, terms=strict if tenant == "a" else wide)
        for tenant in ("a", "b", "a", "b", "a")
    ]
    answers = await asyncio.gather(*map(queue.producer.submit, submissions), return_exceptions=True)
    assert await num_calls(queue) == before + 1
    assert kinds(answers) == ["Submitted", "Submitted", "BusyError", "Submitted", "BusyError"]
    assert sorted(job.weight for job in (await node.take()).jobs) == [1, 1, 1, 2]
    records = [await queue.record(one.job_id) for one in answers if isinstance(one, Submitted)]
    assert [record.get("account") for record in records] == [None, "a1", "a1"]
    assert await nothing_is_wrong(queue)


async def test_each_wrong_job_of_a_call_has_its_own_error(queue: Queue) -> None:
    await queue.node()
    old = new_job(f"{POOL}.00000000-0000-7000-8000-000000000000")
    jobs = [(new_job(), 100), (new_job(), cast(int, "no number")), (old, 100), (new_job(), 100)]
    answers = await asyncio.gather(
        *(queue.producer.submit(Submission(job, cost)) for job, cost in jobs), return_exceptions=True
    )
    assert kinds(answers) == ["Submitted", "InvariantError", "RequestError", "Submitted"]
    assert isinstance(answers[1], InvariantError) and isinstance(answers[2], RequestError)
    assert await nothing_is_wrong(queue)


async def test_a_full_redis_answers_known_jobs_beside_refused_ones(queue: Queue) -> None:
    await queue.node()
    known = [new_job() for _ in range(2)]
    await submit_together(queue, known)
    await queue.redis.config_set("maxmemory", 1)
    try:
        answers = await submit_together(queue, [known[0], new_job(), known[1]])
    finally:
        await queue.redis.config_set("maxmemory", "512mb")
    assert kinds(answers) == ["Submitted", "BusyError", "Submitted"]
    assert isinstance(answers[1], BusyError) and answers[1].code == "redis_full"


async def test_a_caller_that_is_gone_takes_its_job_along(queue: Queue) -> None:
    await queue.node()
    gone = asyncio.create_task(queue.producer.submit(Submission(new_job(), 1)))
    stays = asyncio.create_task(queue.producer.submit(Submission(new_job(), 1)))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait((gone, stays))
    assert await queue.ids("open") == {stays.result().job_id}


# Take


@pytest.mark.parametrize("policy", ["fair", "priority"])
async def test_a_take_of_many_tenants_leaves_every_sum_right(queue: Queue, policy: str) -> None:
    node = await queue.node(policy=policy)
    jobs = [new_job(tenant=f"t{number % 40}", background=number % 3 == 0, needs_reader=False) for number in range(120)]
    await submit_together(queue, jobs)
    taken = list[str]()
    while found := ids_of(await node.take()):
        taken += found
        assert await nothing_is_wrong(queue)
    assert sorted(taken) == sorted(job.id for job in jobs)
    assert await queue.keys("queue:*") == await queue.keys("virtual_time:*") == await queue.keys("waiting:*") == set()
    assert await queue.keys("queued*") == set()


# Finish


async def test_jobs_that_end_together_share_a_call(queue: Queue) -> None:
    node = await queue.node()
    await node.finish(await queue.running(node), 0)
    taken = await taken_by(queue, node, MAX_FINISH_JOBS, tenant="a")
    before = await num_calls(queue)
    assert await node.broker.finish_many(list(map(end_of, taken))) == ["OK"] * MAX_FINISH_JOBS
    assert await num_calls(queue) == before + 1
    for one in taken:
        result = await queue.producer.status(one.job_id, "a")
        assert result.outcome == DONE
        assert len(await queue.log(one.job_id)) == 2
    assert await queue.keys("request:*") == await queue.keys("running:*") == await queue.ids("open") == set()
    assert await nothing_is_wrong(queue)


async def test_more_ends_than_a_call_takes_are_refused(queue: Queue) -> None:
    node = await queue.node()
    taken = await taken_by(queue, node, MAX_FINISH_JOBS + 1)
    with pytest.raises(InvariantError, match="TOO_MANY_JOBS"):
        await node.broker.finish_many(list(map(end_of, taken)))


async def test_each_end_of_a_call_has_its_own_answer(queue: Queue) -> None:
    node = await queue.node()
    good, lost, early, damaged, last = await taken_by(queue, node, 5)
    await queue.redis.delete(keys.log(damaged.job_id))
    await queue.redis.set(keys.log(damaged.job_id), "junk")
    unknown = Taken(new_id(), "1:x:1", 0, 0, 1, 0)
    wrong = replace(end_of(last), last=Emission(last.job_id, last.lease, cast(int, "no number"), ()))
    fenced = Taken(lost.job_id, "1:other:1", 0, 0, 1, 0)
    ends = [end_of(good), end_of(fenced), end_of(early, index=4), end_of(damaged), end_of(unknown), wrong, end_of(last)]
    answers = await node.broker.finish_many(ends)
    assert answers.pop(5).startswith("ERR ")
    assert answers == ["OK", "FENCED", "NEED 0", "OK", "GONE", "OK"], "a log that is no list is deleted, and begun anew"
    assert {await queue.state(one.job_id) for one in (good, damaged, last)} == {"succeeded"}
    assert {await queue.state(one.job_id) for one in (lost, early)} == {"running"}
    assert await node.broker.finish_many(ends[:1] * 2) == ["OK", "OK"], "a repeated end changes nothing"
    assert await nothing_is_wrong(queue)


async def test_ends_of_many_tenants_and_classes_leave_every_sum_right(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    for number in range(30):
        terms = Terms(account=f"a{number % 2}", tokens_per_minute=10_000 if number % 5 == 0 else 0)
        job = new_job(tenant=f"t{number % 7}", background=number % 3 == 0, needs_reader=False)
        await queue.producer.submit(Submission(job, 50, terms=terms))
    taken = list((await node.take()).jobs)
    assert len(taken) == 30
    usage: dict[str, Any] = {"usage": Usage(7, 2, 1), "log_bytes": 10, "kv_token_ms": 33.0}
    ends = [end_of(one, result=b"r" * (100_000 if at % 10 == 0 else 10), **usage) for at, one in enumerate(taken)]
    assert set(await node.broker.finish_many(ends)) == {"OK"}
    (day,) = await queue.keys("usage:*")
    used = {name.decode(): int(value) for name, value in (await cast(Any, queue.redis).hgetall(f"{P}:{day}")).items()}
    assert sum(value for name, value in used.items() if name.endswith(":jobs")) == 30
    assert sum(value for name, value in used.items() if name.endswith(":prompt")) == 210
    assert await queue.redis.ttl(f"{P}:{day}") > 86_400
    counted = await cast(Any, queue.redis).hget(f"{P}:counts", "ended_succeeded")
    assert int(counted) == 30
    assert await queue.keys("reserved") == await queue.keys("may_use*") == set()
    assert await nothing_is_wrong(queue)


async def test_readers_of_jobs_that_end_together_get_one_message(queue: Queue) -> None:
    node = await queue.node()
    inbox = await queue.listen(keys.inbox_channel(POOL, "me"))
    taken = await taken_by(queue, node, 10, inbox="me")
    await node.broker.finish_many(list(map(end_of, taken)))
    (message,) = await inbox.messages()
    assert all(one.job_id.encode() in message for one in taken)


# Results


async def test_results_that_are_read_and_freed_together_share_calls(queue: Queue) -> None:
    node = await queue.node()
    taken = await taken_by(queue, node, 10)
    await node.broker.finish_many([end_of(one, result=b"") for one in taken])
    await queue.producer.ack([taken[0].job_id], "default")
    before = await num_calls(queue)
    freed = await asyncio.gather(*(queue.producer.ack([one.job_id], "default") for one in taken))
    assert freed == [0] + [1] * 9
    assert await num_calls(queue) == before + 1
