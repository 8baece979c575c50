"""Prometheus metrics of an engine, from its stats."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.contract.priority import class_of_level, is_background
from penstock.gpu_node.engine.records import COUNTED, EngineStats
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.jobs.times import JobMetrics
from penstock.gpu_node.settings import NodeSettings
from penstock.runtime.histogram import Histogram, sum_of

_COUNTERS = {
    "steps": ("steps", "Engine steps."),
    "failed_steps": ("num_failed_steps", "Engine steps that failed."),
    "memory_failures": ("num_memory_failures", "Failed steps that ran out of memory."),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens computed."),
    "decode_tokens": ("decode_tokens", "Tokens generated."),
    "prefix_lookup_tokens": ("prefix_lookup_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Prompt tokens found in the prefix cache, on device or host."),
    "swap_hit_tokens": ("swap_hit_tokens", "Prompt tokens found in the prefix cache on the host."),
    "kv_evictions": ("kv_evictions", "Cached prefix blocks that the device evicted."),
    "swap_evictions": ("swap_evictions", "Cached prefix blocks that the host evicted."),
    "state_hits": ("state_hits", "Sequences that started from a snapshot of a state."),
    "state_evictions": ("state_evictions", "Snapshots of states that gave way to other states."),
    "state_missed_tokens": (
        "state_missed_tokens",
        "Tokens with cached blocks that were computed again, because no snapshot stood at their end.",
    ),
    "window_evictions": ("window_evictions", "Cached blocks of windows that gave way to others."),
    "window_missed_tokens": (
        "window_missed_tokens",
        "Tokens with cached blocks that were computed again, because no cached window stood at their end.",
    ),
    "swapped_out_blocks": ("swapped_out_blocks", "Blocks copied from the device to the host."),
    "swapped_in_blocks": ("swapped_in_blocks", "Blocks copied from the host to the device."),
    "drafted_tokens": ("drafted_tokens", "Draft tokens computed."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens accepted."),
    "preemptions": ("num_preemptions", "Preempted sequences."),
    "swaps": ("num_swaps", "Preempted sequences whose blocks went to host memory."),
} | {one.name: (one.name, one.metadata[COUNTED]) for one in fields(EngineStats) if COUNTED in one.metadata}
"""Counters: the name of the metric, the field of EngineStats, and the help text. EngineStats declares the last ones."""
_GAUGES = {
    "kv_blocks_total": ("kv_blocks_total", "KV blocks."),
    "kv_blocks_free": ("kv_blocks_free", "KV blocks that no sequence holds, cached prefixes included."),
    "kv_blocks_cached": ("kv_blocks_cached", "KV blocks with cached prefixes."),
    "kv_tokens_used": ("kv_tokens_used", "Tokens stored in the blocks that sequences hold."),
    "swap_blocks_total": ("swap_blocks_total", "KV blocks in host memory."),
    "swap_blocks_free": ("swap_blocks_free", "KV blocks in host memory that no sequence holds."),
    "state_slots_total": ("state_slots_total", "Slots for the states of recurrent layers."),
    "state_slots_free": ("state_slots_free", "State slots that no sequence holds, snapshots included."),
    "state_snapshots": ("state_snapshots", "State slots with a snapshot."),
    "window_blocks_total": ("window_blocks_total", "Blocks of windows, where layers with windows have their own."),
    "window_blocks_free": ("window_blocks_free", "Blocks of windows that no sequence holds, cached ones included."),
    "window_blocks_cached": ("window_blocks_cached", "Cached blocks of windows that no sequence holds."),
    "running": ("num_running", "Sequences in the running batch."),
    "held_back": ("num_held_back", "Running background sequences that the last step left out, because of chats."),
    "waiting": ("num_waiting", "Sequences that wait inside the engine."),
    "swapped": ("num_swapped", "Preempted sequences with their blocks in host memory."),
    "max_step_tokens": ("max_step_tokens", "Largest number of tokens in a step."),
    "step_ms_p50": ("step_ms_p50", "Milliseconds of a step, median of the last few hundred."),
    "step_ms_p99": ("step_ms_p99", "Milliseconds of a step, 99th percentile of the last few hundred."),
}
_HISTOGRAMS = {
    "step_seconds": "Seconds of a step, from its submission until its tokens are committed.",
    "batch_sequences": "Sequences of a step.",
    "batch_tokens": "Tokens of a step: prompt tokens computed and tokens sampled.",
}


def engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Yield the metrics of an engine."""
    for name, (field, text) in _COUNTERS.items():
        yield counter(f"penstock_engine_{name}", text, getattr(stats, field))
    for name, (field, text) in _GAUGES.items():
        yield gauge(f"penstock_engine_{name}", text, getattr(stats, field))
    for name, text in _HISTOGRAMS.items():
        if (values := getattr(stats, name)) is not None:
            yield histogram(f"penstock_engine_{name}", text, values)
    text = "Share of the KV blocks that sequences hold, or of the blocks of windows if that is larger."
    yield gauge("penstock_engine_kv_usage_ratio", text, kv_usage(stats))
    used = stats.page_utilization
    text = "Share of the held blocks' slots that store a token; the rest is fragmentation."
    yield gauge("penstock_engine_page_utilization_ratio", text, 1.0 if used is None else used)
    lookups = stats.prefix_lookup_tokens
    text = "Share of the prompt tokens that the prefix cache had, since the engine's start."
    yield gauge("penstock_engine_prefix_hit_ratio", text, stats.prefix_hit_tokens / lookups if lookups else 0.0)
    needed = stats.search_blocks_needed
    text = "Share of the blocks of beams and of the choices of best_of that sharing saved, since the engine's start."
    yield gauge("penstock_engine_search_saved_ratio", text, 1 - stats.search_blocks_held / needed if needed else 0.0)
    text = "Bytes of the KV cache, by where it is."
    caches = GaugeMetricFamily("penstock_engine_kv_cache_bytes", text, labels=("tier",))
    of_windows = stats.window_blocks_total * stats.window_block_bytes
    caches.add_metric(("device",), stats.kv_blocks_total * stats.block_bytes + of_windows)
    caches.add_metric(("host",), stats.swap_blocks_total * stats.block_bytes)
    yield caches
    size = stats.state_slots_total * stats.state_slot_bytes
    yield gauge("penstock_engine_state_cache_bytes", "Bytes of the state slots.", size)
    if stats.weight_bytes:
        yield gauge("penstock_engine_model_bytes", "Bytes of the model's weights.", stats.weight_bytes)
    text = "Seconds of all steps, by part."
    parts = CounterMetricFamily("penstock_engine_step_part_seconds", text, labels=("part",))
    for part, seconds in stats.part_seconds.items():
        parts.add_metric((part,), seconds)
    yield parts
    text = "Seconds of all steps, by kind of work; background is what its sequences add to a step."
    kinds = CounterMetricFamily("penstock_engine_step_kind_seconds", text, labels=("kind",))
    for kind, seconds in stats.kind_seconds.items():
        kinds.add_metric((kind,), seconds)
    yield kinds
    text = "Seconds of all steps, by class and kind of work."
    classes = CounterMetricFamily("penstock_engine_step_class_seconds", text, labels=("priority", "background"))
    for level, seconds in enumerate(stats.level_seconds):
        classes.add_metric((class_of_level(level).label, str(is_background(level)).lower()), seconds)
    yield classes
    text = "1 while background work is below its share of the engine's time."
    yield gauge("penstock_engine_background_due", text, stats.background_due)
    yield from _ranks(stats)
    text = "Steps of a GPU that did not run as a CUDA graph, by reason."
    eager = CounterMetricFamily("penstock_engine_eager_steps", text, labels=("reason",))
    for reason, count in stats.eager_steps.items():
        eager.add_metric((reason,), count)
    yield eager


def _ranks(stats: EngineStats) -> Iterator[Metric]:
    """Yield the metrics of the ranks that compute the model together, if there are several."""
    if stats.num_ranks == 1:
        return
    yield gauge("penstock_engine_ranks", "Processes that compute the model together.", stats.num_ranks)
    text = "Times that a rank was lost, and all ranks were started again."
    yield counter("penstock_engine_rank_losses", text, stats.num_rank_losses)
    text = "Times that all ranks have waited for each other, since they were started last."
    yield gauge("penstock_engine_rank_meetings", text, stats.ranks.num_meetings)
    text = "Steps of the ranks, since they were started last."
    yield gauge("penstock_engine_rank_steps", text, stats.ranks.num_steps)
    text = "Seconds in which steps of the ranks ran, since they were started last."
    yield gauge("penstock_engine_rank_step_seconds", text, stats.ranks.stepped_s)
    text = "Seconds that a rank has waited for the slowest one, since the ranks were started last."
    waited = GaugeMetricFamily("penstock_engine_rank_waited_seconds", text, labels=("rank", "stage"))
    text = "Seconds from the arrival of the slowest rank until a rank went on, since the ranks were started last."
    exchanged = GaugeMetricFamily("penstock_engine_rank_exchanged_seconds", text, labels=("rank", "stage"))
    text = "Bytes of the weights that a rank computes with."
    weights = GaugeMetricFamily("penstock_engine_rank_weight_bytes", text, labels=("rank", "stage"))
    text = "Bytes of a rank's part of the KV blocks, on device and host."
    kv_blocks = GaugeMetricFamily("penstock_engine_rank_kv_bytes", text, labels=("rank", "stage"))
    ranks = stats.ranks
    by_rank: tuple[tuple[GaugeMetricFamily, tuple[float, ...]], ...] = (
        (waited, ranks.waited_s),
        (exchanged, ranks.exchanged_s),
        (weights, ranks.weight_bytes),
        (kv_blocks, ranks.kv_bytes),
    )
    for family, numbers in by_rank:
        for rank, number in enumerate(numbers):
            family.add_metric((str(rank), str(rank * ranks.num_stages // ranks.num_ranks)), number)
        if numbers:
            yield family


def kv_usage(stats: EngineStats) -> float:
    """Return the share of the KV blocks that sequences hold, or of those of windows if it is larger: from 0 to 1."""
    pairs = (stats.kv_blocks_free, stats.kv_blocks_total), (stats.window_blocks_free, stats.window_blocks_total)
    return max(1 - free / total if total else 0.0 for free, total in pairs)


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels."""
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def histogram(name: str, text: str, values: Histogram) -> Metric:
    """Return a histogram without labels."""
    return HistogramMetricFamily(name, text, buckets=values.buckets, sum_value=values.total)


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


def vllm_metrics(held_jobs: HeldJobs, stats: EngineStats, settings: NodeSettings) -> Iterator[Metric]:
    """Yield the metrics of a node under vLLM's names, which dashboards and autoscalers query.

    Each name has the meaning that vLLM gives it, with two differences. `vllm:num_requests_waiting` includes this node's
    part of the pool's queue, because jobs wait there and not inside an engine. Each live node reports an equal part, so
    the sum over the nodes is the number of all waiting requests. The prefill time begins when the node takes a job, so
    it includes tokenization and waiting inside the engine.
    """
    labels = (settings.model_name, _ENGINE)
    for name, value in _gauges(held_jobs, stats).items():
        gauge = GaugeMetricFamily(f"vllm:{name}", _same_as_vllm(name), labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    for name, value in _counters(stats).items():
        counter = CounterMetricFamily(f"vllm:{name}", _same_as_vllm(name), labels=LABELS)
        counter.add_metric(labels, value)
        yield counter
    jobs = held_jobs.counts.jobs
    for name, attribute in _JOB_HISTOGRAMS.items():
        yield _histogram(name, sum_of(getattr(metrics, attribute) for metrics in jobs.classes), labels)
    if stats.batch_tokens is not None:
        yield _histogram("iteration_tokens_total", stats.batch_tokens, labels)
    yield _ends(jobs, labels)
    yield _cache_config(stats, labels)
    yield _adapters(held_jobs, settings.max_loras if settings.has_adapters else 0)


def _same_as_vllm(name: str) -> str:
    return f"What vLLM reports as {name}."


def _gauges(held_jobs: HeldJobs, stats: EngineStats) -> Mapping[str, float]:
    num_waiting = sum(not job.is_in_engine and not job.is_task for job in held_jobs)
    usage = kv_usage(stats)
    swap = stats.swap_blocks_total
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting + num_waiting + held_jobs.counts.queue_share,
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


def _adapters(held_jobs: HeldJobs, num_slots: int) -> Metric:
    running = {job.adapter for job in held_jobs if job.adapter and job.is_in_engine}
    waiting = {job.adapter for job in held_jobs if job.adapter and not job.is_in_engine}
    text = "The adapters of the jobs that this node holds, at most 8 of each kind. The value is the time of the scrape."
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=names)
    family.add_metric((str(num_slots), _listed(running), _listed(waiting)), time.time())
    return family


def _listed(adapters: Collection[str]) -> str:
    return ",".join(sorted(adapters)[:MAX_ADAPTERS])
