"""Backlogs are accepted and each job ends once: small runs of `make backlog`, and the checks notice what is planted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from fakes.cover import FULL
from fakes.fake_node import MODEL, POOL, FakeNode
from fakes.waiting import until
from faults import backlog
from faults.tools.backlog_entries import ENTRIES, Answers, Requests
from faults.tools.backlog_memory import LargeJobs, ended_jobs
from faults.tools.backlog_view import PoolView, audited, problems_of, view_of
from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError
from penstock.producer.client import AsyncClient
from penstock.queue import keys


async def violations(*words: str) -> list[str]:
    args = backlog.parser().parse_args(words)
    found: list[str] = await args.run(args)
    return found


@pytest.fixture(scope="module")
def served_url() -> Iterator[str]:
    with backlog.running_node(backlog.POOL, redis_mib=512, with_demo_model=False) as url:
        asyncio.run(backlog.warm_up(url, backlog.POOL, num_jobs=150))
        yield url


@pytest.mark.parametrize("name", ENTRIES)
async def test_each_way_into_the_queue_accepts_a_backlog(name: str, served_url: str) -> None:
    args = backlog.parser().parse_args(["doors", "--requests", "200" if FULL else "80"])
    assert await backlog.run_entry(served_url, name, args) == []


async def test_delayed_jobs_that_fall_due_together_do_not_hurt_chats(served_url: str) -> None:
    """A machine with other work may hold up Redis itself for a third of a second. So a late chat gets another try."""
    words = "due", "--requests", "300", "--after", "4", "--part-s", "1", "--chats", "8", "--later-ms", "500"
    args = backlog.parser().parse_args(words)
    found = await backlog.run_due(served_url, args)
    for _ in range(2):
        if found and all(problem.startswith(("chats due:", "chats waiting:")) for problem in found):
            found = await backlog.run_due(served_url, args)
    assert found == []


async def test_kills_neither_lose_nor_double_jobs_of_a_backlog() -> None:
    size = ("--requests", "400", "--kills", "4") if FULL else ("--requests", "200", "--kills", "2")
    assert await violations("kills", *size, "--every", "1", "--seed", "7") == []


async def test_results_that_fill_redis_wait_for_their_reader() -> None:
    assert await violations("memory", "--requests", "2200", "--redis-mib", "15", "--still-s", "2") == []


# What a campaign must notice.


async def a_done_backlog(url: str, redis: Redis, number: int) -> tuple[PoolView, list[str]]:
    """Return the view before a backlog, and the ids of its jobs, which are done."""
    before = await view_of(redis, POOL)
    async with AsyncClient(url) as client:
        jobs = [await client.submit("x", model=MODEL, max_tokens=2) for _ in range(number)]
        for job in jobs:
            await job.result()
    return before, [job.id for job in jobs]


async def test_a_lost_doubled_or_refused_job_is_noticed(redis_url: str, redis: Redis) -> None:
    counts = f"{keys.prefix(POOL)}:counts"
    async with FakeNode(redis_url):
        before, ids = await a_done_backlog(redis_url, redis, 5)
        assert problems_of(before, await view_of(redis, POOL), 5, job_ids=ids) == []

        assert problems_of(before, await view_of(redis, POOL), 6) == [
            "accepted jobs: 5 instead of 6",
            "records of jobs: 5 instead of 6",
            "ends of jobs: 5 instead of 6",
            "ended jobs in the report of usage: 5 instead of 6",
        ]
        await redis.hincrby(counts, "ended_succeeded", 1)
        assert problems_of(before, await view_of(redis, POOL), 5) == ["ends of jobs: 6 instead of 5"]
        await redis.hincrby(counts, "ended_succeeded", -1)
        await redis.hincrby(counts, "refused_busy", 1)
        assert problems_of(before, await view_of(redis, POOL), 5) == ["refused_busy: 1"]
        await redis.hdel(counts, "refused_busy")

        await redis.hset(keys.job(ids[0]), "state", "queued")
        assert problems_of(before, await view_of(redis, POOL), 5) == [f"1 jobs are not done: {{'{ids[0]}': 'queued'}}"]
        assert await audited(redis, POOL, num_attempts=1) != []
        await redis.delete(keys.job(ids[0]))
        found = problems_of(before, await view_of(redis, POOL), 5, job_ids=ids)
        assert found == ["records of jobs: 4 instead of 5", f"1 lost: ['{ids[0]}']"]

        _, more = await a_done_backlog(redis_url, redis, 1)
        found = problems_of(before, await view_of(redis, POOL), 5, job_ids=ids[1:])
        assert "accepted jobs: 6 instead of 5" in found and f"1 doubled: {more}" in found


def test_answers_that_lack_or_repeat_one_are_noticed() -> None:
    requests = Requests("p", 3, max_tokens=4)
    answers = Answers(job_ids=["a", "b", "b"])
    for index, text in ((0, "wrong"), (1, "x"), (1, "x")):
        answers.add(index, text)
    assert answers.problems(requests) == [
        "1 requests not answered: [2]",
        "1 requests answered more than once: [1]",
        "2 requests answered wrongly: [0, 1]",
        "two requests have the same job",
    ]


async def test_a_result_that_another_reader_has_freed_is_noticed(redis_url: str, redis: Redis) -> None:
    with backlog.large_node(redis_url):
        jobs = LargeJobs(backlog.POOL, 3, num_chars=20, max_tokens=300)
        await jobs.submit(redis_url)
        await until(lambda: ended_jobs(redis, backlog.POOL), lambda seen: seen >= 3)
        await redis.delete(keys.result(jobs.ids[1]), keys.log(jobs.ids[1]))
        with pytest.raises(NotFoundError):
            await jobs.read_and_free(redis_url)
