"""Calls of a node that Redis refuses, because of damaged data or a bug: they end a round each, and no node."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import PATIENCE_S, running_node
from fakes.waiting import until
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

        def is_troubled(node: NodePressure) -> bool:
            return call in node.troubles.get(SCRIPTS_PART, "").replace("heartbeat", "sweep")

        pressure = await until(lambda: broker.pressure(POOL), lambda seen: any(map(is_troubled, seen.nodes)))
        assert not next(filter(is_troubled, pressure.nodes)).takes_jobs
        refuses = False
        await until(lambda: broker.pressure(POOL), lambda seen: all(one.takes_jobs for one in seen.nodes))
        ended = await until(lambda: broker.status(job.id, "default"), lambda seen: seen.outcome is not None)
        assert ended.outcome.state == "succeeded"
        assert node.held_jobs.counts.failed_rounds > 0
