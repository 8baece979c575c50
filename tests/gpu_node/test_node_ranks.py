"""A node with ranks: a job that kills one each time, and what heartbeat and gateway say while the ranks are started."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fakes.engine_runs import kill_a_rank_at
from fakes.processes.running_node import running_node
from fakes.waiting import until
from redis.asyncio import Redis

from penstock.contract.errors import JobFailedError
from penstock.contract.job import SamplingParams
from penstock.contract.pool import RANKS_PART
from penstock.gateway.app import create_app
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.model.native import ranks as native_ranks
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import StepHandle, StepPlan
from penstock.gpu_node.model.ranks.processes import RankProcess
from penstock.gpu_node.service import heartbeat
from penstock.producer.client import AsyncClient
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit

POOL = "ranks"
PATIENCE_S = 60.0
INTERVAL_S = 40.0
POISON = 6
"""A token that no other prompt has."""
HELD_AT = 40
"""A position at which the ranks wait until their node is stopped."""
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=80, ignore_eos=True)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """An engine of two ranks, of which one is a process."""
    engine = make_engine(tensor_parallel_size=2, num_threads=2, lease_ms=60_000)
    yield engine
    _runner(engine).close()


def _runner(engine: Engine) -> NativeRunner:
    assert isinstance(engine._runner, NativeRunner)
    return engine._runner


async def test_a_job_that_kills_a_rank_each_time_is_a_dead_letter_and_its_neighbours_lose_no_token(
    redis_url: str, redis: Redis, engine: Engine, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Any] = [[20 + i, 30, 40 + i] for i in range(4)]
    wanted = [one.choices[0].token_ids for one in make_engine().generate(prompts, SAMPLED)]
    runner = _runner(engine)
    kill_a_rank_at(POISON, runner, monkeypatch)
    async with running_node(redis_url, engine, pool=POOL, avoid_ms=0), AsyncClient(redis_url) as client:
        others = [await client.submit(prompt, model=POOL, params=SAMPLED) for prompt in prompts]
        poison = await client.submit([POISON, 1, 2], model=POOL, params=SAMPLED)
        with pytest.raises(JobFailedError) as caught:
            await asyncio.wait_for(poison.result(), PATIENCE_S)
        assert caught.value.code == "node_lost"
        found = [(await asyncio.wait_for(job.result(), PATIENCE_S)).choices[0].token_ids for job in others]
        assert found == wanted
        assert runner.ranks.num_starts >= 3
        assert await audit(AdminBroker(redis), POOL) == []


async def test_heartbeat_and_ready_tell_the_truth_while_ranks_are_lost(
    redis_url: str, engine: Engine, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()

    def start(*given: Any) -> RankProcess:
        assert may_start.wait(PATIENCE_S)
        return RankProcess(*given)

    (wanted,) = (one.choices[0].token_ids for one in make_engine().generate([[20, 30, 40]], SAMPLED))
    monkeypatch.setattr(native_ranks, "RankProcess", start)
    monkeypatch.setattr(heartbeat, "MAX_INTERVAL_S", INTERVAL_S)
    async with (
        running_node(redis_url, engine, pool=POOL, avoid_ms=0, lease_ms=240_000),
        AsyncClient(redis_url) as client,
    ):
        transport = httpx.ASGITransport(create_app(GatewaySettings(), client))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as gateway:

            async def until_ready_is(status: int) -> list[str]:
                await until(lambda: gateway.get("/ready"), lambda seen: seen.status_code == status)
                (node,) = (await client.pressure(POOL)).nodes
                return [node.troubles[RANKS_PART]] if RANKS_PART in node.troubles else []

            assert await until_ready_is(200) == []
            job = await client.submit([20, 30, 40], model=POOL, params=SAMPLED)
            tokens, statuses = list[int](), list[list[str]]()
            async for chunk in job.chunks():
                tokens += chunk.token_ids
                if len(tokens) > 20 and not statuses:
                    began_s = time.monotonic()
                    os.kill(_runner(engine).rank_pids[0], signal.SIGKILL)
                    statuses.append(await until_ready_is(503))
                    may_start.set()
                    await until_ready_is(200)
                    assert time.monotonic() - began_s < INTERVAL_S / 2, "it is told before a heartbeat is due"
            assert statuses == [["are being started again: rank 1 ended"]]
            assert tuple(tokens) == wanted


async def test_a_node_of_another_shape_continues_a_job_to_the_bit(
    redis_url: str, engine: Engine, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, tokens, is_stopped = make_engine(), list[int](), threading.Event()
    runner = _runner(engine)
    submit = runner.submit

    def held(plan: StepPlan) -> StepHandle:
        if plan.positions.max() >= HELD_AT:
            assert is_stopped.wait(PATIENCE_S)
            time.sleep(0.2)  # The node gives the job back before the ranks have made the rest.
        return submit(plan)

    monkeypatch.setattr(runner, "submit", held)
    (wanted,) = (one.choices[0].token_ids for one in alone.generate([[20, 30, 40]], SAMPLED))
    async with AsyncClient(redis_url) as client, running_node(redis_url, engine, pool=POOL, drain_s=0) as first:
        job = await client.submit([20, 30, 40], model=POOL, params=SAMPLED)
        chunks = job.chunks()
        while len(tokens) < 20:
            tokens += (await anext(chunks)).token_ids
        async with running_node(redis_url, alone, pool=POOL):
            first.stop()
            is_stopped.set()
            async for chunk in chunks:
                tokens += chunk.token_ids
            assert len(first.held_jobs) == 0 and engine.stats().decode_tokens < len(tokens), (
                "the other one made the rest"
            )
    assert tuple(tokens) == wanted
