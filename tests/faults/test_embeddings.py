"""An embedding whose node is killed is computed by another node, and its caller gets one answer."""

from __future__ import annotations

import asyncio

import pytest
from fakes.processes.node_process import NodeProcess
from fakes.processes.reference_engine import fake_embedding
from fakes.waiting import until
from redis.asyncio import Redis

from penstock import AsyncClient
from penstock.contract.tasks import Embed, Embedding
from penstock.producer.client import AsyncJob
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit


async def until_taken(job: AsyncJob) -> None:
    await until(job.status, lambda seen: seen.state == "running")


async def test_embedding_of_a_killed_node_is_computed_by_another(redis: Redis, redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        with NodeProcess(redis_url, pool="moved", name="first", lease_ms=3000, step_s=5.0) as node:
            job = await client.submit("Hello", model="moved", task=Embed())
            await until_taken(job)
            await asyncio.to_thread(node.kill)
        with NodeProcess(redis_url, pool="moved", name="second", lease_ms=3000):
            result = await asyncio.wait_for(job.result(), 60)
        assert result.output == (await client.result(job.id)).output
        assert isinstance(result.output, Embedding)
        assert result.output.values == pytest.approx(fake_embedding(b"Hello", Embed()), abs=1e-6)
        assert result.usage is not None
        assert result.usage.prompt_tokens == 5
        status = await job.status()
        assert (status.state, status.num_chunks) == ("succeeded", 1)
        assert (status.losses, status.preemptions) == (1, 0)
    assert await audit(AdminBroker(redis), "moved") == []
