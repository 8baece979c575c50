"""A node beside a real Redis, around the reference engine: what goes in comes out token-exact, whatever happens."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fakes.other_version import REFUSAL, make_pool_of_other_version
from fakes.processes.reference_engine import (
    ReferenceEngine,
    reference_choice,
    reference_prompt_logprobs,
    reference_tokens,
)
from fakes.processes.running_node import PATIENCE_S, node_settings, running_node
from fakes.waiting import until
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.errors import ConfigError, InvariantError, ProtocolVersionError
from penstock.contract.job import JobDef, Message, SamplingParams
from penstock.contract.output import Chunk, Result
from penstock.contract.pool import PoolRecord
from penstock.contract.prompt import MAX_PARTICIPANT_NAME_CHARS
from penstock.contract.tasks import Tokenize, Tokenized
from penstock.contract.tools import ToolCall
from penstock.contract.usage import UsageQuery
from penstock.gpu_node.engine.records import EngineRequest, Prepared, StepLostError, StepOutput
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.encoder import MAX_SMALL_WHOLE_CHARS
from penstock.gpu_node.engine.text.output import BadWords
from penstock.gpu_node.engine.worker import EngineLike
from penstock.gpu_node.node import Node
from penstock.gpu_node.service import heartbeat
from penstock.gpu_node.taking import taker
from penstock.gpu_node.taking.preparation import MAX_CHARS_ON_LOOP, MAX_LONG_PROMPTS_OF_TENANT
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.node import NodeBroker
from penstock.queue.broker.producer import JobStatus, ProducerBroker, Submission
from penstock.queue.broker.usage import UsageBroker
from penstock.queue.wire import encode_request, pack, unpack_map
from penstock.runtime.event_loop import MAX_THREADS

POOL = "ref"


def running(url: str, engine: EngineLike, **changes: Any) -> AbstractAsyncContextManager[Node]:
    return running_node(url, engine, pool=POOL, **changes)


def new_job(prompt: str = "hello", **params: Any) -> JobDef:
    return JobDef(id=f"{POOL}.{uuid7()}", prompt=prompt, params=SamplingParams(**{"max_tokens": 20, **params}))


def expected(job: JobDef, choice: int = 0) -> list[int]:
    return reference_tokens(job.id, job.params, list((job.prompt or "").encode()), choice)


async def status_when(broker: ProducerBroker, job: JobDef, reached: Callable[[JobStatus], object]) -> JobStatus:
    status: JobStatus = await until(lambda: broker.status(job.id, "default"), reached)
    return status


async def ended(broker: ProducerBroker, job: JobDef) -> Result:
    await status_when(broker, job, lambda status: status.outcome is not None)
    result = await broker.result(job.id, "default")
    assert result is not None
    return result


async def test_jobs_are_token_exact_and_leave_nothing_behind(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    async with running(redis_url, ReferenceEngine(step_s=0.001)) as node:
        jobs = [new_job(f"prompt {i}", n=1 + i % 3) for i in range(40)]
        for job in jobs:
            await broker.submit(Submission(job, 50))
        for job in jobs:
            result = await ended(broker, job)
            assert result.outcome.state == "succeeded"
            for choice in result.choices:
                assert list(choice.token_ids) == expected(job, choice.index)
            log = await broker.log(job.id, 0)
            assert [c.index for c in log] == list(range(len(log)))
            assert [c for c in log if c.outcome] == log[-1:]
        assert len(node.held_jobs) == 0
    left = [
        key
        async for key in redis.scan_iter(match="*")
        if any(p in key for p in (b":queue:", b":running:", b":waiting:"))
    ]
    assert left == []


async def test_a_node_takes_only_what_its_kv_cache_can_hold(redis_url: str, broker: ProducerBroker) -> None:
    engine = ReferenceEngine(step_s=0.001, kv_tokens=160)
    engine.holds_at = 20  # no job has ended when the last one comes
    async with running(redis_url, engine) as node:
        jobs = [new_job("0123456789", max_tokens=30) for _ in range(20)]
        for job in jobs:
            await broker.submit(Submission(job, 40))
        largest = await until(lambda: node.held_jobs.expected_usage()[0][-1], lambda largest: largest >= 80)
        engine.holds_at = None
        for job in jobs:
            while (await broker.status(job.id, "default")).outcome is None:
                largest = max(largest, node.held_jobs.expected_usage()[0][-1])
                await asyncio.sleep(0.001)
        assert largest <= 160
        assert max(engine.batches) <= 4


async def test_a_node_takes_no_more_sequences_than_it_has_windows_for(redis_url: str, broker: ProducerBroker) -> None:
    engine = ReferenceEngine(step_s=0.001)
    engine.window_tokens = 96 + 20, 32
    engine.holds_at = 20  # no job has ended when the last one comes
    async with running(redis_url, engine) as node:
        jobs = [new_job("0123456789", max_tokens=30) for _ in range(12)]
        for job in jobs:
            await broker.submit(Submission(job, 40))
        most = await until(lambda: node.held_jobs.expected_usage()[1][-1], lambda most: most >= 3)
        engine.holds_at = None
        for job in jobs:
            while (await broker.status(job.id, "default")).outcome is None:
                most = max(most, node.held_jobs.expected_usage()[1][-1])
                await asyncio.sleep(0.001)
        assert most == 3 and max(engine.batches) <= 3


async def test_a_node_ends_with_both_versions_if_its_pool_has_another_version(redis_url: str, redis: Redis) -> None:
    await make_pool_of_other_version(redis, POOL, POOL)
    with pytest.raises(ProtocolVersionError, match=REFUSAL.format(pool=POOL)):
        async with running(redis_url, ReferenceEngine()):
            pass


async def test_a_running_job_is_cancelled_within_a_step_and_keeps_what_it_has(
    redis_url: str, broker: ProducerBroker
) -> None:
    async with running(redis_url, ReferenceEngine(step_s=0.005)):
        job = new_job(max_tokens=2000)
        await broker.submit(Submission(job, 50))
        await status_when(broker, job, lambda status: status.num_chunks > 5)
        assert await broker.cancel(job.id, "default") == "cancelling"
        result = await ended(broker, job)
    assert result.outcome.state == "cancelled"
    tokens = list(result.choices[0].token_ids)
    assert 5 < len(tokens) < 2000
    assert tokens == expected(job)[: len(tokens)]


async def test_a_job_whose_deadline_passes_while_it_runs_expires(redis_url: str, broker: ProducerBroker) -> None:
    async with running(redis_url, ReferenceEngine(step_s=0.005)):
        job = new_job(max_tokens=4000).model_copy(update={"deadline_ms": 200})
        await broker.submit(Submission(job, 50))
        assert (await ended(broker, job)).outcome.state == "expired"


async def test_a_deadline_ends_a_job_that_the_engine_has_not_begun(
    redis_url: str, broker: ProducerBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent of it, so no answer of Redis tells; nor does the check of what the node holds."""
    monkeypatch.setattr(heartbeat, "HEARTBEATS_PER_CHECK", 1 << 30)
    async with running(redis_url, ReferenceEngine(step_s=0.01, max_num_seqs=1), drain_s=0):
        first, behind = new_job(max_tokens=4000), new_job().model_copy(update={"deadline_ms": 500})
        await broker.submit(Submission(first, 50))
        await status_when(broker, first, lambda status: status.num_chunks > 0)
        await broker.submit(Submission(behind, 50))
        result = await ended(broker, behind)
        assert (result.outcome.state, result.outcome.code) == ("expired", "deadline_exceeded")
        assert result.taken_ms > 0
        assert (await broker.status(first.id, "default")).state == "running"


async def test_a_prompt_too_long_fails_by_name_and_the_node_goes_on(redis_url: str, broker: ProducerBroker) -> None:
    async with running(redis_url, ReferenceEngine()):
        bad, good = new_job("x" * 5000), new_job()
        await broker.submit(Submission(bad, 50))
        await broker.submit(Submission(good, 50))
        outcome = (await ended(broker, bad)).outcome
        assert (outcome.state, outcome.code, outcome.param) == ("failed", "context_length_exceeded", "prompt")
        assert (await ended(broker, good)).outcome.state == "succeeded"


async def test_malformed_request_fails_alone(redis_url: str, redis: Redis, broker: ProducerBroker) -> None:
    bad, good = new_job(), new_job()
    async with running(redis_url, ReferenceEngine()):
        pass  # the pool exists from now on
    for job in (bad, good):
        await broker.submit(Submission(job, 50))
    await redis.set(keys.request(bad.id), b"\xc1 nonsense")
    async with running(redis_url, ReferenceEngine()):
        outcome = (await ended(broker, bad)).outcome
        assert (outcome.state, outcome.code) == ("failed", "bad_wire_data")
        assert (await ended(broker, good)).outcome.state == "succeeded"


async def test_a_job_with_a_field_of_a_later_release_goes_to_a_newer_node_and_else_ends_by_name(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    job, engine = new_job(), ReferenceEngine()
    config = node_settings(redis_url, pool=POOL, avoid_ms=50).pool_config | {"max_model_len": engine.max_model_len}
    newer = NodeBroker(redis, POOL, "newer-1", "r1")
    await newer.join(config, PoolRecord(POOL, "acme/newer"))
    await broker.submit(Submission(job, 50))
    await redis.set(keys.request(job.id), pack({**unpack_map(encode_request(job)), "later": True}))
    async with running(redis_url, engine, avoid_ms=50):
        await status_when(broker, job, lambda status: status.state == "queued" and status.ledger.past_leases)
        assert await redis.hget(keys.counts(POOL), "given_back_lacking") == b"1"
        await newer.leave()
        outcome = (await ended(broker, job)).outcome
        assert (outcome.state, outcome.code) == ("failed", "unsupported_kind")
        assert "'later'" in outcome.message


async def test_a_drained_node_gives_back_and_the_next_one_goes_on_token_exact(
    redis_url: str, broker: ProducerBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job = new_job(max_tokens=300, n=2, logprobs=2, prompt_logprobs=1)
    async with running(redis_url, ReferenceEngine(step_s=0.005), drain_s=0.05):
        await broker.submit(Submission(job, 50))
        await status_when(broker, job, lambda status: status.num_chunks > 10)
    status = await broker.status(job.id, "default")
    assert (status.state, status.losses, status.preemptions) == ("queued", 0, 1)
    assert 10 < status.num_chunks < 600
    last = vars(caplog.records[-1])
    assert (last["message"], last["num_given_back"], last["num_kept"]) == ("left", 1, 0)
    assert "a part of this node is unhealthy" not in caplog.text
    async with running(redis_url, ReferenceEngine()):
        result = await ended(broker, job)
    prompt = (job.prompt or "").encode()
    assert list(result.choices) == [reference_choice(job.id, job.params, prompt, i) for i in range(2)]
    assert result.prompt_logprobs == reference_prompt_logprobs(job.params, prompt)


async def test_a_job_cancelled_before_its_new_node_has_read_its_log_contradicts_nothing(
    redis_url: str, redis: Redis, broker: ProducerBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, is_read, read_log = new_job(max_tokens=500), asyncio.Event(), NodeBroker.log

    async def read_late(node: NodeBroker, *args: Any) -> list[Chunk]:
        await is_read.wait()
        return await read_log(node, *args)

    monkeypatch.setattr(NodeBroker, "log", read_late)
    async with running(redis_url, ReferenceEngine(step_s=0.005), drain_s=0.0):
        await broker.submit(Submission(job, 50))
        await status_when(broker, job, lambda status: status.num_chunks > 5)
    async with running(redis_url, ReferenceEngine(step_s=0.005)):
        await status_when(broker, job, lambda status: status.state == "running")
        await broker.cancel(job.id, "default")
        assert (await ended(broker, job)).outcome.state == "cancelled"
        is_read.set()
    assert await audit(AdminBroker(redis), POOL) == []


async def test_a_stopping_node_hands_its_streams_over_one_by_one_while_the_others_go_on(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    jobs, next_engine = [new_job(max_tokens=2000) for _ in range(6)], ReferenceEngine(step_s=0.001)
    next_engine.holds_at = 0

    async def chunks() -> dict[str, int]:
        return {job.id: (await broker.status(job.id, "default")).num_chunks for job in jobs}

    async def move_on() -> int:
        """Return how many jobs got tokens while one of the first node waited at the next one."""
        before = await chunks()

        async def num_grown() -> int:
            return sum(now > before[job_id] + 5 for job_id, now in (await chunks()).items())

        return int(await until(num_grown, lambda number: number >= 5))

    # None of them would end within the drain.
    async with running(redis_url, ReferenceEngine(step_s=0.05), drain_s=60) as node:
        for job in jobs:
            await broker.submit(Submission(job, 50))
        for job in jobs:
            await status_when(broker, job, lambda status: status.num_chunks > 2)
        async with running(redis_url, next_engine) as next_node:
            node.stop()
            await until(lambda: len(next_node.held_jobs) >= 1)
            assert await move_on() == 5
            assert (len(next_node.held_jobs), node.held_jobs.counts.given_back_drain) == (1, 1)
            next_engine.holds_at = None
            results = [await ended(broker, job) for job in jobs]
            assert node.held_jobs.counts.given_back_drain == 6
    assert [list(result.choices[0].token_ids) for result in results] == [expected(job) for job in jobs]
    assert await audit(AdminBroker(redis), POOL) == []


async def test_a_stopping_node_keeps_streams_that_end_within_its_drain(redis_url: str, broker: ProducerBroker) -> None:
    short, long, next_engine = new_job(max_tokens=400), new_job(max_tokens=4000), ReferenceEngine(step_s=0.001)
    async with running(redis_url, ReferenceEngine(step_s=0.01), drain_s=30) as node:
        for job in (short, long):
            await broker.submit(Submission(job, 50))
        for job in (short, long):
            await status_when(broker, job, lambda status: status.num_chunks > 2)
        async with running(redis_url, next_engine):
            node.stop()
            results = [await ended(broker, job) for job in (short, long)]
        assert node.held_jobs.counts.given_back_drain == 1
    assert [list(result.choices[0].token_ids) for result in results] == [expected(job) for job in (short, long)]
    leases = [(await broker.status(job.id, "default")).ledger.past_leases for job in (short, long)]
    assert [len(one) for one in leases] == [0, 1]


async def test_streams_that_one_by_one_would_not_move_within_the_drain_move_several_at_a_time(
    redis_url: str, broker: ProducerBroker
) -> None:
    jobs, slow_engine, drain_s = [new_job(max_tokens=4000) for _ in range(12)], ReferenceEngine(step_s=0.01), 20.0
    slow_engine.holds_at = 0
    async with running(redis_url, ReferenceEngine(step_s=0.05), drain_s=drain_s) as node:
        for job in jobs:
            await broker.submit(Submission(job, 50))
        for job in jobs:
            await status_when(broker, job, lambda status: status.num_chunks > 2)
        async with running(redis_url, slow_engine) as next_node:
            node.stop()
            # The first one gets no token, so it shows after a while that each move takes too long.
            await until(lambda: len(next_node.held_jobs) >= 3, within_s=drain_s)
            assert len(node.held_jobs) > 0, "the drain goes on"
            for job in jobs:
                await broker.cancel(job.id, "default")
            slow_engine.holds_at = None


async def test_a_stopping_node_keeps_streams_that_no_other_node_has_room_for(
    redis_url: str, broker: ProducerBroker
) -> None:
    job, other = new_job(max_tokens=300), new_job(max_tokens=1500)
    engine, full = (ReferenceEngine(step_s=0.01, max_num_seqs=1) for _ in range(2))
    async with running(redis_url, engine, drain_s=600, max_num_seqs=1) as node:
        await broker.submit(Submission(job, 50))
        await status_when(broker, job, lambda status: status.num_chunks > 2)
        async with running(redis_url, full, max_num_seqs=1) as next_node:
            await broker.submit(Submission(other, 50))
            await until(lambda: other.id in next_node.held_jobs.job_ids)
            node.stop()
            result = await ended(broker, job)
            await broker.cancel(other.id, "default")
        assert node.held_jobs.counts.given_back_drain == 0
    assert list(result.choices[0].token_ids) == expected(job)


async def test_a_second_stop_ends_the_grace_time(redis_url: str, broker: ProducerBroker) -> None:
    job = new_job(max_tokens=4000)
    async with running(redis_url, ReferenceEngine(step_s=0.01), drain_s=600) as node:
        await broker.submit(Submission(job, 50))
        await status_when(broker, job, lambda status: status.num_chunks > 2)
        node.stop()
    assert (await broker.status(job.id, "default")).state == "queued"


async def test_an_engine_that_dies_ends_the_node_and_its_jobs_move(
    redis_url: str, broker: ProducerBroker, caplog: pytest.LogCaptureFixture
) -> None:
    class DyingEngine(ReferenceEngine):
        def step(self) -> list[StepOutput]:
            if len(self.batches) >= 10:
                raise RuntimeError("the device is gone")
            return super().step()

    job = new_job(max_tokens=100)
    with pytest.raises(ExceptionGroup) as caught:
        async with running(redis_url, DyingEngine(step_s=0.005), lease_ms=3000) as node:
            await broker.submit(Submission(job, 50))
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait((asyncio.wrap_future(node._worker.stopped),))
    assert caught.group_contains(RuntimeError, match="the device is gone")
    (held,) = (
        vars(record)["jobs"] for record in caplog.records if record.message == "the engine died while it held jobs"
    )
    ((lease, job_id),) = held.items()
    of_lease = node.held_jobs.of_lease(lease)
    assert of_lease is not None and of_lease.job_id == job_id == job.id
    async with running(redis_url, ReferenceEngine(), lease_ms=3000):
        result = await ended(broker, job)
    assert list(result.choices[0].token_ids) == expected(job)
    assert (await broker.status(job.id, "default")).losses == 1


async def test_jobs_that_arrive_one_shortly_after_the_other_share_a_take_while_the_node_has_jobs(
    redis_url: str, broker: ProducerBroker
) -> None:
    held, *others = [new_job(max_tokens=2000 if at == 0 else 1) for at in range(60)]
    async with running(redis_url, ReferenceEngine(step_s=0.005)) as node:
        await broker.submit(Submission(held, 50))
        await status_when(broker, held, lambda status: status.state == "running")
        before, began_s = node._taker.answered_call, time.monotonic()
        for job in others:
            await broker.submit(Submission(job, 50))
        took_s = time.monotonic() - began_s
        num_takes = node._taker.answered_call - before
        assert num_takes <= took_s / taker.BETWEEN_TAKES_S + 2, f"{num_takes} takes in {1e3 * took_s:.0f} ms"
        for job in others:
            await ended(broker, job)


async def test_job_that_kills_nodes_is_isolated_and_other_jobs_stay_token_exact(
    redis_url: str, redis: Redis, broker: ProducerBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are restarted until all jobs have ended; a job that lost two nodes runs alone. No clock helps."""
    monkeypatch.setattr(taker, "IDLE_TAKE_S", 3600.0)

    class DeadError(BaseException):
        pass

    class FragileEngine(ReferenceEngine):
        def add(self, request: EngineRequest) -> None:
            super().add(request)
            self.is_poisoned = bytes(request.prompt_token_ids) == b"poison" or getattr(self, "is_poisoned", False)

        def step(self) -> list[StepOutput]:
            if getattr(self, "is_poisoned", False) and len(self.batches) >= 3:
                raise DeadError
            return super().step()

    poison, *others = [new_job(prompt, max_tokens=30) for prompt in ("poison", *"abcdef")]

    async def all_ended() -> None:
        for job in (*others, poison):
            await status_when(broker, job, lambda status: status.outcome is not None)

    num_dead = 0
    while True:
        node, ready = Node(node_settings(redis_url, pool=POOL), FragileEngine(step_s=0.002)), asyncio.Event()
        serving = asyncio.create_task(node.run(ready))
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        if not num_dead:
            await asyncio.gather(*(broker.submit(Submission(job, 50)) for job in (poison, *others)))
        waiting = asyncio.create_task(all_ended())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            break
        waiting.cancel()
        with pytest.raises(BaseExceptionGroup) as caught:
            await serving
        assert caught.group_contains(DeadError)
        num_dead += 1
        await redis.zadd(keys.nodes(POOL), {node.node_id: 1}, xx=True)  # its lease has passed
    node.stop()
    await asyncio.gather(serving, waiting)
    assert num_dead == 3
    result = await ended(broker, poison)
    assert (result.outcome.state, result.outcome.code) == ("dead", "node_lost")
    for job in others:
        result = await ended(broker, job)
        assert (result.outcome.state, list(result.choices[0].token_ids)) == ("succeeded", expected(job))
    assert {(await broker.status(job.id, "default")).losses for job in others} <= {0, 1, 2}
    logged = sum(len(chunk.token_ids) for chunk in await broker.log(poison.id, 0))
    used = await UsageBroker(redis).per_owner(UsageQuery(days=2))
    assert used["default", ""][:3] == [7, 6, 30 * 6 + logged], "each job once, to the token, over three nodes"


async def test_a_job_in_whose_steps_ranks_are_lost_becomes_a_dead_letter_and_no_other_token_changes(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    """The jobs of a lost step count a loss; the node goes on, and no other job does."""

    class LossyEngine(ReferenceEngine):
        def step(self) -> list[StepOutput]:
            if self.batches and any(bytes(live.prompt) == b"poison" for live in self._live):
                raise StepLostError(frozenset(live.request_id for live in self._live))
            return super().step()

    poison, *others = [new_job(prompt, max_tokens=30) for prompt in ("poison", *"abcd")]
    before, after = new_job("before", max_tokens=5), new_job("after", max_tokens=5)
    async with running(redis_url, LossyEngine(step_s=0.002), avoid_ms=0) as node:
        await broker.submit(Submission(before, 50))
        await ended(broker, before)
        await asyncio.gather(*(broker.submit(Submission(job, 50)) for job in (poison, *others)))
        result = await ended(broker, poison)
        assert (result.outcome.state, result.outcome.code) == ("dead", "node_lost")
        for job in others:
            result = await ended(broker, job)
            assert (result.outcome.state, list(result.choices[0].token_ids)) == ("succeeded", expected(job))
        await broker.submit(Submission(after, 50))
        await ended(broker, after)
        assert node.held_jobs.counts.given_back_lost >= 3
    assert {(await broker.status(job.id, "default")).losses for job in (before, after)} == {0}
    assert {(await broker.status(job.id, "default")).losses for job in others} <= {0, 1, 2}
    assert await audit(AdminBroker(redis), POOL) == []


async def test_while_redis_is_away_steps_pile_up_and_arrive_as_few_chunks(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    job, engine = new_job(max_tokens=600), ReferenceEngine(step_s=0.002)
    async with running(redis_url, engine):
        await broker.submit(Submission(job, 50))
        await status_when(broker, job, lambda status: status.num_chunks > 5)
        await redis.client_pause(60_000, all=False)
        paused_at = len(engine.batches)
        await until(lambda: len(engine.batches) >= paused_at + 50)
        await redis.client_unpause()
        result = await ended(broker, job)
    assert list(result.choices[0].token_ids) == expected(job)
    assert max(tokens for _, tokens, _ in result.cuts) > 20
    assert len(result.cuts) < 600


async def cuts_of_jobs(broker: ProducerBroker, num_jobs: int, max_tokens: int) -> list[int]:
    """Run jobs together, and return in how many chunks the tokens of each left."""
    jobs = [new_job(max_tokens=max_tokens) for _ in range(num_jobs)]
    for job in jobs:
        await broker.submit(Submission(job, 50))
    results = [await ended(broker, job) for job in jobs]
    for job, result in zip(jobs, results, strict=True):
        assert list(result.choices[0].token_ids) == expected(job)
    return [len(result.cuts) for result in results]


@pytest.mark.parametrize(("step_s", "is_core_free"), [(0.02, True), (0.06, False)], ids=["free core", "no free core"])
async def test_a_stream_gets_each_token_in_a_chunk_of_its_own(
    redis_url: str, broker: ProducerBroker, step_s: float, is_core_free: bool
) -> None:
    async with running(redis_url, ReferenceEngine(step_s=step_s, leaves_core_free=is_core_free)):
        (num_cuts,) = await cuts_of_jobs(broker, 1, 30)
    assert 16 <= num_cuts <= 30, "two steps may leave together while other processes have the cores"


async def test_tokens_of_fast_steps_leave_together_where_no_core_is_free(
    redis_url: str, broker: ProducerBroker
) -> None:
    async with running(redis_url, ReferenceEngine(step_s=0.001)):
        assert max(await cuts_of_jobs(broker, 32, 120)) < 120 / 3


async def test_node_that_was_declared_dead_drops_its_jobs_and_rejoins(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    job = new_job(max_tokens=400)
    async with running(redis_url, ReferenceEngine(step_s=0.005), lease_ms=3000) as node:
        await broker.submit(Submission(job, 50))
        await status_when(broker, job, lambda status: status.num_chunks > 5)
        # As sweep does it: the job is queued again, the node's score is gone.
        await redis.zadd(keys.nodes(POOL), {node.node_id: 1})
        await broker.reader_heartbeat(POOL, "somebody")
        result = await ended(broker, job)
    assert list(result.choices[0].token_ids) == expected(job)


async def test_a_node_of_another_configuration_is_refused_while_the_pool_lives(redis_url: str) -> None:
    async with running(redis_url, ReferenceEngine()):
        with pytest.raises(ConfigError, match="lease_ms=3000, this node with 4000"):
            async with running(redis_url, ReferenceEngine(), lease_ms=4000):
                pass


async def test_one_message_a_step_carries_the_whole_batch(redis_url: str, redis: Redis, broker: ProducerBroker) -> None:
    engine = ReferenceEngine(step_s=0.01)
    async with running(redis_url, engine), redis.pubsub() as inbox:
        await inbox.subscribe(keys.inbox_channel(POOL, "me"))
        jobs = [new_job(max_tokens=40) for _ in range(16)]
        for job in jobs:
            await broker.submit(Submission(job, 50), inbox="me")
        await ended(broker, jobs[-1])
        messages = 0
        while (message := await inbox.get_message(ignore_subscribe_messages=True, timeout=0.2)) is not None:
            messages += message["type"] == "message"
    # 16 jobs of 40 tokens and an end each; each job's first token and its finish may be messages of their own.
    assert messages <= len(engine.batches) + 3 * 16
    assert sum(engine.batches) > 2 * len(engine.batches), "they did run side by side"


async def test_arrivals_join_the_batch_together_not_one_a_step(redis_url: str, broker: ProducerBroker) -> None:
    engine = ReferenceEngine(step_s=0.02)
    async with running(redis_url, ReferenceEngine()):
        pass  # the pool exists from now on, and all of them wait when a node comes
    jobs = [new_job(max_tokens=30) for _ in range(32)]
    for job in jobs:
        await broker.submit(Submission(job, 50))
    async with running(redis_url, engine):
        for job in jobs:
            await ended(broker, job)
    assert max(engine.batches) == 32
    assert engine.batches.index(32) < 16


async def test_node_silent_for_a_lease_does_not_count_even_before_a_sweep(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    async with running(redis_url, ReferenceEngine()) as node:
        assert [n.node_id for n in (await broker.pressure(POOL)).nodes] == [node.node_id]
        async with asyncio.timeout(PATIENCE_S):
            # A heartbeat may come between the two calls.
            while (await broker.pressure(POOL)).nodes:
                await redis.zincrby(keys.nodes(POOL), -3500, node.node_id)


async def test_an_engine_that_hangs_ends_the_node_and_its_jobs_move(redis_url: str, broker: ProducerBroker) -> None:
    release = threading.Event()

    class HangingEngine(ReferenceEngine):
        def step(self) -> list[StepOutput]:
            if len(self.batches) >= 10:
                release.wait(PATIENCE_S)
            return super().step()

    job = new_job(max_tokens=100)
    with pytest.raises(ExceptionGroup) as caught:
        async with running(redis_url, HangingEngine(step_s=0.005), stall_after_s=0.5) as node:
            await broker.submit(Submission(job, 50))
            await status_when(broker, job, lambda status: status.num_chunks >= 2)
            await asyncio.sleep(1.5)
            assert node.held_jobs.job_ids == [job.id]
    assert caught.group_contains(InvariantError, match="has made no step")
    release.set()
    async with running(redis_url, ReferenceEngine()):
        result = await ended(broker, job)
    assert list(result.choices[0].token_ids) == expected(job)


async def test_a_hang_counts_as_a_loss_of_the_jobs_in_the_hung_step_alone(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    release = threading.Event()

    class HangingEngine(ReferenceEngine):
        def step(self) -> list[StepOutput]:
            if len(self._live) == 2:
                release.wait(PATIENCE_S)
            return super().step()

    hung, bystander = new_job(max_tokens=100), new_job(max_tokens=100)
    with pytest.raises(ExceptionGroup):
        engine = HangingEngine(step_s=0.005, max_num_seqs=1)
        engine.holds_at = 50  # the first job has not ended when the second one comes
        async with running(redis_url, engine, stall_after_s=0.5, max_num_seqs=2) as node:
            await broker.submit(Submission(hung, 50))
            await status_when(broker, hung, lambda status: status.num_chunks >= 1)
            await broker.submit(Submission(bystander, 50))
            await asyncio.sleep(1.5)
            assert set(node.held_jobs.job_ids) == {hung.id, bystander.id}
    release.set()
    assert (await broker.status(bystander.id, "default")).state == "queued"
    async with running(redis_url, ReferenceEngine()):
        for job in (bystander, hung):
            assert list((await ended(broker, job)).choices[0].token_ids) == expected(job)
    losses = [await redis.hget(keys.job(job.id), "losses") for job in (hung, bystander)]
    assert losses == [b"1", b"0"]


async def test_an_engine_that_answers_but_makes_no_step_ends_the_node(redis_url: str, broker: ProducerBroker) -> None:
    class StuckEngine(ReferenceEngine):
        def step(self) -> list[StepOutput]:
            if len(self.batches) < 10:
                return super().step()
            time.sleep(0.01)
            return []

    with pytest.raises(ExceptionGroup) as caught:
        async with running(redis_url, StuckEngine(step_s=0.005), stall_after_s=0.5) as node:
            await broker.submit(Submission(new_job(max_tokens=100), 50))
            await asyncio.wrap_future(node._worker.stopped)
    assert caught.group_contains(InvariantError, match="has made no step")


async def test_error_of_a_library_at_one_prompt_fails_that_job_alone(redis_url: str, broker: ProducerBroker) -> None:
    engine = ReferenceEngine()

    def encode(text: str) -> list[int]:
        if text == "poison":
            raise IndexError("a bug in the tokenizer")
        return list(text.encode())

    engine.tokenizer.encode = encode  # type: ignore[assignment]
    async with running(redis_url, engine):
        bad, good = new_job("poison"), new_job()
        await broker.submit(Submission(bad, 50))
        await broker.submit(Submission(good, 50))
        outcome = (await ended(broker, bad)).outcome
        assert (outcome.state, outcome.code) == ("failed", "internal_error")
        assert (await ended(broker, good)).outcome.state == "succeeded"


async def test_a_stop_while_prompts_are_read_gives_them_back_at_once(redis_url: str, broker: ProducerBroker) -> None:
    engine = ReferenceEngine()
    reading = threading.Event()

    def encode(text: str) -> list[int]:
        reading.set()
        time.sleep(0.2)
        return list(text.encode())

    engine.tokenizer.encode = encode  # type: ignore[assignment]
    jobs = [new_job("hello " * MAX_CHARS_ON_LOOP, max_tokens=3000) for _ in range(4)]
    async with running(redis_url, engine, drain_s=0.3):
        for job in jobs:
            await broker.submit(Submission(job, 50))
        await asyncio.to_thread(reading.wait)
    states = [await broker.status(job.id, "default") for job in jobs]
    assert {(status.state, status.losses) for status in states} == {("queued", 0)}


async def test_a_job_that_cannot_be_started_ends_and_the_node_goes_on(redis_url: str, broker: ProducerBroker) -> None:
    engine = ReferenceEngine()
    engine.tokenizer.encode = lambda text: None if text == "bad" else list(text.encode())  # type: ignore
    bad, good = new_job("bad"), new_job("good")
    async with running(redis_url, engine):
        for job in (bad, good):
            await broker.submit(Submission(job, 50))
        outcome = (await ended(broker, bad)).outcome
        assert (outcome.state, outcome.code) == ("failed", "internal_error")
        assert list((await ended(broker, good)).choices[0].token_ids) == expected(good)


async def test_a_job_does_not_wait_for_the_long_prompt_of_one_that_was_taken_with_it(
    redis_url: str, broker: ProducerBroker
) -> None:
    engine, may_go_on = ReferenceEngine(), threading.Event()

    def encode(text: str) -> list[int]:
        if len(text) > MAX_CHARS_ON_LOOP:
            may_go_on.wait(PATIENCE_S)
        return list(text[:20].encode())

    engine.tokenizer.encode = encode  # type: ignore[assignment]
    async with running(redis_url, ReferenceEngine(), max_num_seqs=1) as node:  # so that they can be queued
        node.stop()
    long, short = new_job("hello " * MAX_CHARS_ON_LOOP), new_job("short")
    for job in (long, short):
        await broker.submit(Submission(job, 50))
    async with running(redis_url, engine):
        assert list((await ended(broker, short)).choices[0].token_ids) == expected(short)
        assert (await broker.status(long.id, "default")).state == "running"
        may_go_on.set()
        assert (await ended(broker, long)).outcome.state == "succeeded"


CALL = ToolCall(id="1", name="f", arguments=f'{{"a": "{MAX_CHARS_ON_LOOP * "x"}"}}')
NAMED = Message(role="user", content="", name="n" * MAX_PARTICIPANT_NAME_CHARS)


@pytest.mark.parametrize(
    ("messages", "template_kwargs"),
    [
        ((Message(role="user", content="hi"), Message(role="assistant", content="", tool_calls=(CALL,))), None),
        ((Message(role="user", content=""),) * 512, None),
        ((NAMED,) * 12, None),
        ((Message(role="user", content="hi"),), json.dumps({"documentation": "x" * MAX_CHARS_ON_LOOP})),
    ],
    ids=["calls", "empty messages", "names", "template variables"],
)
async def test_chat_that_is_long_in_any_way_is_tokenized_on_a_thread(
    redis_url: str, broker: ProducerBroker, messages: tuple[Message, ...], template_kwargs: str | None
) -> None:
    engine, readers = ReferenceEngine(), list[threading.Thread]()

    def encode_chat(*chat: object, now: datetime, owner: object, max_tokens: int) -> list[int]:
        readers.append(threading.current_thread())
        return [1, 2, 3]

    engine.tokenizer.encode_chat = encode_chat  # type: ignore[assignment]
    params = SamplingParams(max_tokens=5)
    job = JobDef(id=f"{POOL}.{uuid7()}", messages=messages, chat_template_kwargs=template_kwargs, params=params)
    async with running(redis_url, engine):
        await broker.submit(Submission(job, 50))
        assert (await ended(broker, job)).outcome.state == "succeeded"
    assert threading.main_thread() not in readers
    assert len(readers) == 1


async def test_bad_words_are_prepared_on_a_thread_and_passed_to_the_engine(
    redis_url: str, broker: ProducerBroker
) -> None:
    engine, asked, prepared = ReferenceEngine(), list[object](), Prepared(None, None, BadWords())
    add, job = engine.add, new_job(bad_words=("no",))

    def prepare(params: SamplingParams, adapter: object, *, tenant: str) -> Prepared:
        asked.extend((params.bad_words, threading.current_thread() is threading.main_thread()))
        return prepared

    engine.prepare = prepare  # type: ignore[assignment, method-assign]

    def note(request: EngineRequest) -> None:
        asked.append(request.prepared)
        add(request)

    engine.add = note  # type: ignore[method-assign]
    async with running(redis_url, engine):
        await broker.submit(Submission(job, 50))
        assert list((await ended(broker, job)).choices[0].token_ids) == expected(job)
    assert asked == [("no",), False, prepared]


async def test_only_a_new_message_begins_a_text(redis_url: str, broker: ProducerBroker) -> None:
    engine, begins, user = ReferenceEngine(), list[bool](), Message(role="user", content="hi")
    add, continues = engine.add, json.dumps({"continue_final_message": True})

    def note(request: EngineRequest) -> None:
        begins.append(request.begins_text)
        add(request)

    engine.add = note  # type: ignore[method-assign]
    jobs = [
        new_job(),
        JobDef(id=f"{POOL}.{uuid7()}", messages=(user,)),
        JobDef(id=f"{POOL}.{uuid7()}", messages=(user,), chat_template_kwargs=continues),
    ]
    async with running(redis_url, engine):
        for job in jobs:
            await broker.submit(Submission(job, 50))
            await ended(broker, job)
    assert begins == [False, True, False]


async def test_a_chat_template_prints_the_date_of_the_job_and_not_of_the_node(
    redis_url: str, broker: ProducerBroker
) -> None:
    """A node that takes a job over after midnight, or in another time zone, must compute the same prompt."""
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H:%M') }}{{ messages[0].content }}", {})

    def encode_chat(messages: Any, *rest: object, now: datetime | None = None, **options: object) -> list[int]:
        return list(template.render(messages, now=now).encode())

    at = datetime.now(UTC) - timedelta(hours=12)
    engine, prompts = ReferenceEngine(), list[Sequence[int]]()
    add = engine.add
    engine.tokenizer.encode_chat = encode_chat  # type: ignore[method-assign]

    def note(request: EngineRequest) -> None:
        prompts.append(request.prompt_token_ids)
        add(request)

    engine.add = note  # type: ignore[method-assign]
    async with running(redis_url, engine):
        for task in (None, Tokenize()):
            stamp = f"{int(at.timestamp() * 1000):012x}"
            uuid = f"{stamp[:8]}-{stamp[8:]}-{str(uuid7())[14:]}"
            params = SamplingParams(max_tokens=1) if task is None else SamplingParams()
            job = JobDef(id=f"{POOL}.{uuid}", messages=(Message(role="user", content="!"),), params=params, task=task)
            await broker.submit(Submission(job, 50))
            result = await ended(broker, job)
    assert isinstance(result.output, Tokenized)
    prompts.append(result.output.token_ids or ())
    assert [bytes(prompt).decode() for prompt in prompts] == [f"{at:%Y-%m-%d %H:%M}!"] * 2


async def test_long_prompts_that_come_together_are_tokenized_side_by_side(
    redis_url: str, broker: ProducerBroker
) -> None:
    engine, reading, may_go_on = ReferenceEngine(), threading.Event(), threading.Event()
    together = threading.Barrier(2, timeout=PATIENCE_S)

    def encode(text: str) -> list[int]:
        if text.startswith("first"):
            reading.set()
            may_go_on.wait(PATIENCE_S)
        else:
            together.wait()  # breaks where one is read after the other
        return list(text[:20].encode())

    engine.tokenizer.encode = encode  # type: ignore[assignment]
    first, *others = (new_job(f"{name} " * MAX_CHARS_ON_LOOP) for name in ("first", "second", "third"))
    async with running(redis_url, engine):
        await broker.submit(Submission(first, 50))
        await asyncio.to_thread(reading.wait, PATIENCE_S)
        for job in others:
            await broker.submit(Submission(job, 50))
        may_go_on.set()
        states = [(await status_when(broker, job, lambda status: status.outcome is not None)).state for job in others]
    assert states == ["succeeded", "succeeded"]


async def test_a_tenants_long_prompts_leave_threads_to_other_tenants(redis_url: str, broker: ProducerBroker) -> None:
    engine, release, num_reading = ReferenceEngine(), threading.Event(), 0

    def encode(text: str) -> list[int]:
        nonlocal num_reading
        if text.startswith("long"):
            num_reading += 1
            release.wait(PATIENCE_S)
        return list(text[:20].encode())

    engine.tokenizer.encode = encode  # type: ignore[assignment]
    floods = [new_job("long " * (MAX_SMALL_WHOLE_CHARS // 4)) for _ in range(2 * MAX_THREADS)]
    other = new_job("other " * MAX_CHARS_ON_LOOP)
    async with running(redis_url, engine):
        for job in floods:
            await broker.submit(Submission(job, 50))
        await until(lambda: num_reading >= MAX_LONG_PROMPTS_OF_TENANT)
        await broker.submit(Submission(other.model_copy(update={"tenant": "other"}), 50))
        await until(lambda: broker.status(other.id, "other"), lambda seen: seen.outcome is not None)
        assert num_reading == MAX_LONG_PROMPTS_OF_TENANT
        release.set()
        for job in floods:
            assert (await status_when(broker, job, lambda status: status.outcome is not None)).state == "succeeded"


async def test_nodes_whose_limits_differ_do_not_share_a_pool(redis_url: str) -> None:
    class ShorterEngine(ReferenceEngine):
        def __init__(self) -> None:
            super().__init__()
            self.max_model_len = 1000

    async with running(redis_url, ReferenceEngine()):
        with pytest.raises(ConfigError, match="max_model_len=4096, this node with 1000"):
            async with running(redis_url, ShorterEngine()):
                pass


async def test_a_choice_the_model_failed_at_fails_the_job_whichever_ends_last(
    redis_url: str, broker: ProducerBroker
) -> None:
    class FailingEngine(ReferenceEngine):
        def _advance(self, live: Any) -> StepOutput:
            output = super()._advance(live)
            if live.choice == 0 and output.position == 2:
                self._live.remove(live)
                return replace(output, token_ids=(), text="", finish_reason="error")
            return output

    async with running(redis_url, FailingEngine(step_s=0.002)):
        job = new_job(n=2, max_tokens=10)
        await broker.submit(Submission(job, 50))
        result = await ended(broker, job)
    assert (result.outcome.state, result.outcome.code) == ("failed", "model_error")
    assert [c.finish_reason for c in result.choices] == ["error", "length"]


async def test_drain_rate_counts_ended_jobs_by_cost_as_the_backlog_does(redis_url: str, broker: ProducerBroker) -> None:
    clock, cost = asyncio.get_running_loop().time, 40
    async with running(redis_url, ReferenceEngine(step_s=0.01, kv_tokens=4 * cost)):
        jobs = [new_job("0123456789", max_tokens=30) for _ in range(40)]
        started_s = clock()
        for job in jobs:
            await broker.submit(Submission(job, cost))
        for job in jobs[:-4]:
            await ended(broker, job)
        true_rate = 36 * cost / (clock() - started_s)
        (pressure,) = (await broker.pressure(POOL)).nodes
    assert true_rate / 2 < pressure.drain_cost_per_s < true_rate * 2
