"""A node's metrics: counted as things happen, served on a port of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fakes.processes.reference_engine import ReferenceEngine
from prometheus_client.parser import text_string_to_metric_families

from penstock.contract.errors import ConfigError
from penstock.gpu_node.monitor.counters import Latencies
from penstock.gpu_node.monitor.metrics import serving_metrics
from penstock.gpu_node.node import Node
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.client import AsyncClient
from penstock.runtime.loop_watch import LoopWatch


@asynccontextmanager
async def running(redis_url: str, **settings: object) -> AsyncIterator[Node]:
    node = Node(NodeSettings(model="reference", redis_url=redis_url, **settings), ReferenceEngine(step_s=0.002))
    ready = asyncio.Event()
    task = asyncio.create_task(node.run(ready))
    await ready.wait()
    yield node
    node.stop()
    node.stop()
    await task


async def scrape(port: int) -> dict[str, float]:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    return {
        ":".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_working_node_tells_what_it_did(redis_url: str) -> None:
    async with running(redis_url) as node, AsyncClient(redis_url) as client:
        with serving_metrics(node, "127.0.0.1", 0) as port:
            before = await scrape(port)
            jobs = [await client.submit("hello", max_tokens=20) for _ in range(3)]
            for job in jobs:
                await job.result()
            while node.ledger.counts.finished < 3:
                await asyncio.sleep(0.01)
            found = await scrape(port)
    assert before["penstock_node_taken_total"] == before["penstock_node_emit_seconds_count"] == 0
    assert (found["penstock_node_taken_total"], found["penstock_node_finished_total"]) == (3, 3)
    assert found["penstock_node_taken_over_total"] == found["penstock_node_dropped_total"] == 0
    assert found["penstock_node_jobs"] == found["penstock_node_unsent_bytes"] == 0
    calls = found["penstock_node_emit_seconds_count"]
    assert 0 < calls == found["penstock_node_emit_seconds_bucket:+Inf"] < 3 * 20
    assert 0 < found["penstock_node_emit_seconds_sum"] < calls * 10
    assert found["penstock_engine_kv_blocks_total"] > 0


async def test_takeovers_returns_and_lost_jobs_are_counted(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        async with running(redis_url, drain_s=0.0) as first:
            job = await client.submit("hello", max_tokens=400)
            stream = job.stream()
            await anext(stream)
        assert first.ledger.counts.given_back_drain == 1
        async with running(redis_url) as second:
            assert [chunk async for chunk in stream][-1].outcome is not None
            assert (second.ledger.counts.taken, second.ledger.counts.taken_over) == (1, 1)


async def test_a_port_that_is_taken_is_said_to_be(redis_url: str) -> None:
    async with running(redis_url) as node:
        taken = serving_metrics(node, "127.0.0.1", 0)
        port = taken.__enter__()
        with pytest.raises(ConfigError, match=f"metrics_port {port}"), serving_metrics(node, "127.0.0.1", port):
            pass
        taken.__exit__(None, None, None)


def test_latencies_are_put_into_the_first_class_that_holds_them() -> None:
    latencies = Latencies()
    for seconds in (0.0, 0.0005, 0.0006, 9.0, 1000.0):
        latencies.note(seconds)
    assert latencies.counts == [2, 1, *[0] * 10, 1, 1]
    assert latencies.total_s == pytest.approx(1009.0011)


async def test_a_node_tells_how_long_its_loop_was_held(redis_url: str) -> None:
    watch = LoopWatch(interval_s=0.005)
    watch.start()
    async with running(redis_url) as node:
        with serving_metrics(node, "127.0.0.1", 0, watch) as port:
            await asyncio.sleep(0.02)
            until_s = time.thread_time() + 0.1
            while time.thread_time() < until_s:
                pass
            await asyncio.sleep(0.02)
            found = await scrape(port)
    watch.stop()
    assert found["penstock_node_loop_hold_seconds:cpu"] > 0.08
    assert found["penstock_node_loop_hold_seconds:wall"] > 0.08
    assert found["penstock_node_loop_late_seconds_count"] == found["penstock_node_loop_late_seconds_bucket:+Inf"] > 0
