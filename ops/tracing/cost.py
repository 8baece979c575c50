"""`PYTHONPATH=ops python -m tracing.cost`: the CPU time that traces and log lines take for each request.

It makes the calls that a gateway and a node make for a request, thousands of times, with a collector on this machine.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fixtures.otlp_collector import OtlpCollector
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import Message, Scope

from penstock.contract.job import SamplingParams
from penstock.contract.output import Outcome, Usage
from penstock.gateway.http.middleware.traces import TracedRequests
from penstock.gpu_node.engine import RankStats
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import JobReports
from penstock.gpu_node.jobs.times import EndedJob
from penstock.gpu_node.monitor.job_spans import JobSpans
from penstock.queue.broker.node import Taken
from penstock.queue.wire import Request
from penstock.runtime.logging import LogSettings, configure_logging
from penstock.runtime.tracing.context import carried_by, start_enqueue_span
from penstock.runtime.tracing.export import Tracing

NUM_REQUESTS = 2000
NUM_ROUNDS = 5
BATCH = 500
"""Spans that are sent together."""
JOB_ID = "model.01890000-0000-7000-8000-000000000000"
TRACE = ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",)
UNSAMPLED = f"{TRACE[0][:-2]}00"
ENDED = EndedJob(Outcome("succeeded"), "stop", Usage(100, 50, 20), max_tokens=64, num_choices=1, longest_output=50)
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "scheme": "http"}


class Nowhere(io.TextIOBase):
    """Where log lines go."""

    def write(self, text: str) -> int:
        """Drop the text."""
        return len(text)


async def submit(scope: Scope, receive: Any, send: Any) -> None:
    """Do what a gateway does for a request, as far as traces are concerned."""
    if (span := start_enqueue_span(JOB_ID, "model")) is not None:
        with span:
            carried_by(span)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def ask(app: Any, trace: str = TRACE[0]) -> None:
    """Make one request to the gateway's outermost part."""

    async def send(message: Message) -> None:
        """Drop the message."""

    await app({**SCOPE, "headers": [(b"traceparent", trace.encode())]}, None, send)


async def run_job(reports: JobReports, trace: tuple[str, ...]) -> None:
    """Do what a node does for a job, as far as its reports are concerned."""
    job = HeldJob(Taken(JOB_ID, "1:a:1", 0, 0, 100, 0, tenant="acme", taken_ms=1), time.monotonic())
    times = job.times
    times.first_output_s = times.first_token_s = times.taken_s + 0.1
    times.last_token_s = {0: times.taken_s + 1.0}
    await reports.taken(job, Request(SamplingParams(), prompt="hello", trace=trace))
    reports.began(job)
    reports.ended(job, ENDED, times.taken_s + 1.1)


async def measure(name: str, call: Callable[[], Awaitable[None]], without_us: float = 0.0) -> float:
    """Print the microseconds of a call on this thread, the least of several rounds, beyond those without traces."""
    best_us = float("inf")
    for _ in range(NUM_ROUNDS):
        started_s = time.thread_time()
        for _ in range(NUM_REQUESTS):
            await call()
        best_us = min(best_us, (time.thread_time() - started_s) / NUM_REQUESTS * 1e6)
    print(f"{name:42} {best_us - without_us:8.1f} µs")
    return best_us


async def measure_export(url: str) -> None:
    """Print the microseconds of the exporting thread for each span."""
    kept = InMemorySpanExporter()
    tracing = Tracing(None, "cost", kept)
    spans = JobSpans(tracing, no_leases, node_id="node-1", model="model", ranks=RankStats)
    for _ in range(BATCH // 5):
        await run_job(JobReports(spans=spans), TRACE)
    tracing.close()
    batch, exporter = kept.get_finished_spans(), OTLPSpanExporter(endpoint=url)
    started_s = time.thread_time()
    for _ in range(NUM_ROUNDS):
        exporter.export(batch)
    took_us = (time.thread_time() - started_s) / NUM_ROUNDS / len(batch) * 1e6
    print(f"{'a span, on the thread that exports it':42} {took_us:8.1f} µs")


async def no_leases(job_id: str) -> tuple[()]:
    """Return the past leases of a job that had none."""
    return ()


async def main() -> None:
    """Measure each part with and without traces."""
    configure_logging(LogSettings())
    logging.getLogger().handlers[0].setStream(Nowhere())  # type: ignore[attr-defined]
    plain_us = await measure("(a gateway's request itself)", lambda: ask(submit))
    job_us = await measure("(a node's job itself)", lambda: run_job(JobReports(), ()))
    with OtlpCollector() as collector:
        tracing = Tracing(collector.url + "/v1/traces", "cost")
        traced = TracedRequests(submit, tracer=tracing.tracer, paths=frozenset({SCOPE["path"]}))
        spans = JobSpans(tracing, no_leases, node_id="node-1", model="model", ranks=RankStats)
        await measure("gateway, trace not sampled", lambda: ask(traced, UNSAMPLED), plain_us)
        await measure("gateway, trace sampled", lambda: ask(traced), plain_us)
        await measure("node, trace not sampled", lambda: run_job(JobReports(spans=spans), ()), job_us)
        await measure("node, trace sampled", lambda: run_job(JobReports(spans=spans), TRACE), job_us)
        tracing.close()
        await measure_export(collector.url + "/v1/traces")
    await measure("node, log line", lambda: run_job(JobReports("model", logs_jobs=True), ()), job_us)


if __name__ == "__main__":
    asyncio.run(main())
