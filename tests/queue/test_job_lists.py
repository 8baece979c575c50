"""Lists by state, class, tag and time: a job is in the list of its state, pages are whole, cursors are checked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fakes.queue.harness import POOL, P, Queue, id_minted_at, new_job
from redis.asyncio import Redis

from penstock.contract.errors import RequestError
from penstock.contract.job import Message, Priority
from penstock.contract.job_actions import JobFilter
from penstock.contract.output import Outcome
from penstock.queue import keys
from penstock.queue.broker import job_lists
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.job_lists import JobLists
from penstock.queue.broker.submitting import MAX_SHORT_BYTES, Submission

HOUR_MS = 3_600_000
MAX_LOSSES = 3


async def listed(lists: JobLists, limit: int = 100, **given: Any) -> list[str]:
    """Return the ids of all pages of a filter."""
    wanted = JobFilter.of(given, tenant=given.pop("tenant", "default"))
    found, after = list[str](), None
    while True:
        page = await lists.page(wanted, after=after, limit=limit)
        found += [status.job_id for status in page.jobs]
        if (after := page.next_after) is None:
            return found


async def wrong_keys(redis: Redis, *, repair: bool = False) -> list[tuple[str, str]]:
    """Return what an audit finds, without the results and dead letters that these tests only name."""
    found = await audit(AdminBroker(redis), POOL, repair=repair)
    return [(one.name, one.key) for one in found if one.name not in ("unreadable", "not_lost")]


async def lists_of(queue: Queue) -> JobLists:
    await queue.node()
    return JobLists(queue.redis)


async def one_of_each(queue: Queue) -> dict[str, str]:
    """Return a job in each state."""
    node = await queue.node()
    made: dict[str, str] = {}
    for state, outcome in (
        ("succeeded", Outcome("succeeded")),
        ("failed", Outcome("failed", "model_error")),
        ("expired", Outcome("expired", "deadline_exceeded")),
        ("dead", Outcome("dead", "node_lost")),
    ):
        taken = await queue.running(node)
        assert await node.finish(taken, 0, outcome=outcome) == "OK"
        made[state] = taken.job_id
    made["cancelled"] = await queue.submit()
    await queue.producer.cancel(made["cancelled"], "default")
    made["running"] = (await queue.running(node)).job_id
    made["cancelling"] = (await queue.running(node)).job_id
    assert await queue.producer.cancel(made["cancelling"], "default") == "cancelling"
    made["scheduled"] = await queue.submit(not_before_ms=HOUR_MS)
    made["queued"] = await queue.submit()
    return made


async def test_each_state_is_listed_and_shown_alike(queue: Queue) -> None:
    lists, made = await lists_of(queue), await one_of_each(queue)
    for state, job_id in made.items():
        assert await listed(lists, state=state) == [job_id]
        assert (await queue.producer.status(job_id, "default")).state == state
        (status,) = (await lists.page(JobFilter("default", states=(state,)))).jobs
        assert status.state == state
    assert await listed(lists, state="done") == [made["succeeded"]]
    assert set(await listed(lists, state="failed,dead,running")) == {
        made[state] for state in ("failed", "dead", "running")
    }
    assert set(await listed(lists)) == set(made.values())
    assert await wrong_keys(queue.redis) == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": " \n\tTwo  words\n" + " " * 500}, "Two words"),
        ({"prompt": "\x1b[31mred\x07 \u202eleft"}, "[31mred left"),
        ({"prompt": "x" * 64}, "x" * 64),
        ({"prompt": "x" * 10_000}, "x" * 61 + "…"),
        ({"prompt": "é" * 40}, "é" * 30 + "…"),
        ({"prompt_token_ids": (1, 2)}, ""),
        ({"messages": [("system", "s"), ("user", "first"), ("assistant", "a"), ("user", " last")]}, "last"),
        ({"messages": [("system", "rules")]}, "rules"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
async def test_a_job_is_listed_with_its_model_and_the_first_words_of_its_prompt(
    queue: Queue, prompt: dict[str, Any], words: str
) -> None:
    await queue.node()
    if "messages" in prompt:
        prompt = {"messages": [Message(role=role, content=content) for role, content in prompt["messages"]]}
    await queue.producer.submit(Submission(new_job(**prompt), 10, model="m" * 100))
    (status,) = (await (await lists_of(queue)).page(JobFilter("default"))).jobs
    assert (status.model, status.first_words) == ("m" * 61 + "…", words)
    assert len(status.first_words.encode()) <= MAX_SHORT_BYTES


async def test_submit_and_attach_name_the_state_of_a_scheduled_job(queue: Queue) -> None:
    await queue.node()
    job = new_job(not_before_ms=HOUR_MS)
    assert (await queue.producer.submit(Submission(job, 10))).state == "scheduled"
    assert (await queue.producer.submit(Submission(job, 10))).state == "scheduled"
    assert (await queue.producer.attach(job.id, "default", inbox="reader")).state == "scheduled"


async def test_due_job_counts_as_queued_before_and_after_it_joins_the_queue(queue: Queue) -> None:
    lists = await lists_of(queue)
    later, due = await queue.submit(not_before_ms=HOUR_MS), await queue.submit(not_before_ms=HOUR_MS)
    await queue.delay(due, await queue.now_ms() - 1)
    assert await listed(lists, state="queued") == [due]
    assert await listed(lists, state="scheduled") == [later]
    await queue.sweep()
    assert await queue.ids("jobs:default") == {due}
    assert await listed(lists, state="queued") == [due]
    assert await listed(lists, state="scheduled") == [later]
    assert await wrong_keys(queue.redis) == []


async def test_jobs_are_filtered_by_class_tag_and_time(queue: Queue) -> None:
    lists = await lists_of(queue)
    now_s = await queue.now_ms() / 1000
    old = await queue.submit(new_job(id_minted_at(now_s - 7200), tags=("run:1",)))
    batch = await queue.submit(priority=Priority.BATCH, background=True, tags=("run:1", "eu"))
    fast = await queue.submit(priority=Priority.INTERACTIVE, tags=("run:2",))
    assert await listed(lists, priority="batch") == [batch]
    assert await listed(lists, background=True) == [batch]
    assert await listed(lists, background="false") == [fast, old]
    assert await listed(lists, priority="interactive", background=True) == []
    assert await listed(lists, tag="run:1") == [batch, old]
    assert await listed(lists, tag="run:1", state="queued", priority="standard") == [old]
    assert await listed(lists, tag="eu", state="scheduled") == []
    assert await listed(lists, tag="unknown") == []
    assert await listed(lists, submitted_before=now_s - 3600) == [old]
    assert await listed(lists, submitted_after=now_s - 3600) == [fast, batch]
    assert await listed(lists, submitted_after=now_s - 7200.001, submitted_before=now_s - 7199) == [old]
    assert await listed(lists, tenant="rival", tag="run:1") == []
    status = await queue.producer.status(batch, "default")
    assert (status.tags, status.metadata) == (("run:1", "eu"), None)


async def test_the_smaller_of_tag_and_state_is_walked(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = await lists_of(queue)
    monkeypatch.setattr(job_lists, "MAX_EXAMINED", 1)
    scheduled = await queue.submit(not_before_ms=HOUR_MS, tags=("all",))
    for number in range(300):
        await queue.submit(tags=("all", "few") if number == 0 else ("all",))
    page = await lists.page(JobFilter("default", states=("scheduled",), tag="all"))
    assert ([status.job_id for status in page.jobs], page.next_after) == ([scheduled], None)
    page = await lists.page(JobFilter("default", states=("queued",), tag="few"))
    assert (len(page.jobs), page.next_after) == (1, None)


async def test_pages_over_many_tenants_and_states_are_whole_and_in_order(queue: Queue, redis: Redis) -> None:
    lists, rng = await lists_of(queue), random.Random(7)
    node = await queue.node()
    made: dict[str, list[str]] = {}
    for _ in range(150):
        tenant = f"t{rng.randrange(12)}"
        if rng.random() < 0.3:
            taken = await queue.running(node, tenant=tenant)
            await node.finish(taken, 0)
            job_id = taken.job_id
        else:
            job_id = await queue.submit(tenant=tenant, not_before_ms=HOUR_MS)
        made.setdefault(tenant, []).append(job_id)
    everything = sorted((job_id for ids in made.values() for job_id in ids), reverse=True)
    for limit in (1, 7, 100):
        assert await listed(lists, limit, tenant=None) == everything
    assert await listed(lists, 3, tenant="t3") == sorted(made["t3"], reverse=True)


async def test_pages_merge_pools(queue: Queue, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    from fakes.queue.harness import CONFIG, RECORD, new_id

    from penstock.contract.pool import PoolRecord
    from penstock.queue.broker.node import NodeBroker

    lists = await lists_of(queue)
    await NodeBroker(redis, "other", "n9", "r1").join(CONFIG, PoolRecord("other", "acme/other"))
    assert RECORD.pool == POOL
    ids = []
    for number in range(20):
        pool = "other" if number % 3 else POOL
        job = new_job(new_id(pool))
        await queue.producer.submit(Submission(job, 10))
        ids.append(job.id)
        await asyncio.sleep(0.002)
    assert await listed(lists, 4) == ids[::-1]
    assert await listed(lists, 4, pool="other") == [job_id for job_id in ids[::-1] if job_id.startswith("other")]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"state": "unknown"}, "state"),
        ({"state": ""}, "state"),
        ({"priority": "urgent"}, "priority"),
        ({"background": "maybe"}, "background"),
        ({"tag": "two words"}, "tag"),
        ({"tag": "x" * 65}, "tag"),
        ({"submitted_after": "yesterday"}, "submitted_after"),
        ({"submitted_before": -1}, "submitted_before"),
        ({"submitted_before": float("nan")}, "submitted_before"),
        ({"pool": "x" * 70}, "pool"),
    ],
)
def test_wrong_filters_name_their_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        JobFilter.of(given, tenant="default")
    assert caught.value.param == param


async def test_cursors_belong_to_their_tenant_pool_and_filter(queue: Queue) -> None:
    lists = await lists_of(queue)
    ids = [await queue.submit() for _ in range(3)]
    cursor = (await lists.page(JobFilter("default"), limit=1)).next_after
    assert cursor is not None
    rest = await lists.page(JobFilter("default"), after=cursor)
    assert [status.job_id for status in rest.jobs] == ids[1::-1]
    for other in (JobFilter("rival"), JobFilter(), JobFilter("default", pool=POOL), JobFilter("default", tag="x")):
        with pytest.raises(RequestError, match="another tenant, pool or filter") as caught:
            await lists.page(other, after=cursor)
        assert caught.value.param == "after"
    with pytest.raises(RequestError, match="not other"):
        await lists.page(JobFilter("default", pool="other"), after=ids[0])
    with pytest.raises(RequestError, match="`next` of an earlier page"):
        await lists.page(JobFilter("default"), after="junk")
    # A job's id is a cursor, too.
    assert [one.job_id for one in (await lists.page(JobFilter("default"), after=ids[1])).jobs] == [ids[0]]


async def test_tags_and_metadata_go_with_the_record_and_all_bytes_are_counted(queue: Queue, redis: Redis) -> None:
    lists = await lists_of(queue)
    node = await queue.node()
    metadata = {"order": "4711", "note": "ü" * 100}
    taken = await queue.running(node, tags=("a", "b:1"), metadata=metadata)
    status = await queue.producer.status(taken.job_id, "default")
    assert (status.tags, status.metadata) == (("a", "b:1"), metadata)
    assert (await lists.page(JobFilter("default"))).jobs[0].metadata == metadata
    await node.finish(taken, 0)
    assert await queue.ids("tagged:default:a") == await queue.ids("tagged:default:b:1") == {taken.job_id}
    assert await redis.pttl(keys.metadata(taken.job_id)) > 0
    assert await wrong_keys(redis) == []
    assert await queue.producer.ack([taken.job_id], "default") == 1
    assert await wrong_keys(redis) == []
    await redis.delete(keys.job(taken.job_id), keys.metadata(taken.job_id))
    for member in await queue.ids("expiry"):
        await queue.age("expiry", member, 10**9)
    await queue.sweep()
    assert await queue.keys("tagged:*") == await queue.keys("jobs:*") == set()
    assert not await queue.keys("stored")


async def test_audit_mends_lists(queue: Queue, redis: Redis) -> None:
    node = await queue.node()
    taken = await queue.running(node, tags=("a",))
    await node.finish(taken, 0)
    scheduled = await queue.submit(not_before_ms=HOUR_MS)
    await redis.delete(f"{P}:tagged:default:a", f"{P}:jobs:succeeded:default")
    await redis.zadd(f"{P}:jobs:failed:default", {taken.job_id: 0})
    await redis.zadd(f"{P}:jobs:default", {scheduled: 0})
    assert set(await wrong_keys(redis, repair=True)) == {
        ("missing", "tagged:default:a"),
        ("missing", "jobs:succeeded:default"),
        ("stray", "jobs:failed:default"),
        ("stray", "jobs:default"),
    }
    assert await wrong_keys(redis) == []
    assert await queue.ids("jobs:scheduled:default") == {scheduled}


async def test_request_of_an_ended_job_is_kept_unless_it_succeeded(queue: Queue, redis: Redis) -> None:
    made = await one_of_each(queue)
    for state in ("failed", "expired", "cancelled"):
        assert 86_000_000 < await redis.pttl(keys.request(made[state])) <= 86_400_000
    assert await redis.pttl(keys.request(made["dead"])) > 86_400_000
    assert not await redis.exists(keys.request(made["succeeded"]))
    assert await wrong_keys(redis) == []
