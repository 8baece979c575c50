"""A node under its pool's policy: urgent jobs preempt less urgent ones, and tenants are charged for what they used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import running_node
from fakes.waiting import until
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.job import JobDef, Priority, SamplingParams, seed_of
from penstock.contract.output import Chunk
from penstock.contract.tenant import Terms
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, StepOutput
from penstock.gpu_node.engine.worker import EngineLike
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.node import Node
from penstock.queue import keys
from penstock.queue.broker.node import Taken
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.queue.job_cost import HOLD_MS

POOL = "ref"
# Torch's last bits depend on the batch, which is enough for a drawn token to be another one now and then.
NATIVE: dict[str, Any] = {"runner": "native", "dtype": "bfloat16"}


def running(url: str, engine: EngineLike, **changes: Any) -> AbstractAsyncContextManager[Node]:
    return running_node(url, engine, pool=POOL, **changes)


async def until_job(broker: ProducerBroker, job: JobDef, state: str, num_chunks: int = 0) -> None:
    def is_so(status: Any) -> bool:
        assert status.outcome is None or status.outcome.state == state
        return status.state == state and status.num_chunks >= num_chunks

    await until(lambda: broker.status(job.id, job.tenant), is_so)


def new_job(priority: Priority, tenant: str = "default", **params: Any) -> JobDef:
    wanted = SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **params})
    kind = {"background": False, "needs_reader": False}
    return JobDef(id=f"{POOL}.{uuid7()}", prompt="0123456789", params=wanted, priority=priority, tenant=tenant, **kind)


@dataclass
class Pace:
    """How long each step of an engine takes at least."""

    step_s: float = 0.02


def paced(engine: Engine) -> Pace:
    """Slows an engine down, so that what the test does meanwhile comes in time on any machine."""
    pace, step = Pace(), engine.step

    def slow_step() -> list[StepOutput]:
        time.sleep(pace.step_s)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]
    return pace


async def test_class_tenant_and_weight_reach_the_engine(redis_url: str, broker: ProducerBroker) -> None:
    engine = ReferenceEngine()
    async with running(redis_url, engine):
        for job, weight in ((new_job(Priority.BATCH, "a"), 1.0), (new_job(Priority.INTERACTIVE, "b"), 0.3)):
            await broker.submit(Submission(job, 40, terms=Terms(weight=weight)))
            await until_job(broker, job, "succeeded")
    assert list(engine.callers) == [(2, "a", 1.0), (0, "b", 0.3)]


@pytest.mark.parametrize(("policy", "finds_room"), [("fair", True), ("fcfs", False)])
async def test_interactive_job_is_taken_while_batch_jobs_hold_all_capacity(
    redis_url: str, broker: ProducerBroker, policy: str, finds_room: bool
) -> None:
    engine = ReferenceEngine(step_s=0.002, kv_tokens=160)
    async with running(redis_url, engine, scheduling_policy=policy, drain_s=0):
        batch = [new_job(Priority.BATCH, max_tokens=2000) for _ in range(4)]
        for job in batch:
            await broker.submit(Submission(job, 160))
        await until_job(broker, batch[0], "running", 1)
        urgent = new_job(Priority.INTERACTIVE)
        await broker.submit(Submission(urgent, 40))
        if finds_room:
            await until_job(broker, urgent, "succeeded")
            assert (await broker.status(batch[0].id, "default")).state == "running"
        else:
            await until_job(broker, batch[0], "running", 100)
            assert (await broker.status(urgent.id, "default")).state == "queued"
        assert [(await broker.status(job.id, "default")).state for job in batch[1:]] == ["queued"] * 3


async def test_full_engine_serves_an_interactive_job_at_once_and_no_tokens_change(
    redis_url: str, broker: ProducerBroker, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(**NATIVE, scheduling_policy="fair", num_kv_blocks=24, num_swap_blocks=24)
    pace = paced(engine)
    batch = [new_job(Priority.BATCH, max_tokens=170) for _ in range(6)]
    urgent = new_job(Priority.INTERACTIVE)
    async with running(redis_url, engine, lease_ms=15_000) as node:
        for job in batch:
            await broker.submit(Submission(job, 60))
        await until_job(broker, batch[0], "running", 4)
        await broker.submit(Submission(urgent, 60))
        await until_job(broker, urgent, "succeeded")
        assert "running" in {(await broker.status(job.id, "default")).state for job in batch}
        pace.step_s = 0.0
        for job in batch:
            await until_job(broker, job, "succeeded")
        assert len(node.held_jobs) == 0
    assert engine.stats().num_preemptions > 0
    alone = make_engine(**NATIVE)
    for job in (*batch, urgent):
        log = [chunk for start in (0, 1000) for chunk in await broker.log(job.id, start)]
        assert by_choice(log) == by_choice_alone(alone, job)


async def test_job_larger_than_the_nodes_kv_cache_runs_a_few_choices_at_a_time(
    redis_url: str, broker: ProducerBroker, make_engine: Callable[..., Engine]
) -> None:
    """So no job that a pool accepts is too large for all of its nodes."""
    job = new_job(Priority.STANDARD, max_tokens=120, n=8, temperature=0.9)
    async with running(redis_url, make_engine(**NATIVE, num_kv_blocks=20, max_model_len=256), lease_ms=15_000):
        await broker.submit(Submission(job, 8 * 130))
        await until_job(broker, job, "succeeded")
    assert by_choice(await broker.log(job.id, 0, 2000)) == by_choice_alone(make_engine(**NATIVE), job)


async def test_preempted_job_moves_to_a_node_with_capacity_and_no_tokens_change(
    redis_url: str, broker: ProducerBroker, make_engine: Callable[..., Engine]
) -> None:
    sizes = {**NATIVE, "scheduling_policy": "fair", "max_model_len": 256}
    crowded, roomy = make_engine(num_kv_blocks=24, **sizes), make_engine(num_kv_blocks=80, **sizes)
    pace = paced(crowded)
    patient = new_job(Priority.BATCH, max_tokens=200, temperature=0.9, n=2)
    urgent = [new_job(Priority.INTERACTIVE, max_tokens=150) for _ in range(2)]
    async with running(redis_url, crowded, lease_ms=15_000) as node:
        await broker.submit(Submission(patient, 60))
        await until_job(broker, patient, "running", 4)
        for job in urgent:
            await broker.submit(Submission(job, 60))
            await until_job(broker, job, "running", 1)
        async with running(redis_url, roomy, lease_ms=15_000) as other:
            while not len(other.held_jobs):
                await node.shed_load()
                await asyncio.sleep(0.005)
            assert other.held_jobs.job_ids == [patient.id]
            pace.step_s = 0.0
            for job in (patient, *urgent):
                await until_job(broker, job, "succeeded")
    moves = [(await broker.status(job.id, "default")).preemptions for job in (patient, *urgent)]
    assert moves == [1, 0, 0]
    alone = make_engine(**NATIVE)
    for job in (patient, *urgent):
        log = await broker.log(job.id, 0)
        assert by_choice(log) == by_choice_alone(alone, job)


class CrowdedEngine(ReferenceEngine):
    """A job always waits inside the engine, and none goes past 50 tokens until all may."""

    may_end = False

    def step(self) -> list[StepOutput]:
        if self.may_end or all(len(live.tokens) < 50 for live in self._live):
            return super().step()
        time.sleep(0.005)
        return []

    def stats(self) -> EngineStats:
        return replace(super().stats(), num_waiting=1)


async def test_no_job_is_given_back_without_a_node_with_capacity(redis_url: str, broker: ProducerBroker) -> None:
    async with running(redis_url, ReferenceEngine(kv_tokens=160)):
        pass  # the pool exists from now on, and all of them wait when a node comes
    batch = [new_job(Priority.BATCH, max_tokens=100) for _ in range(4)]
    for job in batch:
        await broker.submit(Submission(job, 40))
    engine = CrowdedEngine(kv_tokens=160)
    async with running(redis_url, engine, drain_s=0) as node:
        for job in batch:
            await until_job(broker, job, "running", 1)
        assert sum(job.expected_kv_tokens for job in node.held_jobs) > 160
        await node.shed_load()
        engine.may_end = True
        for job in batch:
            await until_job(broker, job, "succeeded")
            assert (await broker.status(job.id, "default")).preemptions == 0


def by_choice(parts: Iterable[Chunk | StepOutput]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for part in parts:
        tokens.setdefault(part.choice, []).extend(part.token_ids)
    return tokens


def by_choice_alone(engine: Engine, job: JobDef) -> dict[int, list[int]]:
    prompt = engine.tokenizer.encode(job.prompt or "")
    engine.add(EngineRequest(job.id, prompt, job.params, seed=seed_of(job.id, job.params)))
    outputs: list[StepOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return by_choice(outputs)


class ThirstyEngine(ReferenceEngine):
    """An engine that reports a million KV-token-milliseconds for each choice."""

    def step(self) -> list[StepOutput]:
        return [replace(output, kv_token_ms=1e6) for output in super().step()]


async def test_tenant_is_charged_what_the_engine_measured(redis_url: str, redis: Redis, broker: ProducerBroker) -> None:
    async with running(redis_url, ThirstyEngine()):
        job, next_job = [new_job(Priority.STANDARD, "payer", n=3) for _ in range(2)]
        await broker.submit(Submission(job, 40))
        await until_job(broker, job, "succeeded")
        owed = await cast(Any, redis.zscore(f"{keys.prefix(POOL)}:debt:1", "payer"))
        assert 3e6 <= owed <= 3e6 + 1
        await broker.submit(Submission(next_job, 40))
        await until_job(broker, next_job, "succeeded")
    charge = float(await cast(Any, redis.hget(keys.job(next_job.id), "charge")))
    assert charge > 2 * 40 * HOLD_MS, "the first one taught the node how long it holds a token of cost"


async def test_node_reports_the_lengths_of_outputs(redis_url: str, broker: ProducerBroker) -> None:
    """So that a job counts in the queue as what its node will hold free for it."""
    async with running(redis_url, ReferenceEngine()) as node:
        for _ in range(30):
            job = new_job(Priority.STANDARD, max_tokens=20)
            await broker.submit(Submission(job, 40))
            await until_job(broker, job, "succeeded")
        wanted = (len(job.prompt or "").bit_length(), (20).bit_length(), 20)
        await until(lambda: broker.pressure(POOL), lambda seen: wanted in seen.nodes[0].predicted_outputs)
        assert node.held_jobs.predicted_outputs == (wanted,)


def held(tenant: str = "t", urgency: int = 1, cost: int = 100, max_tokens: int = 200, n: int = 1) -> HeldJob:
    job = HeldJob(Taken(f"{POOL}.{uuid7()}", str(uuid7()), 0, 0, cost, 0, b"", tenant, urgency))
    job.open(SamplingParams(max_tokens=max_tokens, n=n))
    return job


def ended(held_jobs: HeldJobs, num_tokens: int, kv_token_ms: float) -> None:
    job = held()
    held_jobs.open(job, 50)
    job.add_tokens(StepOutput("", 0, 0, tuple(range(num_tokens)), "", "stop"))
    job.kv_token_ms = kv_token_ms
    held_jobs.learn(job)


def test_expected_kv_tokens_use_the_learned_output_length() -> None:
    held_jobs = HeldJobs()
    before = held()
    held_jobs.open(before, 50)
    assert before.expected_kv_tokens == 50 + 200, "worst case"
    for _ in range(30):
        ended(held_jobs, 20, 0)
    after, other_kind = held(), held(max_tokens=1000)
    held_jobs.open(after, 50)
    held_jobs.open(other_kind, 50)
    assert after.expected_kv_tokens == 50 + 20
    assert other_kind.expected_kv_tokens == 50 + 256


def test_often_moved_job_reserves_its_longest_possible_output() -> None:
    held_jobs = HeldJobs(max_model_len=120)
    moved = held(max_tokens=1000)
    moved.taken = replace(moved.taken, preemptions=3)
    held_jobs.open(moved, 50)
    assert moved.expected_kv_tokens == moved.max_kv_tokens == 50 + 70
    fresh = held(max_tokens=60)
    held_jobs.open(fresh, 50)
    assert (fresh.expected_kv_tokens, fresh.max_kv_tokens) == (50 + 60, 50 + 60)


def test_hold_time_is_learned_from_ended_jobs() -> None:
    held_jobs = HeldJobs()
    assert held_jobs.hold_ms == HOLD_MS
    for _ in range(200):
        ended(held_jobs, 20, kv_token_ms=100 * 70.0)
    assert held_jobs.hold_ms == pytest.approx(70, rel=0.01)


def test_expected_usage_of_a_level_includes_more_urgent_levels() -> None:
    held_jobs = HeldJobs()
    for urgency, n in ((0, 1), (2, 3)):
        job = held(urgency=urgency, n=n)
        held_jobs.add(job)
        held_jobs.open(job, 10)
    assert held_jobs.expected_usage() == ((210, 210, *(210 + 610,) * 4), (1, 1, *(4,) * 4))


def test_interrupted_job_is_charged_as_predicted_and_a_job_that_never_ran_is_not_charged() -> None:
    job = held()
    assert job.kv_token_ms_used == 0
    job.is_in_engine = True
    assert job.kv_token_ms_used is None
    job.add_tokens(StepOutput("", 0, 0, (1,), "", "stop"))
    assert job.kv_token_ms_used == 0
