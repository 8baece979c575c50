"""Jobs of a pool that has no live node at the moment."""

from __future__ import annotations

import pytest
from fakes.fake_node import FakeNode, fake_tokens

from penstock.contract.errors import JobExpiredError, UnavailableError
from penstock.producer.client import AsyncClient, ClientSettings


async def test_a_job_may_wait_for_the_first_node(client: AsyncClient, told_node: FakeNode, redis_url: str) -> None:
    await told_node.broker.leave()
    await client.pools(renewed=True)
    with pytest.raises(UnavailableError, match="queue_without_node"):
        await client.submit("hello")
    waiting = await client.submit("hello", max_tokens=3, queue_without_node=True)
    expiring = await client.submit("hello", deadline_s=0.3, queue_without_node=True)
    assert (await waiting.status()).state == "queued"
    with pytest.raises(JobExpiredError):
        await expiring.result(timeout=10)
    async with FakeNode(redis_url):
        assert (await waiting.result(timeout=10)).token_ids == tuple(fake_tokens(waiting.id, 3))


async def test_a_client_may_queue_all_its_jobs_without_a_node(redis_url: str, told_node: FakeNode) -> None:
    await told_node.broker.leave()
    async with AsyncClient(redis_url, settings=ClientSettings(queue_without_node=True)) as client:
        assert (await (await client.submit("hello")).status()).state == "queued"
        with pytest.raises(UnavailableError):
            await client.submit("hello", queue_without_node=False)
