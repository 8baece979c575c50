"""Prometheus metrics of an engine, from its stats."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.gpu_node.engine.records import EngineStats
from penstock.runtime.histogram import Histogram

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
    "swapped_out_blocks": ("swapped_out_blocks", "Blocks copied from the device to the host."),
    "swapped_in_blocks": ("swapped_in_blocks", "Blocks copied from the host to the device."),
    "copied_blocks": ("copied_blocks", "Blocks copied: for forks, swaps, and prefixes moved between device and host."),
    "drafted_tokens": ("drafted_tokens", "Draft tokens computed."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens accepted."),
    "preemptions": ("num_preemptions", "Preempted sequences."),
    "swaps": ("num_swaps", "Preempted sequences whose blocks went to host memory."),
    "grammar_trials": ("grammar_trials", "New grammars that were tried out."),
    "grammar_refusals": ("grammar_refusals", "New grammars that were refused."),
    "grammar_costly_refusals": (
        "grammar_costly_refusals",
        "New grammars that a limit of time, memory or work refused.",
    ),
    "grammar_kills": ("grammar_kills", "Grammar processes that a limit killed."),
    "grammar_restarts": ("grammar_restarts", "Grammar processes started to replace one that ended."),
    "late_masks": ("late_masks", "Times that a sequence sat out a step because its mask was not ready."),
    "failed_guides": ("failed_guides", "Choices that ended because of their grammar."),
    "grammar_host_failures": (
        "grammar_host_failures",
        "1 once the grammar processes cannot be served; requests with structured output fail from then on.",
    ),
}
"""Counters: the name of the metric, the field of EngineStats, and the help text."""
_GAUGES = {
    "kv_blocks_total": ("kv_blocks_total", "KV blocks."),
    "kv_blocks_free": ("kv_blocks_free", "KV blocks that no sequence holds, cached prefixes included."),
    "kv_blocks_cached": ("kv_blocks_cached", "KV blocks with cached prefixes."),
    "kv_tokens_used": ("kv_tokens_used", "Tokens stored in the blocks that sequences hold."),
    "swap_blocks_total": ("swap_blocks_total", "KV blocks in host memory."),
    "swap_blocks_free": ("swap_blocks_free", "KV blocks in host memory that no sequence holds."),
    "running": ("num_running", "Sequences in the running batch."),
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
    yield gauge("penstock_engine_kv_usage_ratio", "Share of the KV blocks that sequences hold.", kv_usage(stats))
    held = (stats.kv_blocks_total - stats.kv_blocks_free) * stats.block_size
    text = "Share of the held blocks' slots that store a token; the rest is fragmentation."
    yield gauge("penstock_engine_page_utilization_ratio", text, stats.kv_tokens_used / held if held else 1.0)
    text = "Bytes of the KV cache, by where it is."
    caches = GaugeMetricFamily("penstock_engine_kv_cache_bytes", text, labels=("tier",))
    caches.add_metric(("device",), stats.kv_blocks_total * stats.block_bytes)
    caches.add_metric(("host",), stats.swap_blocks_total * stats.block_bytes)
    yield caches
    if stats.weight_bytes:
        yield gauge("penstock_engine_model_bytes", "Bytes of the model's weights.", stats.weight_bytes)
    text = "Seconds of all steps, by part."
    parts = CounterMetricFamily("penstock_engine_step_part_seconds", text, labels=("part",))
    for part, seconds in stats.part_seconds.items():
        parts.add_metric((part,), seconds)
    yield parts
    text = "Steps of a GPU that did not run as a CUDA graph, by reason."
    eager = CounterMetricFamily("penstock_engine_eager_steps", text, labels=("reason",))
    for reason, count in stats.eager_steps.items():
        eager.add_metric((reason,), count)
    yield eager


def kv_usage(stats: EngineStats) -> float:
    """Return the share of the KV blocks that sequences hold, from 0 to 1."""
    return 1 - stats.kv_blocks_free / stats.kv_blocks_total if stats.kv_blocks_total else 0.0


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels."""
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def histogram(name: str, text: str, values: Histogram) -> Metric:
    """Return a histogram without labels."""
    return HistogramMetricFamily(name, text, buckets=values.buckets, sum_value=values.total)
