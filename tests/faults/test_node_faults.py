"""Nodes hang, sleep past their lease, lose Redis or restart: jobs are requeued, and fenced nodes write nothing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from fakes.processes.node_process import NodeProcess
from fakes.processes.reference_engine import ReferenceEngine, reference_tokens
from fakes.processes.running_node import running_node
from fakes.waiting import until
from faults.tools.proxy import FaultProxy
from faults.tools.road import read
from faults.tools.work import KINDS, PROMPT, Work, check_logs, check_settled, holder, new_work, statuses
from redis.asyncio import Redis

from penstock.contract.job import SamplingParams, seed_of
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.client import AsyncClient
from penstock.queue.broker.node import Capacity, GivenBackJob, NodeBroker
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.wire import decode_request

POOL = "nodes"
SETTINGS: dict[str, Any] = {"pool": POOL, "lease_ms": 3000}
SLOW_STEP_S = 0.2


async def pressure_of(redis: Redis, name: str, reached: Callable[[NodePressure], bool]) -> NodePressure:
    """Wait until a node's own statistics fulfill the condition, and return them."""

    async def found() -> list[NodePressure]:
        nodes = (await ProducerBroker(redis).pressure(POOL)).nodes
        return [node for node in nodes if node.node_id.startswith(f"{name}-") and reached(node)]

    return (await until(found))[0]


async def holders(redis: Redis, works: list[Work]) -> set[str]:
    return {await holder(redis, work.id) for work in works}


# Zombies -----------------------------------------------------------------------------------------


async def test_a_node_that_resumes_after_its_lease_expired_writes_nothing_and_stops(
    redis: Redis, redis_url: str
) -> None:
    works = [new_work(POOL, 100, **kind) for kind in KINDS]
    with NodeProcess(redis_url, step_s=SLOW_STEP_S, name="zombie", **SETTINGS) as zombie:
        async with AsyncClient(redis_url) as client:
            reading = [asyncio.create_task(read(client, work)) for work in works]
            await until(lambda: min(work.num_seen for work in works) >= 5)
            known = await pressure_of(redis, "zombie", lambda node: node.num_jobs == len(works))
            # As of a heartbeat that has just been sent, however late it was.
            fresh = await pressure_of(redis, "zombie", lambda node: node.num_steps > known.num_steps)
            zombie.signal(signal.SIGSTOP)
            with NodeProcess(redis_url, step_s=0.02, name="living", **SETTINGS):
                await until(lambda: holders(redis, works), lambda seen: seen == {"living"})
                zombie.signal(signal.SIGCONT)
                idle = await pressure_of(redis, "zombie", lambda node: node.num_jobs == node.num_running == 0)
                await asyncio.gather(*reading)
            num_chunks = sum([status.num_chunks for status in await statuses(redis, works)])
            assert client.stats.chunks == num_chunks, "nothing was published twice"
        # Those of half a second between its last heartbeat and its sleep, the one that was running, and the one in
        # which it learned of the lost lease.
        assert idle.num_steps - fresh.num_steps <= 0.5 / SLOW_STEP_S + 2
        assert "job belongs to another node" in zombie.log
        for work in works:
            work.check()
        await check_logs(redis, works)
        await check_settled(redis, POOL)


@pytest.mark.slow
async def test_a_partitioned_node_rejoins_and_serves(redis_server: str, redis: Redis, redis_url: str) -> None:
    async with FaultProxy(redis_server.removeprefix("unix://")) as proxy:
        cut_off, living = ReferenceEngine(step_s=0.02), ReferenceEngine(step_s=0.02)
        async with running_node(proxy.url, cut_off, pool=POOL) as first, AsyncClient(redis_url) as client:
            works = [new_work(POOL, 100, **kind) for kind in KINDS]
            reading = [asyncio.create_task(read(client, work)) for work in works]
            await until(lambda: min(work.num_seen for work in works) >= 5)
            proxy.set_black_hole(on=True)
            async with running_node(redis_url, living, pool=POOL):
                await asyncio.gather(*reading)
            proxy.set_black_hole(on=False)
            proxy.cut()
            await until(lambda: client.pressure(POOL), lambda seen: seen.nodes)
            again = new_work(POOL, 20)
            await read(client, again)
            await until(lambda: not len(first.held_jobs))
        for work in (*works, again):
            work.check()
        await check_logs(redis, works)
        await check_settled(redis, POOL)


# Lowered limits ----------------------------------------------------------------------------------


async def test_a_limit_that_the_context_lowered_is_the_same_after_a_takeover(redis: Redis, redis_url: str) -> None:
    prompt, seen = "x" * (ReferenceEngine().max_model_len - 60), list[int]()
    async with AsyncClient(redis_url) as client:
        with NodeProcess(redis_url, step_s=0.02, name="killed", **SETTINGS) as killed:
            job = await client.submit(prompt, max_tokens=1000, lower_max_tokens=True, temperature=0)
            async for chunk in job.stream():
                seen += chunk.token_ids
                if len(seen) >= 10:
                    killed.signal(signal.SIGKILL)
                    break
        with NodeProcess(redis_url, step_s=0.0, name="living", **SETTINGS):
            result = await job.result()
    wanted = reference_tokens(job.id, SamplingParams(max_tokens=60, temperature=0), list(prompt.encode()))
    assert list(result.token_ids) == wanted
    assert (wanted[: len(seen)], result.finish_reason) == (seen, "length")
    assert len(seen) < len(wanted), "the node was killed before the end"


# Hung engines ------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_node_whose_engine_hangs_ends_and_its_jobs_move(redis: Redis, redis_url: str) -> None:
    works = [new_work(POOL, 100, **kind) for kind in KINDS]
    hung = NodeProcess(redis_url, step_s=0.01, name="hung", dies="after step 30 hang", stall_after_s=1.5, **SETTINGS)
    with hung:
        async with AsyncClient(redis_url) as client:
            reading = [asyncio.create_task(read(client, work)) for work in works]
            await until(lambda: holder(redis, works[0].id))
            with NodeProcess(redis_url, step_s=0.01, name="living", **SETTINGS):
                assert await asyncio.to_thread(hung.wait) not in (0, -signal.SIGKILL)
                await asyncio.gather(*reading)
    for work in works:
        work.check()
    await check_settled(redis, POOL)


async def test_a_node_whose_loop_hangs_ends_and_its_jobs_move(redis: Redis, redis_url: str) -> None:
    works = [new_work(POOL, 60, **kind) for kind in KINDS]
    hung = NodeProcess(redis_url, step_s=0.05, name="hung", tokenizer_hangs=True, loop_stall_s=1.0, **SETTINGS)
    with hung:
        async with AsyncClient(redis_url) as client:
            reading = [asyncio.create_task(read(client, work)) for work in works]
            # The first text that it takes hangs it, so it may never take the others.
            await until(lambda: holders(redis, works), lambda seen: "hung" in seen)
            with NodeProcess(redis_url, step_s=0.01, name="living", **SETTINGS):
                assert await asyncio.to_thread(hung.wait) == -signal.SIGABRT
                assert "the event loop stands still" in hung.log
                await asyncio.gather(*reading)
    for work in works:
        work.check()
    await check_settled(redis, POOL)


# Restarts ----------------------------------------------------------------------------------------


async def test_nodes_restarted_one_after_the_other_under_load_lose_nothing(redis: Redis, redis_url: str) -> None:
    works: list[Work] = []
    all_restarted = asyncio.Event()

    async def ask(number: int) -> None:
        while not all_restarted.is_set():
            works.append(new_work(POOL, 60, **KINDS[number % len(KINDS)]))
            await read(client, works[-1])

    def start(name: str) -> NodeProcess:
        return NodeProcess(redis_url, step_s=0.01, name=name, drain_s=0.2, max_num_seqs=8, **SETTINGS).wait_ready()

    nodes = [await asyncio.to_thread(start, f"old{i}") for i in range(2)]
    async with AsyncClient(redis_url) as client:
        asking = [asyncio.create_task(ask(number)) for number in range(20)]
        for number in range(2):
            nodes.append(await asyncio.to_thread(start, f"new{number}"))
            with closing(nodes[number]) as old:
                assert await asyncio.to_thread(old.stop) == 0
        all_restarted.set()
        await asyncio.gather(*asking)
    for work in works:
        work.check()
    assert {(status.state, status.losses) for status in await statuses(redis, works)} == {("succeeded", 0)}
    assert sum([status.preemptions for status in await statuses(redis, works)]) > 0, "some were given back"
    await check_logs(redis, works)
    await check_settled(redis, POOL)
    for node in nodes[2:]:
        node.close()


# Stop strings ------------------------------------------------------------------------------------


class Scribe:
    """A node that logs the exact first steps of each job, and then gives the job back."""

    def __init__(self, redis: Redis) -> None:
        self._broker = NodeBroker(redis, POOL, "scribe-1", ReferenceEngine().revision)

    async def begin(self, works: dict[str, int]) -> None:
        """Take all jobs. `works`: the number of steps for each."""
        config = NodeSettings(model="reference", redis_url="redis://", **SETTINGS).pool_config
        await self._broker.join(config | {"max_model_len": 4096}, PoolRecord(POOL, POOL, max_model_len=4096))
        pressure = NodePressure("scribe-1", kv_tokens_available=1 << 20)
        await self._broker.heartbeat(pressure, free=1 << 20, answered_call=0, held=None)
        yet, call = dict(works), 0
        while yet:
            call += 1
            taken = (
                await self._broker.take(call, f"nonce{call}", Capacity((1 << 20,) * 6, (512,) * 6, 1 << 20, 512))
            ).jobs
            jobs = [(HeldJob(one), yet.pop(one.job_id)) for one in taken]
            for job, num_steps in jobs:
                await self._write(job, num_steps)
            await self._broker.give_back(
                [GivenBackJob(job.job_id, job.taken.lease, job.taken.cost, job.taken.cost) for job, _ in jobs]
            )

    async def _write(self, job: HeldJob, num_steps: int) -> None:
        request = decode_request(job.taken.request)
        job.open(request.params)
        engine = ReferenceEngine()
        prompt = engine.tokenizer.encode(request.prompt or "")
        engine.add(EngineRequest(job.job_id, prompt, request.params, seed=seed_of(job.job_id, request.params)))
        for _ in range(num_steps):
            for output in engine.step():
                job.add_tokens(output)
            emission = job.emission()
            assert await self._broker.emit([emission]) == ["OK"]
            job.acknowledge(emission)


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_log_may_end_anywhere_around_a_stop_string(redis: Redis, redis_url: str, num_choices: int) -> None:
    works = [new_work(POOL, 20, stops_at=0.7, n=num_choices) for _ in range(20)]
    num_steps = [len(work.expected()[0].token_ids) for work in works]
    cuts = {work.id: min(cut, steps) for cut, (work, steps) in enumerate(zip(works, num_steps, strict=True))}
    engine = ReferenceEngine()
    async with AsyncClient(redis_url) as client:
        scribe = Scribe(redis)
        await scribe.begin({})
        jobs = [await client.submit(PROMPT, **work.options) for work in works]
        await scribe.begin(cuts)
        async with running_node(redis_url, engine, pool=POOL):
            for job, work in zip(jobs, works, strict=True):
                await work.read(job.chunks())
                work.check()
    closed = [cut for cut, steps in zip(cuts.values(), num_steps, strict=True) if cut == steps and num_choices == 1]
    assert len(engine.callers) == len(works) - len(closed), "one whose stop was logged needs no engine"
    assert len(closed) > 2 or num_choices > 1
    await check_logs(redis, works)
    await check_settled(redis, POOL)
