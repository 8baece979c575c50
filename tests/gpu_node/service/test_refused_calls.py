"""Calls of a node that Redis refuses, because of damaged data or a bug: they end a round each, and no node."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import PATIENCE_S, running_node
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.errors import DamagedDataError
from penstock.contract.job import JobDef, SamplingParams
from penstock.contract.pool import SCRIPTS_PART, NodePressure
from penstock.queue.broker.node import NodeBroker
from penstock.queue.broker.producer import ProducerBroker, Submission

POOL = "refused"


@pytest.mark.parametrize("call", ["take", "sweep", "emit"])
async def test_a_node_goes_on_after_a_call_that_redis_refuses(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    refuses = True
    original = getattr(NodeBroker, call)

    async def refused(self: NodeBroker, *given: Any, **named: Any) -> Any:
        if refuses:
            raise DamagedDataError("Redis: WRONGTYPE")
        return await original(self, *given, **named)

    broker = ProducerBroker(redis)
    async with (
        running_node(redis_url, cast(Any, ReferenceEngine(step_s=0.05)), pool=POOL) as node,
        asyncio.timeout(PATIENCE_S),
    ):
        monkeypatch.setattr(NodeBroker, call, refused)
        monkeypatch.setattr(NodeBroker, "start_emit", lambda *_: False)
        job = JobDef(
            id=f"{POOL}.{uuid7()}",
            prompt="hello",
            params=SamplingParams(max_tokens=60, ignore_eos=True),
            needs_reader=False,
        )
        await broker.submit(Submission(job, 100))
        troubled: list[NodePressure] = []
        while not troubled:
            pressure = await broker.pressure(POOL)
            troubled = [
                one
                for one in pressure.nodes
                if call in one.troubles.get(SCRIPTS_PART, "").replace("heartbeat", "sweep")
            ]
            await asyncio.sleep(0.02)
        assert not troubled[0].takes_jobs
        refuses = False
        while not all(one.takes_jobs for one in (await broker.pressure(POOL)).nodes):
            await asyncio.sleep(0.02)
        while (outcome := (await broker.status(job.id, "default")).outcome) is None:
            await asyncio.sleep(0.02)
        assert outcome.state == "succeeded"
        assert node.held_jobs.counts.failed_rounds > 0
