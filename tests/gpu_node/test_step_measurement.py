"""A node measures its steps at its start, so that a pool that has computed nothing knows its pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes.processes.running_node import PATIENCE_S, running_node
from uuid_utils import uuid7

from penstock.contract.errors import BusyError
from penstock.contract.job import JobDef, SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.queue.broker.connection import connect
from penstock.queue.broker.producer import ProducerBroker, Submission

POOL = "measured"
MakeEngine = Callable[..., Engine]


def new_job(max_tokens: int = 20) -> JobDef:
    return JobDef(id=f"{POOL}.{uuid7()}", prompt="hello", params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


async def test_a_cold_pool_refuses_foreground_work_that_would_wait_too_long(
    redis_url: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(dtype="bfloat16")
    async with running_node(redis_url, engine, pool=POOL, max_num_seqs=4) as node, connect(redis_url) as redis:
        broker = ProducerBroker(redis)
        (before,) = (await broker.pressure(POOL)).nodes
        assert before.drain_cost_per_s == 0
        async with asyncio.timeout(PATIENCE_S):
            await node.measure_steps()
            while not (pressure := (await broker.pressure(POOL)).nodes[0]).drain_cost_per_s:
                await asyncio.sleep(0.02)
        assert pressure.background_cost_per_s == pressure.drain_cost_per_s
        assert not engine.has_work()
        assert len(node.ledger) == 0
        hour = round(3600 * pressure.drain_cost_per_s)
        # The node holds four; the next one is queued, and one more would wait for it.
        with pytest.raises(BusyError, match="would wait about") as caught:
            for _ in range(6):
                await broker.submit(Submission(new_job(max_tokens=500), hour))
        value, high = caught.value.estimated_wait_ms, caught.value.estimated_wait_p90_ms
        assert value is not None and high is not None
        assert value > 3600_000 and high > 2 * value, "nothing has been measured with jobs yet"


async def test_a_job_ends_the_measurement(redis_url: str, make_engine: MakeEngine) -> None:
    engine = make_engine(dtype="bfloat16")
    async with running_node(redis_url, engine, pool=POOL) as node, connect(redis_url) as redis:
        broker = ProducerBroker(redis)
        job = new_job(max_tokens=400)
        await broker.submit(Submission(job, 400))
        async with asyncio.timeout(PATIENCE_S):
            while not len(node.ledger):
                await asyncio.sleep(0.005)
            await node.measure_steps()
            while (await broker.status(job.id, "default")).outcome is None:
                await asyncio.sleep(0.02)
        assert (await broker.pressure(POOL)).nodes[0].drain_cost_per_s == 0
        assert engine.num_requests == 0


async def test_an_engine_that_cannot_run_the_phases_serves_without_them(
    redis_url: str, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = make_engine(dtype="bfloat16", max_model_len=8)
    async with running_node(redis_url, engine, pool=POOL) as node:
        async with asyncio.timeout(PATIENCE_S):
            await node.measure_steps()
        assert not engine.has_work()
    assert "cannot be measured" in caplog.text
