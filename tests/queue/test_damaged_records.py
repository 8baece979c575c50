"""What damaged records of jobs and nodes do to the others: they hide themselves, and end no list and no script."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fakes.queue.harness import POOL, Queue, new_job

from penstock.contract.job_actions import JobFilter
from penstock.queue import keys
from penstock.queue.broker.job_lists import DeadLetters, JobLists
from penstock.queue.broker.producer import Submission

DAMAGED = [{"priority": "x"}, {"past_leases": "junk"}, {"used": "1 x"}, {"submitted": b"\xff"}, {"tenant": ""}]


@pytest.mark.parametrize("fields", DAMAGED, ids=str)
async def test_a_damaged_job_hides_one_entry_of_a_list(queue: Queue, fields: dict[str, Any]) -> None:
    await queue.node()
    whole, damaged, other = [await queue.submit() for _ in range(3)]
    await cast(Any, queue.redis).hset(keys.job(damaged), mapping=fields)
    listed = {job.job_id for job in (await JobLists(queue.redis).page(JobFilter("default"))).jobs}
    assert {whole, other} <= listed
    await queue.redis.delete(keys.job(damaged))
    await queue.redis.set(keys.job(damaged), "junk")
    listed = {job.job_id for job in (await JobLists(queue.redis).page(JobFilter("default"))).jobs}
    assert listed == {whole, other}


async def test_a_damaged_dead_letter_hides_one_entry_of_a_list(queue: Queue) -> None:
    await queue.node("watcher")
    jobs = list[str]()
    for names in ("abc", "def"):
        jobs.append(await queue.submit())
        for name in names:
            node = await queue.node(name)
            await node.take_one()
            await queue.kill(node)
    dead = await DeadLetters(queue.redis).newest(POOL)
    assert {letter.job_id for letter in dead} == set(jobs)
    await queue.redis.hset(keys.job(jobs[0]), "cost", "junk")
    assert [letter.job_id for letter in await DeadLetters(queue.redis).newest(POOL)] == [jobs[1]]


@pytest.mark.parametrize("missing", ["cost", "submitted", "losses", "priority", "lease", "tenant", "bytes", "n"])
async def test_a_damaged_job_ends_neither_take_nor_sweep_for_others(queue: Queue, missing: str) -> None:
    node = await queue.node()
    damaged = await queue.running(node)
    waiting = await queue.submit()
    await queue.redis.hdel(keys.job(damaged.job_id), missing)
    await queue.kill(node)
    second = await queue.node("n2")
    await queue.redis.hdel(keys.job(damaged.job_id), missing)
    await second.heartbeat([])
    assert waiting in {taken.job_id for taken in (await second.take()).jobs}


async def test_a_damaged_pressure_record_ends_no_admission(queue: Queue) -> None:
    node = await queue.node()
    await node.heartbeat([])
    await queue.redis.hset(keys.pressure(POOL), "n1", b"\xff")
    assert (await queue.producer.pressure(POOL)).nodes == ()
    await node.heartbeat([])
    assert len((await queue.producer.pressure(POOL)).nodes) == 1
    await queue.producer.submit(Submission(new_job(), 1))
