"""One trace from the program that sends a Celery task, through the worker and the queue, to the node and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from fixtures.otlp_collector import CollectedSpan, OtlpCollector
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import format_span_id, format_trace_id

from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import GENERATE, RUN_FILE
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.producer.batch.conftest import chat_row, process, reference_node, write_rows

WORKER = (sys.executable, "-m", "celery", "-A", "penstock.producer.batch.app", "worker", "--concurrency", "1")
QUIET = ("--loglevel", "INFO", "--without-mingle", "--without-gossip")
WORK = {"prompt": "the gate opens", "max_tokens": 5}


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as one:
        yield one


@pytest.fixture(scope="module")
def app(collector: OtlpCollector) -> Iterator[Celery]:
    """A Celery app that sends tasks to a traced worker in front of a traced node."""
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with (
        EmbeddedRedis() as server,
        reference_node(server.url, otlp_traces_endpoint=collector.url),
        process(*WORKER, *QUIET, PENSTOCK_REDIS_URL=server.url, **endpoint),
    ):
        app = make_app(CelerySettings.load(), server.url)
        yield app
        app.close()


@contextmanager
def sending(*, sampled: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the ids of the current trace and span of the program that sends tasks. Its spans are not exported."""
    provider = TracerProvider(sampler=ALWAYS_ON if sampled else ALWAYS_OFF, shutdown_on_exit=False)
    with provider.get_tracer("test").start_as_current_span("caller") as span:
        at = span.get_span_context()
        yield format_trace_id(at.trace_id), format_span_id(at.span_id)


def spans_of(collector: OtlpCollector, trace_id: str, num_jobs: int = 1) -> list[CollectedSpan]:
    """Return the spans of a trace, once those of the worker and of this many jobs have arrived."""

    def has_all(spans: list[CollectedSpan]) -> bool:
        names = [(span.service, span.name) for span in spans if span.trace_id == trace_id]
        runs = sum(service == "penstock-worker" and name.startswith("run ") for service, name in names)
        return runs == 1 and sum(name == "emit" for _, name in names) == num_jobs

    return [span for span in collector.wait_for(has_all) if span.trace_id == trace_id]


def test_one_trace_joins_the_program_the_worker_and_the_node(app: Celery, collector: OtlpCollector) -> None:
    with sending() as (trace_id, caller_id):
        task = app.send_task(GENERATE, kwargs=WORK)
    answer = task.get(timeout=60, interval=0.05)
    spans = spans_of(collector, trace_id)
    (run,) = (span for span in spans if span.service == "penstock-worker" and span.name != "enqueue")
    (enqueue,) = (span for span in spans if span.name == "enqueue")
    (lease,) = (span for span in spans if span.service == "penstock-node" and span.kind == "consumer")
    assert (run.name, run.kind, run.parent_id) == (f"run {GENERATE}", "consumer", caller_id)
    assert (enqueue.service, enqueue.parent_id) == ("penstock-worker", run.span_id)
    assert lease.parent_id == enqueue.span_id
    assert run.attributes["messaging.message.id"] == task.id
    assert lease.attributes["penstock.job.id"] == enqueue.attributes["messaging.message.id"]
    assert lease.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 5
    # The worker's span ends after the node's, since it has the answer.
    assert run.start_ns < enqueue.start_ns < lease.end_ns < run.end_ns + 5e6
    assert not any("the gate opens" in str(span.attributes) for span in spans)


def test_each_row_of_a_batch_file_is_in_the_trace_of_its_task(
    app: Celery, collector: OtlpCollector, tmp_path: Any
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [chat_row(f"{i}") for i in range(3)])
    with sending() as (trace_id, _):
        task = app.send_task(RUN_FILE, kwargs={"input": str(source), "output": str(tmp_path / "out.jsonl")})
    assert task.get(timeout=60, interval=0.05)["num_answered"] == 3
    spans = spans_of(collector, trace_id, num_jobs=3)
    (run,) = (span for span in spans if span.name == f"run {RUN_FILE}")
    assert [span.parent_id for span in spans if span.name == "enqueue"] == [run.span_id] * 3


def test_a_task_whose_trace_is_not_sampled_makes_no_span(app: Celery, collector: OtlpCollector) -> None:
    with sending(sampled=False) as (unsampled, _):
        app.send_task(GENERATE, kwargs=WORK).get(timeout=60, interval=0.05)
    # Spans are exported in order, so those of the first task would be there before those of the second.
    with sending() as (trace_id, _):
        app.send_task(GENERATE, kwargs=WORK).get(timeout=60, interval=0.05)
    spans_of(collector, trace_id)
    assert not any(span.trace_id == unsampled for span in collector.spans)


def test_a_task_that_fails_says_only_the_kind_of_its_error(app: Celery, collector: OtlpCollector) -> None:
    with sending() as (trace_id, _):
        task = app.send_task(GENERATE, kwargs={"prompt": "unspeakable", "model": "nothing"})
    with pytest.raises(Exception, match="nothing"):
        task.get(timeout=60, interval=0.05)
    (run,) = spans_of(collector, trace_id, num_jobs=0)
    assert run.attributes["error.type"].endswith("Error")
    assert "unspeakable" not in str(run)


def test_a_program_without_a_span_sends_no_header(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not trace.get_current_span().get_span_context().is_valid
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(app.amqp, "send_task_message", lambda *_args, **_given: sent.append(_given))
    app.send_task(GENERATE, kwargs=WORK)
    assert "traceparent" not in str(sent)
