"""A node measures its steps at its start, so that a pool that has computed nothing knows its pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes.processes.running_node import PATIENCE_S, running_node
from fakes.waiting import until
from uuid_utils import uuid7

from penstock.contract.errors import BusyError
from penstock.contract.job import JobDef, SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.service.heartbeat import FEW_STEPS
from penstock.queue.broker.connection import connect
from penstock.queue.broker.producer import ProducerBroker, Submission

POOL = "measured"
MakeEngine = Callable[..., Engine]


def new_job(max_tokens: int = 20, *, background: bool = True) -> JobDef:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return JobDef(id=f"{POOL}.{uuid7()}", prompt="hello", params=params, background=background)


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
            found = await until(lambda: broker.pressure(POOL), lambda seen: seen.nodes[0].drain_cost_per_s)
            pressure = found.nodes[0]
        assert pressure.background_cost_per_s == pressure.drain_cost_per_s
        assert pressure.prefix_hit_rate is None, "no job has looked anything up"
        assert not engine.has_work()
        assert len(node.held_jobs) == 0
        cost = round(100 * pressure.drain_cost_per_s)
        # Each of these jobs fills the node, so the second one is queued, and the third one would wait for it.
        submissions = (broker.submit(Submission(new_job(background=False), cost)) for _ in range(20))
        answers = await asyncio.gather(*submissions, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, BusyError)]
        assert refused and "would wait about" in refused[0].message
        value, high = refused[0].estimated_wait_ms, refused[0].estimated_wait_p90_ms
        assert value is not None and high is not None
        assert value > 90_000 and high > 2 * value, "nothing has been measured with jobs yet"


async def test_a_job_ends_the_measurement(redis_url: str, make_engine: MakeEngine) -> None:
    engine = make_engine(dtype="bfloat16")
    async with running_node(redis_url, engine, pool=POOL) as node, connect(redis_url) as redis:
        broker = ProducerBroker(redis)
        job = new_job(max_tokens=400)
        await broker.submit(Submission(job, 400))
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: len(node.held_jobs))
            await node.measure_steps()
            await until(lambda: broker.status(job.id, "default"), lambda seen: seen.outcome is not None)
        assert node._heartbeat.measured_costs is None
        assert engine.num_requests == 0


async def test_a_node_without_a_measurement_has_the_pace_of_its_first_steps(
    redis_url: str, make_engine: MakeEngine
) -> None:
    """A backlog may wait for a node that starts. Nothing but the steps of these jobs tells then what tokens cost."""
    engine = make_engine(dtype="bfloat16")
    async with running_node(redis_url, engine, pool=POOL) as node, connect(redis_url) as redis:
        broker = ProducerBroker(redis)
        # As many steps as are too few: on a fast machine, a short job ends before it is seen in the node's hands.
        await broker.submit(Submission(new_job(max_tokens=FEW_STEPS - 8), FEW_STEPS))
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: len(node.held_jobs))
            await node.measure_steps()
            found = await until(lambda: broker.pressure(POOL), lambda seen: seen.nodes[0].drain_cost_per_s)
            pressure = found.nodes[0]
        assert node._heartbeat.measured_costs is None
        assert pressure.num_steps < FEW_STEPS


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
