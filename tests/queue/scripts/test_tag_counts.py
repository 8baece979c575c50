"""Counts of a tag's jobs by state and class, and jobs found by custom_id and metadata."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from fakes.queue.harness import POOL, Queue

from penstock.contract.errors import ConflictError, RequestError
from penstock.contract.job import Priority
from penstock.contract.job_actions import JobChange, JobFilter
from penstock.contract.job_counts import CountsOfPools, JobCounts
from penstock.contract.output import STATES, Outcome
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.job_lists import JobLists
from penstock.queue.broker.steering import Steering

TAG = "run:7"


async def counted(queue: Queue, tag: str | None = TAG, tenant: str = "default") -> JobCounts:
    sums = CountsOfPools()
    sums.add(await JobLists(queue.redis).counted(POOL, tenant, tag), has_tag=tag is not None)
    return sums.counts(tenant, tag)


async def by_lists(queue: Queue, tag: str | None = TAG) -> Counter[tuple[str, str, bool]]:
    """Count the jobs that the lists show."""
    found: Counter[tuple[str, str, bool]] = Counter()
    wanted, after = JobFilter(tenant="default", tag=tag), None
    while True:
        page = await JobLists(queue.redis).page(wanted, after=after, limit=1000)
        found.update((job.state, job.priority.label, job.is_background) for job in page.jobs)
        if (after := page.next_after) is None:
            return found


def flat(counts: JobCounts) -> dict[tuple[str, str, bool], int]:
    return {
        (state, *of_class): count for of_class, states in counts.by_class.items() for state, count in states.items()
    }


async def findings(queue: Queue) -> list[str]:
    return [str(found) for found in await audit(AdminBroker(queue.redis), POOL) if found.invariant == "I5"]


async def end_one(queue: Queue, node: Any, state: Any) -> None:
    for taken in (await node.take(slots=1)).jobs:
        outcome = Outcome(state, "" if state == "succeeded" else "model_error")
        await node.finish(taken, 0, outcome=outcome)


async def step(queue: Queue, node: Any, draw: random.Random) -> None:
    """Let something happen to a job."""
    match draw.choice(("submit", "submit", "end", "take", "cancel", "class", "later")):
        case "submit":
            fields: dict[str, Any] = {"priority": draw.choice(list(Priority)), "background": draw.random() < 0.5}
            if draw.random() < 0.3:
                fields["not_before_ms"] = 60_000
            if draw.random() < 0.3:
                fields |= {"concurrency_key": draw.choice("kl"), "max_concurrency": 1}
            tags = draw.choice(((TAG,), ("other", TAG), ()))
            await queue.submit(tags=tags, custom_id=draw.choice((None, "a")), **fields)
        case "take":
            await node.take(slots=1)
        case "end":
            await end_one(queue, node, draw.choice(("succeeded", "failed")))
        case action:
            for job_id in draw.sample(sorted(await queue.ids("open")), 1) if await queue.ids("open") else ():
                await change_one(queue, job_id, action, draw.choice(list(Priority)))


async def change_one(queue: Queue, job_id: str, action: str, priority: Priority) -> None:
    if action == "cancel":
        await queue.producer.cancel(job_id, "default")
        return
    is_class = action == "class"
    change = JobChange("change_class", priority=priority) if is_class else JobChange("reschedule", not_before_s=60.0)
    with suppress(ConflictError):
        await Steering(queue.redis).change(job_id, "default", change)


@pytest.mark.parametrize("seed", range(3))
async def test_counts_are_those_of_the_lists_after_random_steps(queue: Queue, seed: int) -> None:
    draw, node = random.Random(seed), await queue.node()
    for _ in range(40):
        await step(queue, node, draw)
    shown = Counter({(s if s != "cancelling" else "running", *k): n for (s, *k), n in (await by_lists(queue)).items()})
    counts = await counted(queue)
    assert flat(counts) == {key: count for key, count in shown.items() if count}
    assert (counts.total, counts.is_partial) == (sum(shown.values()), False)
    of_tenant = await counted(queue, None)
    every = Counter[str]()
    for (state, *_), count in (await by_lists(queue, None)).items():
        every["running" if state == "cancelling" else state] += count
    assert of_tenant.states == {state: every[state] for state in STATES if every[state]}
    assert await findings(queue) == []


async def test_counts_go_with_the_last_job_of_the_tag_and_plain_jobs_have_none(queue: Queue) -> None:
    node = await queue.node(result_ttl_ms=1)
    plain = await queue.submit()
    assert await queue.keys("tag_counts:*") == set()
    await queue.producer.cancel(plain, "default")
    tagged = await queue.submit(tags=(TAG,), custom_id="a")
    assert len(await queue.keys("tag_counts:*")) == 1
    await queue.producer.cancel(tagged, "default")
    while await queue.keys("tagged:*"):
        await queue.sweep()
    assert await queue.keys("tag_counts:*") == set()
    assert (await counted(queue)).total == 0
    del node


async def test_the_rate_is_that_of_the_last_ends(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit_many(4, tags=(TAG,))
    for _ in range(3):
        await end_one(queue, node, "succeeded")
    assert (await counted(queue)).rate_per_s is None, "too short a time to know"
    now_ms, (key,) = await queue.now_ms(), [one async for one in queue.redis.scan_iter(match="*tag_counts*")]
    assert float(await queue.redis.hget(key, "recent")) == pytest.approx(2, rel=0.01), "the first end began the time"
    await queue.redis.hset(key, mapping={"begun": now_ms - 10_000, "at": now_ms, "recent": "20"})
    counts = await counted(queue)
    assert counts.rate_per_s is not None
    assert counts.rate_per_s == pytest.approx(20 / 60 / (1 - 2.718281828 ** (-1 / 6)), rel=0.05)
    assert counts.expected_end_ms is not None
    assert counts.expected_end_ms - counts.now_ms == pytest.approx(1000 / counts.rate_per_s, abs=2)


async def test_jobs_are_found_by_custom_id_and_metadata(queue: Queue) -> None:
    await queue.node()
    lists = JobLists(queue.redis)
    ids = [
        await queue.submit(tags=(TAG,), custom_id=f"row {n % 2}", metadata={"user": f"u{n}", "kind": "a"})
        for n in range(4)
    ]
    await queue.submit(tags=(TAG,))

    async def found(**given: Any) -> list[str]:
        page = await lists.page(JobFilter.of(given, tenant="default"), limit=1000)
        return [job.job_id for job in page.jobs]

    assert await found(custom_id="row 1") == [ids[3], ids[1]]
    assert await found(custom_id="row 1", tag=TAG, metadata={"user": "u1"}) == [ids[1]]
    assert await found(custom_id="row 1", tag="other") == []
    assert await found(tag=TAG, metadata={"kind": "a"}) == ids[::-1]
    assert await found(submitted_after=0, metadata={"user": "u2"}) == [ids[2]]
    assert await found(custom_id="row") == []
    (job,) = (await lists.page(JobFilter.of({"custom_id": "row 1", "metadata": {"user": "u1"}}, tenant="default"))).jobs
    assert (job.tags, job.custom_id) == ((TAG,), "row 1"), "the index shows in no tag"
    with pytest.raises(RequestError, match="metadata") as refused:
        JobFilter.of({"metadata": {"user": "u1"}}, tenant="default")
    assert refused.value.param == "metadata"


async def test_completions_show_no_mark_of_a_custom_id(queue: Queue) -> None:
    await queue.node()
    for tags in ((), ("red",)):
        await queue.producer.cancel(await queue.submit(tags=tags, custom_id="a"), "default")
    found: Any = await queue.redis.xrange(f"penstock:{{{POOL}}}:ended:default")
    entries = [fields[b"j"].decode().split()[1:] for _, fields in found]
    assert entries == [["cancelled"], ["cancelled", "red"]]


async def test_pages_have_a_thousand_jobs(queue: Queue) -> None:
    await queue.node()
    for _ in range(8):
        await queue.submit_many(128)
    page = await JobLists(queue.redis).page(JobFilter(tenant="default"), limit=1000)
    assert (len(page.jobs), page.next_after is not None) == (1000, True)
    few = JobFilter.of({"priority": "interactive"}, tenant="default")
    rare = []
    for _ in range(2):
        rare.append(await queue.submit(priority=Priority.INTERACTIVE))
        await queue.submit_many(128)
        await queue.submit_many(128)
    found = await JobLists(queue.redis).page(few, limit=1000)
    assert [job.job_id for job in found.jobs] == rare[::-1]
    with pytest.raises(RequestError, match="from 1 to 1000"):
        await JobLists(queue.redis).page(JobFilter(tenant="default"), limit=1001)
