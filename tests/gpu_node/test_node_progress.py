"""A node reports to readers how far a prompt is computed. Nothing else changes."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from fakes.processes.reference_engine import ReferenceEngine, reference_tokens
from fakes.processes.running_node import PATIENCE_S, running_node
from fakes.waiting import until
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.job import JobDef, SamplingParams
from penstock.contract.output import Chunk, PrefillProgress
from penstock.gpu_node.engine.records import EngineRequest, StepOutput
from penstock.gpu_node.node import Node
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.queue.wire import decode_message

POOL = "ref"
PROMPT = "hello"
WHOLE = PrefillProgress(len(PROMPT), 0, len(PROMPT), 3)


class ReportingEngine(ReferenceEngine):
    """Reports the prompt of each request that asks for it, before the request's first token."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.added: list[EngineRequest] = []
        self._unreported: list[EngineRequest] = []

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.added.append(request)
        self._unreported += [request] if request.reports_prefill else []

    def step(self) -> list[StepOutput]:
        asked, self._unreported = self._unreported, []
        reports = [StepOutput(one.request_id, 0, 0, (), "", None, prefill=WHOLE) for one in asked]
        return [*reports, *super().step()]


def running(url: str, engine: Any, **settings: Any) -> AbstractAsyncContextManager[Node]:
    return running_node(url, engine, pool=POOL, **settings)


async def received(redis: Redis, job: JobDef, inbox: str) -> tuple[asyncio.Task[list[bytes]], asyncio.Event]:
    """Collect the messages of an inbox until the job's last chunk."""
    pubsub, ready = redis.pubsub(), asyncio.Event()
    await pubsub.subscribe(keys.inbox_channel(POOL, inbox))

    async def collect() -> list[bytes]:
        messages = list[bytes]()
        ready.set()
        while not messages or not any(chunk.outcome for chunk in decode_message(messages[-1])[0]):
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=PATIENCE_S)
            messages += [message["data"]] if message else []
        await pubsub.aclose()  # type: ignore[no-untyped-call]
        return messages

    return asyncio.create_task(collect()), ready


@pytest.mark.parametrize("asks", [False, True])
async def test_progress_is_published_once_across_a_takeover_and_the_tokens_stay_exact(
    redis_url: str, redis: Redis, broker: ProducerBroker, asks: bool
) -> None:
    params = SamplingParams(max_tokens=300)
    job = JobDef(id=f"{POOL}.{uuid7()}", prompt=PROMPT, params=params, return_progress=asks)
    collecting, ready = await received(redis, job, "me")
    await ready.wait()
    first, second = ReportingEngine(step_s=0.005), ReportingEngine()
    async with asyncio.timeout(PATIENCE_S):
        async with running(redis_url, first, drain_s=0.05):
            await broker.submit(Submission(job, 50), "me")
            await until(lambda: broker.status(job.id, "default"), lambda seen: seen.num_chunks > 10)
        async with running(redis_url, second):
            messages = await collecting
    assert [engine.added[0].reports_prefill for engine in (first, second)] == [asks, False]
    found = [decode_message(message) for message in messages]
    progress = [one for _, reports in found for one in reports]
    assert [(one.job_id, one.progress) for one in progress] == [(job.id, WHOLE)] * asks
    if asks:
        assert found[0][1], "it comes before or with the first chunk"
    pushed = {chunk.index: chunk for chunks, _ in found for chunk in chunks}
    log: list[Chunk] = await broker.log(job.id, 0)
    assert [pushed[index] for index in sorted(pushed)] == log
    assert [chunk.index for chunk in log] == [*range(len(log))]
    assert [chunk for chunk in log if chunk.outcome] == log[-1:]
    tokens = [token for chunk in log for token in chunk.token_ids]
    assert tokens == reference_tokens(job.id, params, list(PROMPT.encode()))
    assert await audit(AdminBroker(redis), POOL) == []


async def test_a_job_that_ends_with_its_first_token_still_has_its_progress(
    redis_url: str, redis: Redis, broker: ProducerBroker
) -> None:
    job = JobDef(id=f"{POOL}.{uuid7()}", prompt=PROMPT, params=SamplingParams(max_tokens=1), return_progress=True)
    collecting, ready = await received(redis, job, "me")
    await ready.wait()
    async with asyncio.timeout(PATIENCE_S), running(redis_url, ReportingEngine()):
        await broker.submit(Submission(job, 50), "me")
        messages = await collecting
    progress = [one.progress for message in messages for one in decode_message(message)[1]]
    assert progress == [WHOLE]
    assert len(await broker.log(job.id, 0)) == 2
