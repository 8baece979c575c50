"""Jobs of a pool that has no live node at the moment."""

from __future__ import annotations

import pytest
from fakes.fake_node import FakeNode, fake_tokens

from penstock.contract.errors import BusyError, ConflictError, JobExpiredError, UnavailableError
from penstock.contract.pool import NodePressure
from penstock.producer.client import AsyncClient, ClientSettings


async def test_a_job_may_wait_for_the_first_node(client: AsyncClient, told_node: FakeNode, redis_url: str) -> None:
    await told_node.broker.leave()
    await client.pools(renewed=True)
    with pytest.raises(UnavailableError, match="queue_without_node"):
        await client.submit("hello", background=False)
    waiting = await client.submit("hello", max_tokens=3, background=False, queue_without_node=True)
    expiring = await client.submit("hello", deadline_s=0.3, background=False, queue_without_node=True)
    assert (await waiting.status()).state == "queued"
    with pytest.raises(JobExpiredError):
        await expiring.result(timeout=60)
    async with FakeNode(redis_url):
        assert (await waiting.result(timeout=60)).token_ids == tuple(fake_tokens(waiting.id, 3))


async def test_a_client_may_queue_all_its_jobs_without_a_node(redis_url: str, told_node: FakeNode) -> None:
    await told_node.broker.leave()
    async with AsyncClient(redis_url, settings=ClientSettings(queue_without_node=True)) as client:
        assert (await (await client.submit("hello", background=False)).status()).state == "queued"
        with pytest.raises(UnavailableError):
            await client.submit("hello", background=False, queue_without_node=False)


async def test_repeated_submission_is_the_known_job_after_the_node_has_left(
    client: AsyncClient, told_node: FakeNode, redis_url: str
) -> None:
    job = await client.submit("hello", max_tokens=3, idempotency_key="k")
    await told_node.broker.leave()
    async with AsyncClient(redis_url) as other:
        for key in (None, "another key"):
            with pytest.raises(UnavailableError) as caught:
                await other.submit("hello", max_tokens=3, background=False, idempotency_key=key)
            assert caught.value.code == "no_node"
        assert (await other.submit("hello", max_tokens=3, idempotency_key="k")).id == job.id
        with pytest.raises(ConflictError):
            await other.submit("something else", idempotency_key="k")


async def test_repeated_submission_is_the_known_job_while_the_pool_is_full(
    client: AsyncClient, told_node: FakeNode, redis_url: str
) -> None:
    job = await client.submit("hello", max_tokens=3, background=False)
    same = await client.submit("hello", max_tokens=3, background=False, idempotency_key="k")
    told_node.pressure = NodePressure(told_node.node_id, kv_tokens_available=0, drain_cost_per_s=0.1)
    await told_node.heartbeat()
    async with AsyncClient(redis_url) as other:
        with pytest.raises(BusyError):
            await other.submit("hello", max_tokens=3, background=False, idempotency_key="another key")
        assert (await other.submit("hello", max_tokens=3, idempotency_key="k", tenant="other")).id != same.id
        assert (await other.submit("hello", max_tokens=3, idempotency_key="k")).id == same.id
        assert (await other.submit("hello", max_tokens=3, job_id=job.id)).id == job.id
