"""A client gives a Redis that lost writes its accepted jobs again, and repeats its cancellations and deletions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes.fake_node import POOL, FakeNode
from fakes.queue.older_history import saved, set_back
from fakes.waiting import until
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.errors import NotFoundError
from penstock.contract.job import JobDef, ResponseRecord
from penstock.producer.client import AsyncClient, ClientSettings
from penstock.producer.client.kept import RecentSubmissions
from penstock.producer.client.mailbox import Feed
from penstock.queue.broker import history
from penstock.queue.broker.producer import ProducerBroker, Submission, Submitted


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LOOK_S", 0.02)


@pytest.fixture
async def looked(redis: Redis, told_node: FakeNode, quick_client: AsyncClient) -> AsyncIterator[AsyncClient]:
    """A client that knows the present history, beside a node that does nothing by itself."""
    watch = quick_client.servers.directory.renewal._watch
    await until(lambda: watch.is_compared)
    yield quick_client


async def state_of(redis: Redis, job_id: str) -> str:
    try:
        return (await ProducerBroker(redis).status(job_id, "default")).state
    except NotFoundError:
        return ""


@pytest.mark.parametrize("keeps_handle", [True, False])
async def test_lost_jobs_are_submitted_again_under_their_ids(
    redis: Redis, looked: AsyncClient, keeps_handle: bool
) -> None:
    before = await saved(redis)
    if keeps_handle:
        job = await looked.submit("Hi", max_tokens=5)
        job_id = job.id
    else:
        job_id = (await looked.submit_unread("Hi", max_tokens=5, idempotency_key="key")).job_id
    await set_back(redis, before)

    async def is_queued() -> bool:
        return await state_of(redis, job_id) == "queued"

    await until(is_queued)
    assert looked.stats.resubmits == 1


async def test_a_lost_job_whose_key_names_another_job_by_now_is_given_up(
    redis: Redis, looked: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    empty = await saved(redis)
    await ProducerBroker(redis).submit(
        Submission(JobDef(id=f"{POOL}.{uuid7()}", prompt="Ho", idempotency_key="key"), 10)
    )
    before = await saved(redis)
    await set_back(redis, empty)
    job_id = (await looked.submit_unread("Hi", max_tokens=5, idempotency_key="key")).job_id
    await set_back(redis, before)
    await until(lambda: "a lost job cannot be submitted again" in caplog.text)
    assert await state_of(redis, job_id) == ""


@pytest.mark.parametrize("lost", ["submission", "cancellation"])
async def test_a_cancellation_is_repeated_behind_its_job(redis: Redis, looked: AsyncClient, lost: str) -> None:
    before = await saved(redis)
    job_id = (await looked.submit_unread("Hi", max_tokens=5)).job_id
    if lost == "cancellation":
        before = await saved(redis)
    assert await looked.cancel(job_id) == "cancelled"
    await set_back(redis, before)

    async def is_cancelled() -> bool:
        return await state_of(redis, job_id) == "cancelled"

    await until(is_cancelled)


async def test_a_lost_deletion_of_a_response_is_repeated(redis: Redis, looked: AsyncClient) -> None:
    submitted = await looked.submit_unread("Hi", max_tokens=5, response=ResponseRecord(b"record", 60_000))
    before = await saved(redis)
    await looked.servers.of_job(submitted.job_id).responses.delete(submitted.job_id, "default")
    await set_back(redis, before)

    async def is_deleted() -> bool:
        try:
            await looked.servers.of_job(submitted.job_id).responses.read(submitted.job_id, "default")
        except NotFoundError:
            return True
        return False

    await until(is_deleted)


async def test_without_time_to_keep_them_unread_jobs_stay_lost(
    redis: Redis, redis_url: str, told_node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(redis_url, settings=ClientSettings(failover_keep_s=0)) as client:
        watch = client.servers.directory.renewal._watch
        await until(lambda: watch.is_compared)
        before = await saved(redis)
        submitted = await client.submit_unread("Hi", max_tokens=5)
        await asyncio.sleep(0.001)
        await set_back(redis, before)
        await until(lambda: "redis has a new history" in caplog.text and watch.is_compared)
        assert await state_of(redis, submitted.job_id) == ""


async def test_a_job_whose_end_its_reader_has_is_not_submitted_again(
    redis: Redis, node: FakeNode, quick_client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    watch = quick_client.servers.directory.renewal._watch
    await until(lambda: watch.is_compared)
    before = await saved(redis)
    job = await quick_client.submit("Hi", max_tokens=3)
    async for _ in job.stream():
        pass
    await set_back(redis, before)
    await until(lambda: "redis has a new history" in caplog.text and watch.is_compared)
    assert await state_of(redis, job.id) == "" and not quick_client.stats.resubmits


def submission() -> Submission:
    return Submission(JobDef(id=f"m.{uuid7()}", prompt="x" * 1000), 10)


async def test_what_is_kept_of_submissions_is_bounded_and_what_has_ended_goes() -> None:
    recent = RecentSubmissions(keep_s=30, max_bytes=20_000)
    for _ in range(100):
        recent.accepted(one := submission(), Submitted("queued", 0, True, one.job.id, False))
    assert 0 < len(recent.open()) <= 20
    feeds = dict[str, Feed]()

    def feed_of(job_id: str) -> Feed:
        return feeds.setdefault(job_id, Feed(job_id))

    recent = RecentSubmissions(keep_s=30, max_bytes=1 << 30)
    for number in range(600):
        one = submission()
        recent.accepted(one, Submitted("queued", 0, True, one.job.id, False), feed_of)
        feeds[one.job.id].ended = number > 0
    assert len(recent.open()) == 1 and len(recent._recent) < 300
