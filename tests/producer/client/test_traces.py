"""Jobs carry the trace of the span that is current where they are submitted, and only if it is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fakes.fake_node import FakeNode
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from redis.asyncio import Redis

from penstock.producer.client import AsyncClient, Client
from penstock.queue import keys
from penstock.queue.wire import decode_request
from penstock.runtime.tracing.context import carried_by

OPTIONS: dict[str, Any] = {"max_tokens": 4, "background": True}


@contextmanager
def current_span(*, sampled: bool = True) -> Iterator[str]:
    """Make a span current, and give its trace's id."""
    tracer = TracerProvider(sampler=ALWAYS_ON if sampled else ALWAYS_OFF).get_tracer("an application")
    with tracer.start_as_current_span("asks") as span:
        yield f"{span.get_span_context().trace_id:032x}"


async def carried(redis: Redis, job_id: str) -> tuple[str, ...]:
    data = await redis.get(keys.request(job_id))
    assert isinstance(data, bytes)
    return decode_request(data).trace


async def test_a_job_carries_the_trace_of_the_current_span(
    told_node: FakeNode, client: AsyncClient, redis: Redis
) -> None:
    with current_span() as trace_id:
        job = await client.submit("hello", **OPTIONS)
    (parent,) = await carried(redis, job.id)
    assert parent.split("-")[1] == trace_id


async def test_a_job_carries_nothing_without_a_sampled_span(
    told_node: FakeNode, client: AsyncClient, redis: Redis
) -> None:
    plain = await client.submit("hello", **OPTIONS)
    with current_span(sampled=False):
        unsampled = await client.submit("hello", **OPTIONS)
    for job in (plain, unsampled):
        data = await redis.get(keys.request(job.id))
        assert isinstance(data, bytes)
        assert b"trace" not in data


async def test_the_trace_is_no_part_of_the_request_that_an_idempotency_key_names(
    told_node: FakeNode, client: AsyncClient, redis: Redis
) -> None:
    with current_span() as trace_id:
        first = await client.submit("hello", idempotency_key="one", **OPTIONS)
    with current_span():
        again = await client.submit("hello", idempotency_key="one", **OPTIONS)
    assert again.id == first.id
    assert (await carried(redis, first.id))[0].split("-")[1] == trace_id


async def test_the_sync_client_carries_the_trace_of_the_calling_thread(
    told_node: FakeNode, redis: Redis, redis_url: str
) -> None:
    def submit() -> tuple[str, str]:
        with Client(redis_url) as client, current_span() as trace_id:
            return client.submit("hello", **OPTIONS).id, trace_id

    job_id, trace_id = await asyncio.to_thread(submit)
    assert (await carried(redis, job_id))[0].split("-")[1] == trace_id


async def test_long_trace_state_is_left_out() -> None:
    state = trace.TraceState([(f"vendor{i}", "v" * 100) for i in range(6)])
    parent = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(1), trace_state=state)
    assert carried_by(trace.NonRecordingSpan(parent)) == (f"00-{1:032x}-{2:016x}-01",)
