"""Jobs through the client: listed in pages, shown with their ledgers, submitted without being read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.fake_node import FakeNode

from penstock.contract.errors import NotFoundError, RequestError, UnavailableError
from penstock.producer.client import AsyncClient, AsyncJob, Client
from penstock.producer.client.many import SUBMITTED_AT_ONCE, submit_all
from penstock.producer.client.sync import Job


async def test_jobs_are_listed_in_pages_with_their_ledgers(client: AsyncClient, node: FakeNode) -> None:
    jobs = [await client.submit("hello", max_tokens=2, tenant="acme") for _ in range(3)]
    for job in jobs:
        await job.result()
    await client.submit("hello", tenant="rival")
    first = await client.jobs(tenant="acme", limit=2)
    assert [status.job_id for status in first.jobs] == [jobs[2].id, jobs[1].id]
    rest = await client.jobs(tenant="acme", limit=2, after=first.next_after)
    assert ([status.job_id for status in rest.jobs], rest.next_after) == ([jobs[0].id], None)
    assert {status.state for status in first.jobs} == {"succeeded"}
    for status in first.jobs:
        events = [event.event for event in status.ledger.events()]
        assert events == ["queued", "taken", "first_token", "finished"]
        assert status.ledger == (await client.status(status.job_id, tenant="acme")).ledger
    assert (await client.jobs(tenant="acme", state="queued")).jobs == ()
    assert (await client.jobs()).jobs == ()
    with pytest.raises(RequestError) as caught:
        await client.jobs(limit=0)
    assert caught.value.param == "limit"


async def test_job_is_submitted_without_a_reader_and_its_result_is_decoded_on_access(
    client: AsyncClient, told_node: FakeNode
) -> None:
    submitted = await client.submit_unread("hello", max_tokens=2, idempotency_key="one")
    again = await client.submit_unread("hello", max_tokens=2, idempotency_key="one")
    assert (submitted.existed, again.existed, again.job_id) == (False, True, submitted.job_id)
    assert await client.packed_result(submitted.job_id) is None
    assert client.stats.chunks == 0
    with pytest.raises(NotFoundError):
        await client.packed_result(submitted.job_id, tenant="rival")
    assert await client.cancel(submitted.job_id) == "cancelled"
    result = await client.packed_result(submitted.job_id)
    assert result is not None and result.outcome.state == "cancelled"


async def test_sync_client_lists_jobs_too(redis_url: str, node: FakeNode) -> None:
    def work() -> None:
        with Client(redis_url) as client:
            job = client.submit("hello", max_tokens=2)
            job.result()
            (status,) = client.jobs(state="succeeded").jobs
            assert (status.job_id, status.ledger.node_id) == (job.id, client.status(job.id).ledger.node_id)

    await asyncio.to_thread(work)


async def test_many_jobs_are_submitted_with_an_outcome_for_each(client: AsyncClient, told_node: FakeNode) -> None:
    requests: list[Any] = [
        "hello",
        {"prompt": [1, 2], "max_tokens": 3, "idempotency_key": "own"},
        {"prompt": "x", "ttl_s": 0},
        {"max_tokens": 3},
        {"prompt": "x", "heat": 1},
        [{"role": "user", "content": "hello"}],
    ]
    found = await client.submit_many(requests, max_tokens=2, idempotency_key="list")
    refused = [one.param for one in found if isinstance(one, RequestError)]
    assert refused == ["ttl_s", "prompt", "heat"]
    jobs = [one.id for one in found if isinstance(one, AsyncJob)]
    assert [isinstance(one, AsyncJob) for one in found] == [True, True, False, False, False, True]
    again = await client.submit_many(requests, max_tokens=2, idempotency_key="list")
    assert [one.id for one in again if isinstance(one, AsyncJob)] == jobs
    assert (await client.submit("hello", max_tokens=2, idempotency_key="list:0")).id == jobs[0]
    assert (await client.submit([1, 2], max_tokens=3, idempotency_key="own")).id == jobs[1]
    with pytest.raises(RequestError) as caught:
        await client.submit_many(["x"], job_id="m.x")  # type: ignore[call-arg]
    assert caught.value.param == "job_id"
    with pytest.raises(RequestError):
        await client.submit_many("hello")
    assert await client.submit_many([]) == []


async def test_the_rest_of_a_list_is_not_tried_once_the_client_cannot_submit(client: AsyncClient) -> None:
    num_calls = 0

    async def submit(prompt: Any, **options: Any) -> str:
        nonlocal num_calls
        num_calls += 1
        raise UnavailableError("Redis is unreachable", code="redis_away")

    outcomes = await submit_all(submit, ["x"] * 1000, {})
    assert len(outcomes) == 1000
    assert all(isinstance(one, UnavailableError) for one in outcomes)
    assert 1 <= num_calls <= SUBMITTED_AT_ONCE


async def test_sync_client_submits_many_jobs_too(redis_url: str, node: FakeNode) -> None:
    def work() -> None:
        with Client(redis_url) as client:
            job, error = client.submit_many(["hello", {"prompt": "x", "ttl_s": -1}], max_tokens=2)
            assert isinstance(job, Job)
            assert len(job.result().choices[0].token_ids) == 2
            assert isinstance(error, RequestError)

    await asyncio.to_thread(work)
