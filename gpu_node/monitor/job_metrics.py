"""Prometheus metrics of a node's jobs, by model and class."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from penstock.contract.job import Priority
from penstock.gpu_node.monitor.job_times import JobMetrics

LABELS = ("model", "priority")
_HISTOGRAMS = {
    "queue_seconds": ("queue_s", "Seconds from a job's submission until a node took it."),
    "prefill_seconds": ("prefill_s", "Seconds from the taking of a job until its first token."),
    "time_to_first_token_seconds": ("first_token_s", "Seconds from a job's submission until its first token."),
    "decode_seconds": ("decode_s", "Seconds from a job's first token until its end."),
    "seconds": ("total_s", "Seconds from a job's submission until its end."),
    "inter_token_seconds": ("inter_token_s", "Seconds between two outputs of a choice."),
    "time_per_output_token_seconds": ("output_token_s", "Mean seconds of a job's output tokens after the first."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of a job."),
    "output_tokens": ("output_tokens", "Output tokens of a job."),
}
"""Histograms: the name of the metric, the attribute of ClassMetrics, and the help text."""


def job_metrics(jobs: JobMetrics, model: str) -> Iterator[Metric]:
    """Yield the metrics of a node's jobs."""
    for name, (attribute, text) in _HISTOGRAMS.items():
        family = HistogramMetricFamily(f"penstock_job_{name}", text, labels=LABELS)
        for priority, metrics in zip(Priority, jobs.classes, strict=True):
            values = getattr(metrics, attribute)
            family.add_metric((model, priority.label), values.buckets, values.total)
        yield family
    text = "Ended jobs, by finish reason, or by state if they are not done."
    ends = CounterMetricFamily("penstock_job_ends", text, labels=(*LABELS, "reason"))
    for priority, metrics in zip(Priority, jobs.classes, strict=True):
        for reason, count in sorted(metrics.ends.items()):
            ends.add_metric((model, priority.label, reason), count)
    yield ends
