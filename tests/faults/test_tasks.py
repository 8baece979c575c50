"""A task whose node ends continues on another node, and its caller gets one answer."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from fakes.processes.node_process import NodeProcess
from redis.asyncio import Redis

from penstock import AsyncClient
from penstock.contract.tasks import Tokenize, Tokenized
from penstock.gpu_node.taking.preparation import MAX_CHARS_ON_LOOP
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit

TEXT = "x" * (MAX_CHARS_ON_LOOP + 1)


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_tokenization_of_an_ended_node_is_answered_by_another(
    redis: Redis, redis_url: str, end: Literal["kill", "stop"]
) -> None:
    async with AsyncClient(redis_url) as client:
        with NodeProcess(
            redis_url, pool="moved", name="first", lease_ms=3000, drain_s=0.1, tokenizer_hangs=True
        ) as node:
            job = await client.submit(TEXT, model="moved", task=Tokenize())
            await asyncio.to_thread(node.wait_event, "hangs")
            await asyncio.to_thread(getattr(node, end))
        with NodeProcess(redis_url, pool="moved", name="second", lease_ms=3000):
            result = await asyncio.wait_for(job.result(), 60)
        assert result.output == (await client.result(job.id)).output
        assert isinstance(result.output, Tokenized)
        assert len(result.output.token_ids) == len(TEXT)
        status = await job.status()
        assert (status.state, status.num_chunks) == ("succeeded", 1)
        assert (status.losses, status.preemptions) == ((1, 0) if end == "kill" else (0, 1))
    assert await audit(AdminBroker(redis), "moved") == []
