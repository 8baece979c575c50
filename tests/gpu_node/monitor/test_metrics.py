"""A node's metrics: counted as things happen, served on a port of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.waiting import until
from prometheus_client.parser import text_string_to_metric_families

from penstock.contract.errors import ConfigError
from penstock.contract.job import Priority
from penstock.gpu_node.engine import EngineStats, RankStats
from penstock.gpu_node.engine.engine import Engine
from penstock.gpu_node.monitor.engine_metrics import engine_metrics
from penstock.gpu_node.monitor.metrics import serving_metrics
from penstock.gpu_node.node import Node
from penstock.gpu_node.service.liveness import MAX_HEARTBEAT_AGE_S
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.client import AsyncClient
from penstock.runtime.loop_watch import LoopWatch


def settings_of(redis_url: str, **settings: object) -> NodeSettings:
    return NodeSettings(model="reference", redis_url=redis_url, **settings)


@asynccontextmanager
async def running(
    redis_url: str, *, step_s: float = 0.002, leaves_core_free: bool = False, **settings: object
) -> AsyncIterator[Node]:
    node = Node(settings_of(redis_url, **settings), ReferenceEngine(step_s=step_s, leaves_core_free=leaves_core_free))
    ready = asyncio.Event()
    task = asyncio.create_task(node.run(ready))
    await ready.wait()
    yield node
    node.stop()
    node.stop()
    await task


async def scrape(port: int) -> dict[str, float]:
    # What a Prometheus server asks for.
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    async with httpx.AsyncClient(timeout=60) as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})).text
    return {
        ":".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_health_is_that_of_the_last_heartbeat(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(redis_url) as node, httpx.AsyncClient(timeout=60) as http:
        with serving_metrics(node, settings_of(redis_url)) as port:
            url = f"http://127.0.0.1:{port}/health"
            well = await http.get(url)
            assert (well.status_code, well.json()["node_id"]) == (200, node.node_id)
            state = node.state() | {"heartbeat_age_s": MAX_HEARTBEAT_AGE_S}
            monkeypatch.setattr(node, "state", lambda: state)
            assert (await http.get(url)).status_code == 503


async def test_metrics_of_a_working_node(redis_url: str) -> None:
    async with running(redis_url) as node, AsyncClient(redis_url) as client:
        with serving_metrics(node, settings_of(redis_url)) as port:
            before = await scrape(port)
            jobs = [await client.submit("hello", max_tokens=20) for _ in range(3)]
            for job in jobs:
                await job.result()
            await until(lambda: node.held_jobs.counts.finished >= 3)
            found = await scrape(port)
    assert before["penstock_node_taken_total"] == before["penstock_node_emit_seconds_count"] == 0
    assert (found["penstock_node_taken_total"], found["penstock_node_finished_total"]) == (3, 3)
    assert found["penstock_node_taken_over_total"] == found["penstock_node_dropped_total"] == 0
    assert found["penstock_node_jobs"] == found["penstock_node_unsent_bytes"] == 0
    calls = found["penstock_node_emit_seconds_count"]
    assert 0 < calls == found["penstock_node_emit_seconds_bucket:+Inf"] < 3 * 20
    assert 0 < found["penstock_node_emit_seconds_sum"] < calls * 10
    assert found["penstock_engine_kv_blocks_total"] > 0
    (info,) = [name.split(":") for name in found if name.startswith("penstock_node_info:")]
    settings = settings_of(redis_url)
    assert info[1:] == ["reference", "cpu", settings.name, settings.pool_name], "arithmetic, device, name and pool"
    assert abs(found["penstock_node_clock_offset_seconds"]) < 5
    assert found["penstock_node_heartbeat_age_seconds"] < 60 > found["penstock_node_redis_silent_seconds"]


@pytest.mark.parametrize(("is_core_free", "limit"), [(False, 0.03), (True, 0.25)], ids=["no free core", "free core"])
async def test_metrics_of_the_pace_and_of_the_cpu_time_of_sending(
    redis_url: str, is_core_free: bool, limit: float
) -> None:
    async with running(redis_url, leaves_core_free=is_core_free) as node, AsyncClient(redis_url) as client:
        with serving_metrics(node, settings_of(redis_url)) as port:
            before = await scrape(port)
            await (await client.submit("hello", max_tokens=20)).result()
            await until(lambda: node.held_jobs.counts.finished)
            found = await scrape(port)
    names = ("sends_total", "sent_chunks_total", "send_cpu_seconds_total")
    assert [before[f"penstock_node_{name}"] for name in names] == [0, 0, 0]
    sends, chunks, cpu_s = (found[f"penstock_node_{name}"] for name in names)
    assert 2 <= sends <= chunks <= 20
    assert 0 < cpu_s < sends
    assert 0 < found["penstock_node_send_interval_seconds"] <= 0.02
    assert found["penstock_node_send_cpu_limit_ratio"] == limit


async def test_times_and_ends_of_jobs_are_counted_by_class(redis_url: str) -> None:
    async with running(redis_url) as node, AsyncClient(redis_url) as client:
        with serving_metrics(node, settings_of(redis_url)) as port:
            for priority in (Priority.BATCH, Priority.STANDARD, Priority.STANDARD):
                await (await client.submit("hello", max_tokens=20, ignore_eos=True, priority=priority)).result()
            left = await client.submit("hello", max_tokens=400, ignore_eos=True, priority=Priority.STANDARD)
            await anext(left.stream())
            await left.cancel()
            await until(lambda: node.held_jobs.counts.finished >= 4)
            found = await scrape(port)
    for name in ("queue", "prefill", "time_to_first_token"):
        assert found[f"penstock_job_{name}_seconds_count:reference:batch"] == 1
        assert found[f"penstock_job_{name}_seconds_count:reference:standard"] == 3
        assert found[f"penstock_job_{name}_seconds_count:reference:interactive"] == 0
    assert found["penstock_job_seconds_count:reference:standard"] == 2
    assert found["penstock_job_inter_token_seconds_count:reference:batch"] == 19
    assert found["penstock_job_inter_token_seconds_sum:reference:batch"] >= 19 * 0.0015
    assert found["penstock_job_output_tokens_sum:reference:standard"] == 40
    assert found["penstock_job_ends_total:reference:batch:length"] == 1
    assert found["penstock_job_ends_total:reference:standard:cancelled"] == 1
    parts = [found[f"penstock_job_{name}_seconds_sum:reference:batch"] for name in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(found["penstock_job_seconds_sum:reference:batch"])


async def test_longest_choice_of_a_job_is_counted_under_the_name_of_vllm(redis_url: str) -> None:
    async with running(redis_url) as node, AsyncClient(redis_url) as client:
        with serving_metrics(node, settings_of(redis_url)) as port:
            await (await client.submit("hello", max_tokens=20, n=3, temperature=1.0, ignore_eos=True)).result()
            await (await client.submit("hello", max_tokens=5, ignore_eos=True)).result()
            await until(lambda: node.held_jobs.counts.finished >= 2)
            found = await scrape(port)
    assert found["vllm:request_max_num_generation_tokens_sum:0:reference"] == 20 + 5
    assert found["vllm:request_generation_tokens_sum:0:reference"] == 3 * 20 + 5


async def test_a_job_that_was_taken_over_counts_no_second_first_token(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        async with running(redis_url, drain_s=0.0):
            job = await client.submit("hello", max_tokens=60, ignore_eos=True, priority=Priority.STANDARD)
            await anext(job.stream())
        async with running(redis_url) as second:
            await job.result()
            await until(lambda: second.held_jobs.counts.finished >= 1)
            with serving_metrics(second, settings_of(redis_url)) as port:
                found = await scrape(port)
    assert found["penstock_job_queue_seconds_count:reference:standard"] == 0
    assert found["penstock_job_time_to_first_token_seconds_count:reference:standard"] == 0
    assert found["penstock_job_decode_seconds_count:reference:standard"] == 0
    assert found["penstock_job_seconds_count:reference:standard"] == 1
    assert 0 < found["penstock_job_inter_token_seconds_count:reference:standard"] < 59


async def test_waiting_requests_under_the_name_of_vllm_include_the_queue(redis_url: str) -> None:
    async with running(redis_url, step_s=0.05, max_num_seqs=1) as node, AsyncClient(redis_url) as client:
        with serving_metrics(node, settings_of(redis_url)) as port:
            jobs = [await client.submit("hello", max_tokens=400, ignore_eos=True) for _ in range(5)]
            await anext(jobs[0].stream())
            await until(
                lambda: node.held_jobs.counts.queue_share >= 4 and node.engine_stats and node.engine_stats.num_running
            )
            found = await scrape(port)
            for job in jobs:
                await job.cancel()
    assert found["vllm:num_requests_waiting:0:reference"] == 4
    assert found["vllm:num_requests_running:0:reference"] == 1


VLLM_HISTOGRAMS = [
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
    *("request_params_max_tokens", "iteration_tokens_total"),
]
"""The histograms that dashboards of vLLM query."""


async def test_dashboards_of_vllm_find_their_metrics(redis_url: str, tiny_model: Path) -> None:
    settings = NodeSettings(model=str(tiny_model), redis_url=redis_url, metrics_port=0, pool="demo")
    node = Node(settings, Engine(str(tiny_model), kv_cache_gib=0.1))
    ready = asyncio.Event()
    task = asyncio.create_task(node.run(ready))
    await ready.wait()
    async with AsyncClient(redis_url) as client:
        with serving_metrics(node, settings) as port:
            for _ in range(2):
                await (await client.submit("A long prompt. " * 20, max_tokens=8, ignore_eos=True)).result()
            await until(lambda: node.engine_stats is not None and node.engine_stats.decode_tokens >= 16)
            found = await scrape(port)
    node.stop()
    await task
    at = ":0:demo"
    for name in VLLM_HISTOGRAMS:
        assert found[f"vllm:{name}_count{at}"] > 0, name
        assert found[f"vllm:{name}_bucket:0:+Inf:demo"] == found[f"vllm:{name}_count{at}"], name
    assert found["vllm:request_success_total:0:length:demo"] == 2
    assert found[f"vllm:generation_tokens_total{at}"] == 16
    assert found[f"vllm:prompt_tokens_total{at}"] == found[f"vllm:request_prompt_tokens_sum{at}"]
    assert 0 < found[f"vllm:prefix_cache_hits_total{at}"] < found[f"vllm:prefix_cache_queries_total{at}"]
    assert 0 <= found[f"vllm:kv_cache_usage_perc{at}"] == found[f"vllm:gpu_cache_usage_perc{at}"] <= 1
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "num_preemptions_total"):
        assert found[f"vllm:{name}{at}"] == 0
    for name in ("cache_config_info", "lora_requests_info"):
        assert any(key.startswith(f"vllm:{name}:") for key in found), name
    parts = [found[f"penstock_engine_step_part_seconds_total:{part}"] for part in ("schedule", "forward", "output")]
    assert 0 < sum(parts) < found["penstock_engine_step_seconds_sum"] * 1.5
    blocks = found["penstock_engine_kv_blocks_total"]
    assert found["penstock_engine_kv_cache_bytes:device"] == blocks * node.engine_stats.block_bytes > 0
    assert found["penstock_engine_kv_cache_bytes:host"] == 0
    assert not any(name.startswith("penstock_gpu_") for name in found)
    assert found["penstock_engine_batch_tokens_sum"] == found["penstock_engine_prefill_tokens_total"] + 16


async def test_takeovers_returns_and_lost_jobs_are_counted(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        async with running(redis_url, drain_s=0.0) as first:
            job = await client.submit("hello", max_tokens=400)
            stream = job.stream()
            await anext(stream)
        assert first.held_jobs.counts.given_back_drain == 1
        async with running(redis_url) as second:
            assert [chunk async for chunk in stream][-1].outcome is not None
            assert (second.held_jobs.counts.taken, second.held_jobs.counts.taken_over) == (1, 1)


def test_metrics_of_ranks_have_their_number_and_stage() -> None:
    ranks = RankStats(
        *(4, 2, (0.5, 0.25, 3.0, 3.5), (0.125,) * 4, 1000),
        weight_bytes=(10, 20, 30, 40),
        kv_bytes=(1, 2, 3, 4),
        num_stages=2,
        num_steps=7,
        stepped_s=6.5,
    )
    stats = EngineStats(steps=1, ranks=ranks, num_ranks=4, num_rank_losses=1)
    found = {
        ":".join([sample.name, *sample.labels.values()]): sample.value
        for family in engine_metrics(stats)
        for sample in family.samples
        if "rank" in sample.name
    }
    assert found["penstock_engine_rank_losses_total"] == 1
    assert found["penstock_engine_rank_meetings"] == 1000
    assert found["penstock_engine_rank_waited_seconds:1:0"] == 0.25
    assert found["penstock_engine_rank_waited_seconds:3:1"] == 3.5
    assert found["penstock_engine_rank_exchanged_seconds:2:1"] == 0.125
    assert found["penstock_engine_rank_weight_bytes:3:1"] == 40
    assert found["penstock_engine_rank_kv_bytes:1:0"] == 2
    assert (found["penstock_engine_rank_steps"], found["penstock_engine_rank_step_seconds"]) == (7, 6.5)
    assert not [family.name for family in engine_metrics(EngineStats(steps=1)) if "rank" in family.name]


async def test_port_in_use_is_a_config_error(redis_url: str) -> None:
    async with running(redis_url) as node:
        taken = serving_metrics(node, settings_of(redis_url))
        port = taken.__enter__()
        with (
            pytest.raises(ConfigError, match=f"metrics_port {port}"),
            serving_metrics(node, settings_of(redis_url, metrics_port=port)),
        ):
            pass
        taken.__exit__(None, None, None)


async def test_metrics_of_the_blocked_event_loop(redis_url: str) -> None:
    watch = LoopWatch(interval_s=0.005)
    watch.start()
    async with running(redis_url) as node:
        with serving_metrics(node, settings_of(redis_url), watch) as port:
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


async def test_engine_time_counts_by_class_and_its_shares_reach_the_pool(redis_url: str, tiny_model: Path) -> None:
    settings = NodeSettings(model=str(tiny_model), redis_url=redis_url, metrics_port=0, pool="demo")
    node = Node(settings, Engine(str(tiny_model), kv_cache_gib=0.1))
    ready = asyncio.Event()
    task = asyncio.create_task(node.run(ready))
    await ready.wait()
    async with AsyncClient(redis_url) as client:
        with serving_metrics(node, settings) as port:
            await (await client.submit("A prompt.", max_tokens=32, ignore_eos=True)).result()
            await (await client.submit("A prompt.", max_tokens=4, ignore_eos=True, background=False)).result()
            found = await until(client.pool_stats, lambda stats: (stats[0][0].queue.engine_shares or [0, 0])[1])
            shares = found[0][0].queue.engine_shares
            found = await scrape(port)
    node.stop()
    await task
    name = "penstock_engine_step_class_seconds_total"
    seconds = {key.removeprefix(f"{name}:"): value for key, value in found.items() if key.startswith(name) and value}
    assert seconds.keys() == {"false:standard", "true:batch"}
    runner_seconds = sum(found[f"penstock_engine_step_part_seconds_total:{part}"] for part in ("forward", "sample"))
    assert sum(seconds.values()) == pytest.approx(runner_seconds)
    assert shares[1] + shares[5] == pytest.approx(1)
    assert shares[5] == pytest.approx(seconds["true:batch"] / sum(seconds.values()), abs=0.01)
