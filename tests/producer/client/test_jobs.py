"""Jobs through the client: listed in pages, shown with their ledgers, submitted without being read."""

from __future__ import annotations

import asyncio

import pytest
from fakes.fake_node import FakeNode

from penstock.contract.errors import NotFoundError, RequestError
from penstock.producer.client import AsyncClient, Client


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
