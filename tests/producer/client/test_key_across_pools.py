"""One idempotency key and several pools of one model: repeated submissions meet in one pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from fakes.fake_node import MODEL, FakeNode

from penstock.contract.errors import RequestError
from penstock.producer.client import AsyncClient

KEYS = tuple(f"key {number}" for number in range(12))


@pytest.fixture
async def nodes(redis_url: str) -> AsyncIterator[dict[str, FakeNode]]:
    """Two pools of one model. A third one may join; it is closed with them."""
    async with AsyncExitStack() as stack:
        nodes = {pool: FakeNode(redis_url, auto=False, pool=pool) for pool in "abc"}
        for node in nodes.values():
            stack.push_async_exit(node)
        await nodes["a"].join()
        await nodes["b"].join()
        yield nodes


async def submitted(client: AsyncClient, key: str, **options: str) -> str:
    job = await client.submit("hello", max_tokens=3, model=MODEL, idempotency_key=key, **options)  # type: ignore[arg-type]
    return job.id


async def test_simultaneous_submissions_with_one_key_are_one_job(redis_url: str, nodes: dict[str, FakeNode]) -> None:
    async with AsyncClient(redis_url) as one, AsyncClient(redis_url) as other:
        asked = [(key, client) for key in KEYS for client in (one, other, one)]
        job_ids = await asyncio.gather(*(submitted(client, key) for key, client in asked))
        assert len(set(job_ids)) == len(KEYS)
        assert {job_id[0] for job_id in job_ids} == {"a", "b"}  # keys are spread over the pools

        same = await other.submit_unread("hello", max_tokens=3, model=MODEL, idempotency_key=KEYS[0])
        assert (same.job_id, same.existed) == (job_ids[0], True)
        assert await submitted(one, KEYS[0], tenant="other") not in job_ids


async def test_repeated_submission_finds_its_job_after_its_pool_died_and_another_joined(
    redis_url: str, nodes: dict[str, FakeNode]
) -> None:
    async with AsyncClient(redis_url) as client:
        job_ids = [await submitted(client, key) for key in KEYS]
    await nodes["c"].join()
    await nodes["a"].broker.leave()
    async with AsyncClient(redis_url) as later:
        assert [await submitted(later, key) for key in KEYS] == job_ids
        assert {(await submitted(later, f"new {key}"))[0] for key in KEYS} == {"b", "c"}


@pytest.mark.parametrize(("key", "tenant"), [("", "t"), ("k" * 257, "t"), ("\ud800", "t"), ("k", "no tenant\n")])
async def test_wrong_key_or_tenant_is_refused_by_name(
    redis_url: str, nodes: dict[str, FakeNode], key: str, tenant: str
) -> None:
    async with AsyncClient(redis_url) as client:
        with pytest.raises(RequestError) as caught:
            await submitted(client, key, tenant=tenant)
    assert caught.value.param in ("idempotency_key", "tenant")
