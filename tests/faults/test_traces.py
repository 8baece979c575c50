"""One trace per request, over real processes and a real collector: gateway, queue, node and the next node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fakes.processes.node_process import NodeProcess
from faults.tools.http_reader import http_client
from faults.tools.processes import GatewayProcess
from fixtures.otlp_collector import CollectedSpan, OtlpCollector
from redis.asyncio import Redis

from penstock.producer.client import AsyncClient

POOL, MODEL = "traced", "reference"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_ID = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01", "tracestate": "vendor=value"}
BODY = {"model": POOL, "prompt": "the gate opens", "max_tokens": 60, "temperature": 0.5, "stream": True}
NODE: dict[str, Any] = {"pool": POOL, "lease_ms": 3000}


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as one:
        yield one


def only(spans: list[CollectedSpan], name: str) -> CollectedSpan:
    (span,) = [span for span in spans if span.name == name]
    return span


def has_ended(num_leases: int) -> Callable[[list[CollectedSpan]], bool]:
    """Return whether the gateway's spans and this number of lease spans have arrived."""

    def check(spans: list[CollectedSpan]) -> bool:
        num = sum(span.kind == "consumer" for span in spans)
        return num >= num_leases and any(span.kind == "server" for span in spans)

    return check


def trace_ids_in_access_log(gateway: GatewayProcess) -> list[str | None]:
    """Return the field `trace_id` of each request's log line."""
    lines = [json.loads(line) for line in gateway.log.splitlines() if line.startswith("{")]
    return [line.get("trace_id") for line in lines if line["message"] == "request"]


async def read(http: httpx.AsyncClient, url: str, **headers: str) -> tuple[str, httpx.Headers]:
    answer = await http.post(f"{url}/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.text, answer.headers


async def test_one_trace_joins_gateway_queue_and_node(redis: Redis, redis_url: str, collector: OtlpCollector) -> None:
    with (
        NodeProcess(redis_url, otlp_traces_endpoint=collector.url, **NODE),
        GatewayProcess(redis_url, otlp_traces_endpoint=collector.url) as gateway,
    ):
        async with http_client() as http:
            _, headers = await read(http, gateway.url, **HEADERS)
        spans = await asyncio.to_thread(collector.wait_for, has_ended(1))
        assert trace_ids_in_access_log(gateway) == [TRACE_ID]
    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert {span.trace_state for span in spans} == {"vendor=value"}
    server, enqueue, queue = (only(spans, name) for name in ("POST /v1/completions", "enqueue", "queue"))
    lease = only(spans, f"text_completion {MODEL}")
    parts = [only(spans, name) for name in ("prefill", "decode", "emit")]
    assert (server.service, server.kind, server.parent_id) == ("penstock-gateway", "server", CALLER_ID)
    assert (enqueue.service, enqueue.kind, enqueue.parent_id) == ("penstock-gateway", "producer", server.span_id)
    assert (lease.service, lease.kind, lease.parent_id) == ("penstock-node", "consumer", enqueue.span_id)
    assert queue.parent_id == enqueue.span_id
    assert {part.parent_id for part in parts} == {lease.span_id}
    assert headers["traceresponse"] == f"00-{TRACE_ID}-{server.span_id}-01"
    assert server.attributes["http.route"] == "/v1/completions"
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["penstock.job.id"] == [enqueue.attributes["messaging.message.id"]]
    assert server.events == ("first_bytes",)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 60,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": len("the gate opens"),
        "gen_ai.usage.output_tokens": 60,
        "gen_ai.response.finish_reasons": ["length"],
        "penstock.job.id": enqueue.attributes["messaging.message.id"],
        "penstock.tenant": "default",
    }
    assert {name: lease.attributes[name] for name in expected} == expected
    prefill, decode, emit = parts
    assert lease.start_ns == pytest.approx(queue.end_ns, abs=1e6)
    assert lease.start_ns <= prefill.start_ns + 1e6
    assert prefill.end_ns == pytest.approx(decode.start_ns, abs=1e6)
    assert decode.end_ns == pytest.approx(emit.start_ns, abs=1e6)
    assert emit.end_ns == pytest.approx(lease.end_ns, abs=1e6)


async def test_a_trace_has_the_spans_of_a_killed_node_and_of_the_one_that_took_over(
    redis: Redis, redis_url: str, collector: OtlpCollector
) -> None:
    with (
        NodeProcess(redis_url, step_s=0.05, name="first", otlp_traces_endpoint=collector.url, **NODE) as first,
        GatewayProcess(redis_url, otlp_traces_endpoint=collector.url) as gateway,
    ):
        async with http_client() as http:
            reading = asyncio.create_task(read(http, gateway.url, **HEADERS))
            # The node exports the spans before the first token within a second.
            await asyncio.to_thread(collector.wait_for, lambda spans: any(span.name == "prefill" for span in spans))
            first.kill()
            with NodeProcess(redis_url, name="second", otlp_traces_endpoint=collector.url, **NODE):
                text, _ = await reading
                spans = await asyncio.to_thread(collector.wait_for, has_ended(2))
    assert text.endswith("data: [DONE]\n\n")
    assert {span.trace_id for span in spans} == {TRACE_ID}
    enqueue = only(spans, "enqueue")
    lost, last = sorted((span for span in spans if span.kind == "consumer"), key=lambda span: span.start_ns)
    assert lost.attributes["penstock.node.id"].startswith("first-")
    assert lost.is_error
    assert lost.attributes["penstock.lease.end"] == "lost"
    assert last.attributes["penstock.node.id"].startswith("second-")
    assert not last.is_error
    assert last.attributes["gen_ai.usage.output_tokens"] == 60
    assert last.links == (lost.span_id,)
    assert {lost.parent_id, last.parent_id} == {enqueue.span_id}
    prefills = sorted((span for span in spans if span.name == "prefill"), key=lambda span: span.start_ns)
    assert [span.parent_id for span in prefills] == [lost.span_id, last.span_id]
    _, queued_again = sorted((span for span in spans if span.name == "queue"), key=lambda span: span.start_ns)
    assert queued_again.start_ns == pytest.approx(lost.end_ns, abs=5e6)
    ids = {span.span_id for span in spans} | {CALLER_ID}
    assert all(span.parent_id in ids for span in spans)


async def test_a_node_that_drains_records_its_own_lease(redis: Redis, redis_url: str, collector: OtlpCollector) -> None:
    with (
        NodeProcess(redis_url, step_s=0.05, drain_s=0, otlp_traces_endpoint=collector.url, **NODE) as first,
        GatewayProcess(redis_url, otlp_traces_endpoint=collector.url) as gateway,
    ):
        async with http_client() as http:
            reading = asyncio.create_task(read(http, gateway.url, **HEADERS))
            await asyncio.to_thread(collector.wait_for, lambda spans: any(span.name == "prefill" for span in spans))
            assert await asyncio.to_thread(first.stop) == 0
            with NodeProcess(redis_url, otlp_traces_endpoint=collector.url, **NODE):
                await reading
                spans = await asyncio.to_thread(collector.wait_for, has_ended(2))
    gave_back, last = sorted((span for span in spans if span.kind == "consumer"), key=lambda span: span.start_ns)
    assert gave_back.attributes["penstock.lease.end"] == "drain"
    assert not gave_back.is_error
    assert last.links == (gave_back.span_id,)
    decodes = [span for span in spans if span.name == "decode"]
    assert {span.parent_id for span in decodes} == {gave_back.span_id, last.span_id}
    assert len({span.span_id for span in spans}) == len(spans)


@pytest.mark.parametrize("headers", [{"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-00"}, {}])
async def test_a_trace_that_is_not_sampled_makes_no_span(
    redis: Redis, redis_url: str, collector: OtlpCollector, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with GatewayProcess(redis_url, otlp_traces_endpoint=collector.url) as gateway:
        with NodeProcess(redis_url, otlp_traces_endpoint=collector.url, **NODE) as node:
            async with http_client() as http:
                _, answered = await read(http, gateway.url, **headers)
            assert "traceresponse" not in answered
            assert node.stop() == 0
        gateway.stop()
        assert trace_ids_in_access_log(gateway) == [None]
    assert collector.spans == []


async def test_standard_variables_turn_traces_on(
    redis: Redis, redis_url: str, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    with NodeProcess(redis_url, **NODE), GatewayProcess(redis_url) as gateway:
        async with http_client() as http:
            await read(http, gateway.url)
        spans = await asyncio.to_thread(collector.wait_for, has_ended(1))
    assert {span.service for span in spans} == {"ours"}
    assert len({span.trace_id for span in spans}) == 1


async def test_an_unreachable_collector_harms_no_job(redis: Redis, redis_url: str) -> None:
    nowhere = "http://127.0.0.1:9"
    with NodeProcess(redis_url, otlp_traces_endpoint=nowhere, **NODE) as node, GatewayProcess(redis_url) as gateway:
        async with http_client() as http:
            for _ in range(3):
                await read(http, gateway.url, **HEADERS)
        async with AsyncClient(redis_url) as client:
            assert len((await client.jobs(state="succeeded")).jobs) == 3
        assert node.stop() == 0
        assert "Traceback" not in node.log
