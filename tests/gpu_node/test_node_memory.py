"""A node whose memory is short, through the client: jobs larger than its KV cache run, and lack of memory ends none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from fakes.processes.running_node import running_node
from fakes.runners.faulty_runner import FaultyRunner
from fakes.waiting import until

from penstock.contract.errors import JobFailedError, PromptTooLongError
from penstock.contract.job import Priority, SamplingParams
from penstock.contract.output import Result
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.node import Node
from penstock.producer.client import AsyncClient

POOL = "tiny"
KV_TOKENS, SWAP_TOKENS = 80, 144
LARGE = list(range(3, 150))
SMALL = [[5 + i, *range(10 * i + 3, 10 * i + 20)] for i in range(12)]

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    """Makes engines whose tokens are the same bits however they are batched."""
    return partial(make_engine, runner="native", dtype="bfloat16")


def running(url: str, engine: Engine, **changes: Any) -> AbstractAsyncContextManager[Node]:
    return running_node(url, engine, pool=POOL, **{"model": "tiny", **changes})


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


async def run(client: AsyncClient, prompt: list[int], num_tokens: int, **options: Any) -> Result:
    job = await client.submit(prompt, params=params(num_tokens), **options)
    return await job.result()


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
async def test_a_job_larger_than_the_kv_cache_runs_among_small_ones(
    redis_url: str, make: MakeEngine, policy: str
) -> None:
    blocks = {"num_kv_blocks": KV_TOKENS // 16, "num_swap_blocks": SWAP_TOKENS // 16}
    engine = make(**blocks, scheduling_policy=policy)
    async with (
        running(redis_url, engine, scheduling_policy=policy, bypass_ms=200),
        AsyncClient(redis_url) as client,
        asyncio.TaskGroup() as group,
    ):
        small = [group.create_task(run(client, prompt, 30, tenant=f"t{i % 3}")) for i, prompt in enumerate(SMALL)]
        large = group.create_task(run(client, LARGE, 60))
        growing = group.create_task(run(client, LARGE[:40], 150))
    roomy = make()
    asked = [*((prompt, 30) for prompt in SMALL), (LARGE, 60), (LARGE[:40], 150)]
    for task, (prompt, num_tokens) in zip([*small, large, growing], asked, strict=True):
        want = roomy.generate([prompt], params(num_tokens))[0].choices[0].token_ids
        assert task.result().choices[0].token_ids == want


async def test_an_urgent_job_does_not_wait_for_one_that_has_both_pools(redis_url: str, make: MakeEngine) -> None:
    blocks = {"num_kv_blocks": KV_TOKENS // 16, "num_swap_blocks": SWAP_TOKENS // 16}
    engine, roomy = make(**blocks, scheduling_policy="priority"), make()
    engine._runner = FaultyRunner(engine._runner, lambda at, _: time.sleep(0.005) if at == "start" else None)
    async with running(redis_url, engine, scheduling_policy="priority"), AsyncClient(redis_url) as client:
        large = await client.submit(LARGE, params=params(70), priority=Priority.BATCH)
        chunks = large.stream()
        seen = [await anext(chunks)]
        urgent = await run(client, SMALL[0], 10, priority=Priority.INTERACTIVE)
        seen += [chunk async for chunk in chunks]
        assert engine.stats().num_preemptions == 1
    for tokens, prompt, num_tokens in (
        (urgent.choices[0].token_ids, SMALL[0], 10),
        (tuple(token for chunk in seen for token in chunk.token_ids), LARGE, 70),
    ):
        assert tokens == roomy.generate([prompt], params(num_tokens))[0].choices[0].token_ids


@pytest.mark.parametrize("then", ["succeeded", "cancelled", "moved"])
async def test_a_job_says_how_often_the_engine_preempted_it(redis_url: str, make: MakeEngine, then: str) -> None:
    """An urgent job takes its blocks. Until that job ends, it has no output that would tell so."""
    engine = make(num_kv_blocks=KV_TOKENS // 16, num_swap_blocks=SWAP_TOKENS // 16, scheduling_policy="priority")
    engine._runner = FaultyRunner(engine._runner, lambda at, _: time.sleep(0.005) if at == "start" else None)
    async with AsyncClient(redis_url) as client:
        async with running(redis_url, engine, scheduling_policy="priority", drain_s=0):
            large = await client.submit(LARGE, params=params(70), priority=Priority.BATCH)
            await anext(large.stream())
            urgent = await client.submit(SMALL[0], params=params(60), priority=Priority.INTERACTIVE)
            await until(lambda: engine.stats().num_preemptions != 0)
            if then == "cancelled":
                await large.cancel()
            if then != "moved":
                await asyncio.gather(large.result(), urgent.result(), return_exceptions=True)
        if then == "moved":
            async with running(redis_url, make(), scheduling_policy="priority"):
                await large.result()
        status = await large.status()
        others = await urgent.status()
    assert status.state == ("cancelled" if then == "cancelled" else "succeeded")
    assert (status.ledger.engine_preemptions, status.ledger.preemptions) == (1, then == "moved")
    assert others.ledger.engine_preemptions == 0


async def test_job_larger_than_device_and_host_blocks_is_refused(redis_url: str, make: MakeEngine) -> None:
    engine = make(num_kv_blocks=KV_TOKENS // 16, num_swap_blocks=SWAP_TOKENS // 16)
    async with running(redis_url, engine), AsyncClient(redis_url) as client:
        with pytest.raises(PromptTooLongError, match=str(KV_TOKENS + SWAP_TOKENS)):
            await client.submit([1] * (KV_TOKENS + SWAP_TOKENS), params=params(1))


async def test_out_of_memory_ends_no_job(redis_url: str, make: MakeEngine) -> None:
    engine, roomy = make(), make()
    engine._runner = FaultyRunner(
        engine._runner, lambda at, plan: MemoryError() if at == "start" and len(plan.token_ids) > 6 else None
    )
    async with running(redis_url, engine, lease_ms=6000), AsyncClient(redis_url) as client:
        results = await asyncio.gather(*(run(client, prompt, 20) for prompt in SMALL))
        pressure = await until(lambda: client.pressure(POOL), lambda seen: seen.nodes[0].troubles)
    assert pressure.nodes[0].troubles.keys() == {"memory"}
    want = roomy.generate(SMALL, params(20))
    assert [result.choices[0].token_ids for result in results] == [one.choices[0].token_ids for one in want]
    assert engine.stats().num_memory_failures > 0


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
async def test_a_job_that_makes_steps_fail_ends_alone(redis_url: str, make: MakeEngine, error: type[Exception]) -> None:
    engine, roomy = make(), make()
    want = [one.choices[0].token_ids for one in roomy.generate(SMALL, params(20))]
    (steady,) = roomy.generate([SMALL[0]], params(400))
    said = {token for tokens in (*want, steady.choices[0].token_ids) for token in tokens}
    poison = next(token for token in range(300, 380) if token not in said)

    def fault(at: str, plan: Any) -> Exception | None:
        if at != "start":
            return None
        time.sleep(0.01)
        return error() if poison in plan.token_ids else None

    engine._runner = FaultyRunner(engine._runner, fault)
    async with (
        running(redis_url, engine, lease_ms=6000),
        AsyncClient(redis_url) as client,
        asyncio.TaskGroup() as group,
    ):
        # Were all others done before it comes, the engine would be what is broken.
        companion = await client.submit(SMALL[0], params=params(400))
        healthy = [group.create_task(run(client, prompt, 20)) for prompt in SMALL]
        with pytest.raises(JobFailedError) as failure:
            await run(client, [*SMALL[0], poison, 5], 20)
        await companion.cancel()
    assert failure.value.code == "model_error"
    assert [task.result().choices[0].token_ids for task in healthy] == want


async def test_pressure_record_has_the_memory_counters_of_the_engine(redis_url: str, make: MakeEngine) -> None:
    engine = make(num_kv_blocks=12, num_swap_blocks=6, preemption="swap", scheduling_policy="fcfs")
    async with running(redis_url, engine, scheduling_policy="fcfs", lease_ms=6000), AsyncClient(redis_url) as client:
        await asyncio.gather(*(run(client, prompt * 2, 60) for prompt in SMALL[:6]))
        for _ in range(2):
            await run(client, SMALL[0] * 2, 1)
        stats = engine.stats()
        found = await until(lambda: client.pressure(POOL), lambda seen: seen.nodes[0].num_steps >= stats.steps)
        pressure = found.nodes[0]
    assert pressure.swap_blocks_total == 6 and pressure.swap_blocks_free == 6
    for name in ("kv_evictions", "swapped_out_blocks", "prefix_lookup_tokens", "prefix_hit_tokens", "max_step_tokens"):
        assert getattr(pressure, name) == getattr(stats, name) > 0, name
    assert 0 < pressure.prefix_hit_tokens < pressure.prefix_lookup_tokens
