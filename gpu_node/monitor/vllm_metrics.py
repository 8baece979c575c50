"""A node's metrics under vLLM's names, which dashboards and autoscalers query.

Each name has the meaning that vLLM gives it, with two differences. `vllm:num_requests_waiting` includes this node's
part of the pool's queue, because jobs wait there and not inside an engine. Each live node reports an equal part, so the
sum over the nodes is the number of all waiting requests. The prefill time begins when the node takes a job, so it
includes tokenization and waiting inside the engine.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.ledger import Ledger
from penstock.gpu_node.monitor.engine_metrics import kv_usage
from penstock.gpu_node.monitor.job_times import JobMetrics
from penstock.gpu_node.settings import NodeSettings
from penstock.runtime.histogram import Histogram, sum_of

MAX_ADAPTERS = 8
"""Adapters that one label lists. The limit bounds the length of the label."""
LABELS = ("model_name", "engine")
_ENGINE = "0"
"""vLLM numbers the engines of one server. A node has one engine."""
_JOB_HISTOGRAMS = {
    "time_to_first_token_seconds": "first_token_s",
    "inter_token_latency_seconds": "inter_token_s",
    "time_per_output_token_seconds": "inter_token_s",
    "request_time_per_output_token_seconds": "output_token_s",
    "e2e_request_latency_seconds": "total_s",
    "request_queue_time_seconds": "queue_s",
    "request_prefill_time_seconds": "prefill_s",
    "request_decode_time_seconds": "decode_s",
    "request_prompt_tokens": "prompt_tokens",
    "request_generation_tokens": "output_tokens",
    "request_max_num_generation_tokens": "longest_outputs",
    "request_params_max_tokens": "max_tokens",
    "request_params_n": "num_choices",
}
"""vLLM's histograms of requests, and the attribute of ClassMetrics with the same values."""
_REASONS = {"cancelled": "abort", "expired": "abort", "failed": "error"}
"""vLLM's finish reasons for the states of jobs that are not done. The finish reasons of done jobs have vLLM's names."""


def vllm_metrics(ledger: Ledger, stats: EngineStats, settings: NodeSettings) -> Iterator[Metric]:
    """Yield the metrics of a node under vLLM's names."""
    labels = (settings.model_name, _ENGINE)
    for name, value in _gauges(ledger, stats).items():
        gauge = GaugeMetricFamily(f"vllm:{name}", _same_as_vllm(name), labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    for name, value in _counters(stats).items():
        counter = CounterMetricFamily(f"vllm:{name}", _same_as_vllm(name), labels=LABELS)
        counter.add_metric(labels, value)
        yield counter
    jobs = ledger.counts.jobs
    for name, attribute in _JOB_HISTOGRAMS.items():
        yield _histogram(name, sum_of(getattr(metrics, attribute) for metrics in jobs.classes), labels)
    if stats.batch_tokens is not None:
        yield _histogram("iteration_tokens_total", stats.batch_tokens, labels)
    yield _ends(jobs, labels)
    yield _cache_config(stats, labels)
    yield _adapters(ledger, settings.max_loras if settings.has_adapters else 0)


def _same_as_vllm(name: str) -> str:
    return f"What vLLM reports as {name}."


def _gauges(ledger: Ledger, stats: EngineStats) -> Mapping[str, float]:
    num_waiting = sum(not job.is_in_engine and not job.is_task for job in ledger)
    usage = kv_usage(stats)
    swap = stats.swap_blocks_total
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting + num_waiting + ledger.counts.queue_share,
        "num_requests_swapped": stats.num_swapped,
        "kv_cache_usage_perc": usage,
        "gpu_cache_usage_perc": usage,
        "cpu_cache_usage_perc": 1 - stats.swap_blocks_free / swap if swap else 0.0,
    }


def _counters(stats: EngineStats) -> Mapping[str, float]:
    queries, hits = stats.prefix_lookup_tokens, stats.prefix_hit_tokens
    return {
        "prompt_tokens": stats.prefill_tokens + hits,
        "generation_tokens": stats.decode_tokens,
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
        "gpu_prefix_cache_queries": queries,
        "gpu_prefix_cache_hits": hits,
        "spec_decode_num_draft_tokens": stats.drafted_tokens,
        "spec_decode_num_accepted_tokens": stats.accepted_tokens,
    }


def _histogram(name: str, values: Histogram, labels: tuple[str, str]) -> Metric:
    family = HistogramMetricFamily(f"vllm:{name}", _same_as_vllm(name), labels=LABELS)
    family.add_metric(labels, values.buckets, values.total)
    return family


def _ends(jobs: JobMetrics, labels: tuple[str, str]) -> Metric:
    counts = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    for metrics in jobs.classes:
        # The engine's thread may add a reason meanwhile.
        for reason, count in list(metrics.ends.items()):
            counts[_REASONS.get(reason, reason)] += count
    family = CounterMetricFamily(
        "vllm:request_success", _same_as_vllm("request_success"), labels=(*LABELS, "finished_reason")
    )
    for reason, count in counts.items():
        family.add_metric((*labels, reason), count)
    return family


def _cache_config(stats: EngineStats, labels: tuple[str, str]) -> Metric:
    text = "The sizes of the KV cache, as labels of a gauge that is always 1."
    names = ("block_size", "num_gpu_blocks", "num_cpu_blocks")
    family = GaugeMetricFamily("vllm:cache_config_info", text, labels=(*LABELS, *names))
    sizes = (stats.block_size, stats.kv_blocks_total, stats.swap_blocks_total)
    family.add_metric((*labels, *map(str, sizes)), 1)
    return family


def _adapters(ledger: Ledger, num_slots: int) -> Metric:
    running = {job.adapter for job in ledger if job.adapter and job.is_in_engine}
    waiting = {job.adapter for job in ledger if job.adapter and not job.is_in_engine}
    text = "The adapters of the jobs that this node holds, at most 8 of each kind. The value is the time of the scrape."
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=names)
    family.add_metric((str(num_slots), _listed(running), _listed(waiting)), time.time())
    return family


def _listed(adapters: Collection[str]) -> str:
    return ",".join(sorted(adapters)[:MAX_ADAPTERS])
