"""Steering of accepted jobs through the client: retries, actions on all that a filter names, and pauses."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fakes.fake_node import POOL, FakeNode

from penstock.contract.errors import ConflictError, NotFoundError, RequestError
from penstock.contract.job import Priority
from penstock.contract.job_actions import JobChange, JobFilter
from penstock.producer.client import AsyncClient, Client
from penstock.queue import keys
from penstock.queue.broker.steering import LEASE_MS

LATER: dict[str, Any] = {"not_before_s": 600, "background": True}


async def failed(client: AsyncClient, node: FakeNode, **options: Any) -> str:
    job = await client.submit("hello", max_tokens=2, **options)
    (run,) = await node.take()
    await run.finish("failed", "model_error")
    return job.id


async def states(client: AsyncClient, *job_ids: str) -> list[str]:
    return [(await client.status(job_id)).state for job_id in job_ids]


async def test_a_retry_is_a_new_job_with_the_same_request_class_and_tags(
    client: AsyncClient, told_node: FakeNode
) -> None:
    notes: dict[str, Any] = {"tags": ["run:1"], "metadata": {"a": "b"}, "custom_id": "row-1"}
    options = {**notes, "priority": Priority.INTERACTIVE}
    old = await failed(client, told_node, background=False, **options)
    retried = await client.control.retry(old)
    status = await client.status(retried.job_id)
    assert (status.retry_of, status.tags, status.metadata) == (old, ("run:1",), {"a": "b"})
    assert status.custom_id == "row-1"
    assert (status.priority, status.is_background, status.state) == (Priority.INTERACTIVE, False, "queued")
    redis = client.servers.directory.redis
    assert await redis.get(keys.request(old)) == await redis.get(keys.request(retried.job_id))
    # A job has one retry.
    assert (await client.control.retry(old)).job_id == retried.job_id
    (run,) = await told_node.take()
    await run.finish("succeeded")
    for job_id, code in (
        (retried.job_id, "job_ended"),
        (f"{POOL}.01890a5d-ac96-774b-bcce-b302099a8057", "job_not_found"),
    ):
        with pytest.raises((ConflictError, NotFoundError)) as caught:
            await client.control.retry(job_id)
        assert caught.value.code == code
    waiting = await client.submit("hello", **LATER)
    with pytest.raises(ConflictError) as still_open:
        await client.control.retry(waiting.id)
    assert still_open.value.code == "job_open"
    with pytest.raises(NotFoundError):
        await client.control.retry(old, tenant="rival")
    await redis.delete(keys.request(old))
    assert (await client.control.retry(old)).job_id == retried.job_id


async def test_a_job_without_its_request_and_without_a_retry_is_not_retried(
    client: AsyncClient, told_node: FakeNode
) -> None:
    old = await failed(client, told_node, background=False)
    await client.servers.directory.redis.delete(keys.request(old))
    with pytest.raises(NotFoundError) as gone:
        await client.control.retry(old)
    assert gone.value.code == "request_expired"


async def test_all_jobs_of_a_filter_are_canceled_after_a_dry_run(client: AsyncClient, told_node: FakeNode) -> None:
    mine = [(await client.submit("hello", tags=["a"], **LATER)).id for _ in range(30)]
    other = (await client.submit("hello", tags=["b"], **LATER)).id
    foreign = (await client.submit("hello", tags=["a"], tenant="rival", **LATER)).id
    dry = await client.control.bulk("cancel", tag="a", dry_run=True)
    assert (dry.num_changed, dry.num_already_over, dry.num_failed, dry.state) == (30, 0, 0, "ended")
    assert set(await states(client, *mine)) == {"scheduled"}
    done = await client.control.bulk("cancel", tag="a")
    assert (done.num_changed, done.num_already_over, done.num_failed) == (30, 0, 0)
    assert done.ended_ms >= done.begun_ms > 0
    assert set(await states(client, *mine)) == {"cancelled"}
    assert await states(client, other) == ["scheduled"]
    assert (await client.status(foreign, tenant="rival")).state == "scheduled"
    # A filter that names ended jobs finds them already over.
    again = await client.control.bulk("cancel", tag="a", state=["cancelled", "scheduled"])
    assert (again.num_changed, again.num_already_over) == (0, 30)
    assert await client.control.report(again.bulk_id) == again
    with pytest.raises(NotFoundError):
        await client.control.report(again.bulk_id, tenant="rival")


async def test_an_action_says_how_much_is_left_how_fast_it_is_and_when_it_ends(
    client: AsyncClient, told_node: FakeNode
) -> None:
    for number in range(30):
        tenant, tag = ("rival", "default")[number % 2], "ab"[number // 20]
        await client.submit("hello", tags=[tag], tenant=tenant, custom_id=f"row {number}", **LATER)
    wanted = JobFilter(None, tag="a")
    bulk_id = await client.control.start(JobChange("cancel"), wanted, owner="default")
    custom = await client.control.start(JobChange("cancel"), JobFilter(None, custom_id="row 3"), owner="default")
    await asyncio.sleep(0.005)  # A job of the same millisecond would belong to the action.
    await client.submit("hello", tags=["a"], **LATER)
    server = client.servers.directory
    held = await server.steering.claim(POOL, bulk_id, "one")
    assert held is not None
    job_ids, _ = await server.lists.find(wanted, "", 4, tenants=["default"])
    assert len(job_ids) == 4
    await server.steering.step(held, job_ids, cursor=held.cursor, to=f"default/{job_ids[-1].rpartition('.')[2]}")
    report = await client.control.report(bulk_id)
    assert (report.state, report.num_changed, report.num_left) == ("running", 3, 17)
    rate = report.rate_per_s
    assert rate is not None
    assert report.expected_end_ms == report.now_ms + math.ceil(1000 * 17 / rate)
    counts = await client.sets.counts(bulk=bulk_id)
    assert (counts.states["open"], counts.num_open, counts.expected_end_ms is not None) == (17, 17, True)
    # Both may have begun in one millisecond, so their order is open.
    assert {one.bulk_id for one in await client.control.running()} == {bulk_id, custom}
    assert (await client.control.report(custom)).num_left == 1
    with pytest.raises(RequestError, match="bulk: give either"):
        await client.sets.counts(bulk=bulk_id, tag="a")
    await client.control.finished(bulk_id, wanted)
    over = await client.sets.counts(bulk=bulk_id)
    assert (over.num_open, over.total) == (0, 20)


async def test_an_action_covers_only_jobs_accepted_before_it(client: AsyncClient, told_node: FakeNode) -> None:
    before = [(await client.submit("hello", **LATER)).id for _ in range(3)]
    wanted = JobFilter("default")
    bulk_id = await client.control.start(JobChange("cancel"), wanted, owner="default", all_jobs=True)
    await asyncio.sleep(0.005)
    after = (await client.submit("hello", **LATER)).id
    report = await client.control.finished(bulk_id, wanted)
    assert (report.num_changed, report.num_already_over, report.num_failed) == (3, 0, 0)
    assert await states(client, *before, after) == ["cancelled"] * 3 + ["scheduled"]


async def test_running_jobs_are_counted_apart_and_then_by_how_they_ended(
    client: AsyncClient, told_node: FakeNode
) -> None:
    ids = [(await client.submit("hello", tags=["r"], background=True)).id for _ in range(4)]
    waiting = (await client.submit("hello", tags=["r"], **LATER)).id
    cursor, runs = await client.completions_cursor(), await told_node.take(4)
    dry = await client.control.bulk("cancel", tag="r", dry_run=True)
    assert (dry.state, dry.num_changed, dry.num_asked_to_stop) == ("ended", 1, 4)
    wanted = JobFilter("default", tag="r")
    bulk_id = await client.control.start(JobChange("cancel"), wanted, owner="default")
    await client.control.continue_bulk(bulk_id, [POOL])
    report = await client.control.report(bulk_id)
    assert (report.state, report.num_changed, report.num_asked_to_stop) == ("running", 1, 4)
    # A second action does not count the same jobs again.
    second = await client.control.bulk("cancel", tag="r")
    assert (second.num_changed, second.num_asked_to_stop, second.num_already_over) == (0, 0, 4)
    await runs[0].finish("succeeded")
    for run in runs[1:]:
        await run.finish("cancelled", "cancelled")
    report = await client.control.finished(bulk_id, wanted)
    assert (report.state, report.num_changed, report.num_asked_to_stop) == ("ended", 4, 0)
    assert (report.num_already_over, report.num_failed) == (1, 0)
    assert sorted(await states(client, *ids, waiting)) == ["cancelled"] * 4 + ["succeeded"]
    # The feed says the same.
    told = Counter[str]()
    async with aclosing(client.completions(cursor, tag="r")) as entries:
        async for _, entry in entries:
            told[entry.state] += 1
            if told.total() == len(ids) + 1:
                break
    assert told == {"cancelled": report.num_changed, "succeeded": report.num_already_over}


async def test_a_cancellation_without_a_filter_must_say_that_it_means_all_jobs(
    client: AsyncClient, told_node: FakeNode
) -> None:
    ids = [(await client.submit("hello", **LATER)).id for _ in range(3)]
    with pytest.raises(RequestError, match="all_jobs") as caught:
        await client.control.bulk("cancel")
    assert caught.value.param == "filter"
    assert await states(client, *ids) == ["scheduled"] * 3
    assert (await client.control.bulk("cancel", dry_run=True)).num_changed == 3
    assert (await client.control.bulk("cancel", all_jobs=True)).num_changed == 3
    assert await states(client, *ids) == ["cancelled"] * 3


async def test_jobs_are_rescheduled_and_reclassed_in_bulk(client: AsyncClient, told_node: FakeNode) -> None:
    ids = [(await client.submit("hello", **LATER)).id for _ in range(10)]
    running = await client.submit("hello", background=True)
    await told_node.take()
    report = await client.control.bulk("change_class", to_priority="standard", to_background=False)
    assert (report.num_changed, report.num_failed) == (10, 0)
    status = await client.status(ids[0])
    assert (status.priority, status.is_background) == (Priority.STANDARD, False)
    report = await client.control.bulk("reschedule", not_before_s=0, state=["scheduled", "running"])
    assert (report.num_changed, report.num_failed, report.failures) == (10, 1, ((running.id, "job_running"),))
    assert {run.taken.job_id for run in await told_node.take(10)} == set(ids)


async def test_failed_jobs_are_retried_once_whoever_continues_the_action(
    client: AsyncClient, told_node: FakeNode
) -> None:
    ids = [await failed(client, told_node, tags=["x"]) for _ in range(12)]
    retried_before = await client.control.retry(ids[3])
    dry = await client.control.bulk("retry", tag="x", state="failed", dry_run=True)
    assert dry.num_changed == 12
    wanted = JobFilter("default", states=("failed",), tag="x")
    bulk_id = await client.control.start(JobChange("retry"), wanted, owner="default")
    # Another process has submitted some retries, and was killed before it said so.
    held = await client.servers.directory.steering.claim(POOL, bulk_id, "killed")
    assert held is not None
    for job_id in ids[-1:-4:-1]:
        assert await client.control._retried(held, job_id) == "changed"
    assert (await client.control.report(bulk_id)).num_changed == 0
    await client.control.continue_bulk(bulk_id, [POOL])
    assert (await client.control.report(bulk_id)).state == "running"
    await client.servers.directory.redis.hset(keys.bulk(POOL, bulk_id), "lease_until", 0)  # as if LEASE_MS had passed
    report = await client.control.finished(bulk_id, wanted)
    assert (report.num_changed, report.num_already_over, report.num_failed) == (11, 1, 0)
    queued = list((await client.jobs(state="queued", limit=100)).jobs)
    assert sorted(status.retry_of or "" for status in queued) == sorted(ids)
    assert retried_before.job_id in {status.job_id for status in queued}
    assert LEASE_MS == 10_000


async def test_a_process_that_lost_its_lease_changes_nothing(client: AsyncClient, told_node: FakeNode) -> None:
    ids = [(await client.submit("hello", **LATER)).id for _ in range(3)]
    wanted = JobFilter("default", pool=POOL)
    bulk_id = await client.control.start(JobChange("cancel"), wanted, owner="default")
    steering = client.servers.directory.steering
    first = await steering.claim(POOL, bulk_id, "first")
    assert first is not None
    assert await steering.claim(POOL, bulk_id, "second") is None
    await client.servers.directory.redis.hset(keys.bulk(POOL, bulk_id), "lease_until", 0)
    assert await steering.claim(POOL, bulk_id, "second") is not None
    assert not await steering.step(first, ids, cursor="", to="x")
    assert set(await states(client, *ids)) == {"scheduled"}
    await client.control.stop(bulk_id)
    report = await client.control.report(bulk_id)
    assert (report.state, report.num_changed) == ("cancelled", 0)
    assert await client.servers.directory.redis.zcard(keys.bulks(POOL)) == 0


async def test_classes_have_names_and_numbers_and_times_have_three_forms(
    client: AsyncClient, told_node: FakeNode
) -> None:
    forms: tuple[Any, ...] = (600, timedelta(minutes=10), datetime.now(UTC) + timedelta(minutes=10))
    for given, priority in zip(forms, ("batch", 2, Priority.BATCH), strict=True):
        job = await client.submit("hello", not_before_s=given, deadline_s=timedelta(hours=1), priority=priority)
        status = await client.status(job.id)
        assert (status.state, status.priority) == ("scheduled", Priority.BATCH)
        begins_ms = await client.servers.directory.redis.hget(keys.job(job.id), "submitted")
        assert 590_000 < int(begins_ms) - status.accepted_ms <= 600_001
        for again in forms:
            await client.control.reschedule(job.id, again)
    past = await client.submit("hello", not_before_s=datetime.now(UTC) - timedelta(hours=1), priority="interactive")
    assert (await client.status(past.id)).state == "queued"
    for name in ("not_before_s", "deadline_s"):
        with pytest.raises(RequestError, match="has no time zone") as naive:
            await client.submit("hello", **{name: datetime(2100, 1, 1)})  # type: ignore[arg-type]
        assert naive.value.param == name
    with pytest.raises(RequestError, match="has no time zone"):
        await client.control.reschedule(past.id, datetime(2100, 1, 1))
    for wrong in ("urgent", 3, -1, True, 1.5):
        with pytest.raises(RequestError, match=r"interactive \(0\), standard \(1\), batch \(2\)") as caught:
            await client.submit("hello", priority=wrong)  # type: ignore[arg-type]
        assert caught.value.param == "priority"


async def test_wrong_actions_name_their_field(client: AsyncClient, told_node: FakeNode) -> None:
    for given, param in (
        ({"action": "explode"}, "action"),
        ({"action": "cancel", "tag": "a b"}, "tag"),
        ({"action": "reschedule"}, "not_before_s"),
        ({"action": "cancel", "state": "unknown"}, "state"),
    ):
        with pytest.raises(RequestError) as caught:
            await client.control.bulk(**given)  # type: ignore[arg-type]
        assert caught.value.param == param
    with pytest.raises(NotFoundError):
        await client.control.bulk("cancel", pool="unknown")


async def test_tags_and_metadata_above_their_limits_name_field_and_limit(
    client: AsyncClient, told_node: FakeNode
) -> None:
    for given, param, limit in (
        ({"tags": list("abcde")}, "tags", "4"),
        ({"tags": ["a b"]}, "tags[0]", "pattern"),
        ({"tags": ["x" * 65]}, "tags[0]", "64"),
        ({"tags": "ab"}, "tags", "list"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "16"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "64"),
    ):
        with pytest.raises(RequestError) as caught:
            await client.submit("hello", **given)
        assert (caught.value.param or "").startswith(param)
        assert limit in caught.value.message


async def test_sync_client_steers_too(redis_url: str, told_node: FakeNode) -> None:
    def work() -> None:
        with Client(redis_url) as client:
            job = client.submit("hello", tags=["s"], **LATER)
            client.control.reschedule(job.id, 1200)
            client.control.change_class(job.id, "standard")
            assert client.status(job.id).priority is Priority.STANDARD
            assert client.jobs(tag="s", state="scheduled").jobs[0].job_id == job.id
            assert [pause.tenant for pause in client.control.pause(POOL, tenant="default")] == ["default"]
            assert client.control.resume(POOL, tenant="default") == client.control.paused() == []
            assert client.control.bulk("cancel", tag="s").num_changed == 1
            assert client.control.retry(job.id).state == "queued"

    await asyncio.to_thread(work)
