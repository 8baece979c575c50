"""A node's log has one line for each job, with its numbers as fields."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import running_node
from fakes.waiting import until
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_trace_id

from penstock.contract.job import Priority, SamplingParams
from penstock.contract.output import Outcome
from penstock.gpu_node.jobs.held_job import HeldJob, JobTrace
from penstock.gpu_node.jobs.held_jobs import JobReports
from penstock.gpu_node.jobs.times import EndedJob
from penstock.producer.client import AsyncClient
from penstock.queue.broker.node import Taken
from penstock.queue.wire import Request

POOL = "logged"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def reference_engine(step_s: float = 0.0) -> Any:
    """An engine without a model; as Any, since its tokenizer has fewer members than a real one."""
    return ReferenceEngine(step_s=step_s)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.getMessage() == "job.ended"]


async def until_logged(caplog: pytest.LogCaptureFixture, num_lines: int) -> list[dict[str, Any]]:
    await until(lambda: len(lines_of(caplog)) >= num_lines)
    return lines_of(caplog)


async def test_a_job_that_is_done_has_one_line(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(redis_url, reference_engine(step_s=0.001), pool=POOL), AsyncClient(redis_url) as client:
        job = await client.submit("hello", max_tokens=20, tenant="acme", priority=Priority.BATCH)
        await job.result()
        (line,) = await until_logged(caplog, 1)
    expected = {
        "job_id": job.id,
        "model": "reference",
        "tenant": "acme",
        "class": "batch",
        "finish_reason": "length",
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 20,
        "preemptions": 0,
    }
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["queue_s"] <= line["ttft_s"] < line["total_s"] < 60
    assert "code" not in line and "trace_id" not in line


async def test_a_line_says_how_a_job_ended_that_is_not_done(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(redis_url, reference_engine(step_s=0.01), pool=POOL), AsyncClient(redis_url) as client:
        canceled = await client.submit("hello", max_tokens=2000)
        await anext(canceled.stream())
        await canceled.cancel()
        (line,) = await until_logged(caplog, 1)
        assert (line["finish_reason"], line["code"]) == ("cancelled", "cancelled")
        await client.tokenize("three small words")
        *_, line = await until_logged(caplog, 2)
        assert (line["finish_reason"], line["output_tokens"], line["ttft_s"]) == ("stop", 0, None)


async def test_lines_can_be_switched_off(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        running_node(redis_url, reference_engine(), pool=POOL, log_jobs=False) as node,
        AsyncClient(redis_url) as client,
        asyncio.timeout(60),
    ):
        await (await client.submit("hello", max_tokens=5)).result()
        await until(lambda: node.held_jobs.counts.finished >= 1)
    assert lines_of(caplog) == []


async def test_a_line_of_a_traced_job_has_the_id_of_its_trace(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    provider, endpoint = TracerProvider(shutdown_on_exit=False), "http://127.0.0.1:9"
    async with (
        running_node(redis_url, reference_engine(), pool=POOL, otlp_traces_endpoint=endpoint),
        AsyncClient(redis_url) as client,
    ):
        with provider.get_tracer("test").start_as_current_span("caller") as span:
            await (await client.submit("hello", max_tokens=5)).result()
        await (await client.submit("hello", max_tokens=5)).result()
        traced, untraced = await until_logged(caplog, 2)
    assert traced["trace_id"] == format_trace_id(span.get_span_context().trace_id)
    assert "trace_id" not in untraced


class BrokenSpans:
    """A recorder of spans that fails at each call."""

    async def taken(self, job: HeldJob, request: Request) -> None:
        job.trace = JobTrace(Context(), TRACE_ID, "chat", queued_s=0.0)
        raise ValueError("taken")

    def began(self, job: HeldJob) -> None:
        raise ValueError("began")

    def lost(self, job: HeldJob) -> None:
        raise ValueError("lost")

    def gave_back(self, job: HeldJob, why: str) -> None:
        raise ValueError("gave_back")

    def ended(self, job: HeldJob, ended: EndedJob, at_s: float) -> None:
        raise ValueError("ended")


async def test_no_error_of_spans_reaches_a_job(caplog: pytest.LogCaptureFixture) -> None:
    reports = JobReports("model", logs_jobs=True, spans=BrokenSpans())
    caplog.set_level(logging.INFO)
    job = HeldJob(Taken("p.1", "lease", 0, 0, 1, 0, tenant="acme"))
    await reports.taken(job, Request(SamplingParams(), prompt="hello", trace=("00-1",)))
    reports.began(job)
    reports.lost(job)
    reports.gave_back(job, "drain")
    reports.ended(job, job.ended(Outcome("succeeded")), 1.0)
    assert [record.getMessage() for record in caplog.records] == ["tracing.failed"] * 5 + ["job.ended"]
    assert lines_of(caplog)[0]["trace_id"] == TRACE_ID
