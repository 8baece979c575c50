"""A node's metrics for Prometheus and its health check, on their own port. Metrics are collected at each scrape."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.contract.errors import ConfigError
from penstock.contract.job import Priority
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.gpus import GpuDriver, GpuLoad
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.jobs.times import JobMetrics, NodeCounts, SendCounts
from penstock.gpu_node.monitor.engine_metrics import counter, engine_metrics, gauge, histogram, vllm_metrics
from penstock.gpu_node.publishing.sending import Pace
from penstock.gpu_node.service.liveness import MAX_HEARTBEAT_AGE_S
from penstock.gpu_node.settings import NodeSettings
from penstock.runtime.loop_watch import LoopWatch, loop_metrics

log = logging.getLogger(__package__)


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
    """Yield the metrics of a node's jobs, by model and class."""
    for name, (attribute, text) in _HISTOGRAMS.items():
        family = HistogramMetricFamily(f"penstock_job_{name}", text, labels=LABELS)
        for priority, metrics in zip(Priority, jobs.classes, strict=True):
            values = getattr(metrics, attribute)
            family.add_metric((model, priority.label), values.buckets, values.total)
        yield family
    text = "Foreground jobs that waited in the queue for over 1.5 times the limit with which it admits jobs."
    late = CounterMetricFamily("penstock_job_waits_beyond_limit", text, labels=LABELS)
    for priority, metrics in zip(Priority, jobs.classes, strict=True):
        late.add_metric((model, priority.label), metrics.waits_beyond_limit)
    yield late
    text = "Ended jobs, by finish reason, or by state if they are not done."
    ends = CounterMetricFamily("penstock_job_ends", text, labels=(*LABELS, "reason"))
    for priority, metrics in zip(Priority, jobs.classes, strict=True):
        for reason, count in sorted(metrics.ends.items()):
            ends.add_metric((model, priority.label, reason), count)
    yield ends


_GAUGES = {
    "penstock_gpu_utilization_ratio": "Share of the driver's last sample period in which a kernel ran on the GPU.",
    "penstock_gpu_memory_used_bytes": "Memory of the GPU that is in use, by any process.",
    "penstock_gpu_memory_total_bytes": "Memory of the GPU.",
}


def gpu_metrics(load: GpuLoad) -> Iterator[Metric]:
    """Yield the metrics of a node's GPU."""
    values = load.utilization, load.memory_used_bytes, load.memory_total_bytes
    for (name, text), value in zip(_GAUGES.items(), values, strict=True):
        yield gauge(name, text, value)


COUNTED = {
    "taken": "Jobs taken.",
    "taken_over": "Jobs taken that had run on another node, or were lost with it.",
    "finished": "Jobs ended, as acknowledged by Redis.",
    "dropped": "Jobs dropped because they belonged to another node by then: this node's writes were fenced.",
    "given_back_drain": "Jobs given back because the node was draining.",
    "given_back_pressure": "Jobs given back because they did not fit here and did on another node.",
    "given_back_lacking": "Jobs given back because this node lacks their adapter, or does not know them.",
    "given_back_lost": "Jobs given back because a rank of this node ended during their step.",
    "given_back_failed": "Jobs given back for another attempt, after an error of this node.",
    "rewinds": "Times that Redis had lost chunks and asked for them again.",
    "repeated_ends": "Ends of jobs that Redis had lost and got again.",
    "outages": "Times that publishing failed because Redis was unavailable.",
    "failed_rounds": "Rounds that ended because Redis refused a call: damaged data, or a bug.",
}


class MeasuredNode(Protocol):
    """What the metrics read of a node."""

    @property
    def held_jobs(self) -> HeldJobs:
        """Its jobs and counters."""

    @property
    def pace(self) -> Pace:
        """When its tokens are sent."""

    @property
    def engine_stats(self) -> EngineStats | None:
        """The engine's statistics as of the last heartbeat; None before the first one."""

    def state(self) -> dict[str, Any]:
        """Return what a health check gets."""


class NodeCollector(Collector):
    """A Prometheus collector of a node's counters, and of its engine's statistics as of the last heartbeat."""

    def __init__(self, node: MeasuredNode, settings: NodeSettings, loop_watch: LoopWatch | None = None) -> None:
        self._node = node
        self._settings = settings
        self._loop_watch = loop_watch
        self._gpu = GpuDriver()

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        held_jobs, stats = self._node.held_jobs, self._node.engine_stats
        yield gauge("penstock_node_jobs", "Jobs held.", len(held_jobs))
        yield gauge(
            "penstock_node_unsent_bytes", "Bytes of chunks that Redis has not acknowledged.", held_jobs.unsent_bytes
        )
        state = self._node.state()
        text = "Seconds since the node last tried to send a heartbeat; the engine's metrics are as old."
        yield gauge("penstock_node_heartbeat_age_seconds", text, state["heartbeat_age_s"])
        text = "Seconds by which the clock of Redis is ahead of this machine's."
        yield gauge("penstock_node_clock_offset_seconds", text, state["clock_offset_s"])
        text = "Seconds since Redis last acknowledged a heartbeat."
        yield gauge("penstock_node_redis_silent_seconds", text, state["redis_silent_s"])
        yield from _of_counts(held_jobs.counts)
        yield from _of_sending(held_jobs.counts.sending, self._node.pace)
        yield from job_metrics(held_jobs.counts.jobs, self._settings.model_name)
        if self._loop_watch is not None:
            yield from loop_metrics(
                "penstock_node_loop_late_seconds", "penstock_node_loop_hold_seconds", self._loop_watch
            )
        if stats is not None:
            yield _info(self._settings, stats)
            yield from engine_metrics(stats)
            yield from vllm_metrics(held_jobs, stats, self._settings)
            if (load := self._gpu.read(stats.gpu_uuid)) is not None:
                yield from gpu_metrics(load)


def _info(settings: NodeSettings, stats: EngineStats) -> Metric:
    text = "1, with the node's name, which tells the replicas of a host apart, its pool, and what it computes on."
    found = GaugeMetricFamily("penstock_node_info", text, labels=("name", "pool", "device", "arithmetic"))
    found.add_metric((settings.name, settings.pool_name, stats.gpu_uuid or "cpu", stats.arithmetic), 1)
    return found


def _of_counts(counts: NodeCounts) -> Iterator[Metric]:
    for name, text in COUNTED.items():
        yield counter(f"penstock_node_{name}", text, getattr(counts, name))
    yield histogram(
        "penstock_node_emit_seconds", "Seconds that an emit call took, which publishes a step's chunks.", counts.emits
    )


def _of_sending(sending: SendCounts, pace: Pace) -> Iterator[Metric]:
    text = "Times that tokens were sent, those of all streams together."
    yield counter("penstock_node_sends", text, sending.sends)
    yield counter("penstock_node_sent_chunks", "Chunks sent.", sending.chunks)
    text = "CPU seconds that the event loop spent on sending. The rate is the share of one core."
    yield counter("penstock_node_send_cpu_seconds", text, sending.cpu_s)
    text = "Shortest time between two sends to as many streams as the last one had."
    yield gauge("penstock_node_send_interval_seconds", text, pace.interval_s())
    text = "Share of one core that the event loop may spend on sending."
    yield gauge("penstock_node_send_cpu_limit_ratio", text, pace.max_cpu_share)


def _with_health(app: Any, node: MeasuredNode) -> Any:
    """Return the app with `/health`: 200 while the node's heartbeats go on, also while Redis is away; else 503.

    The answer comes from a thread, so it is the age of the heartbeat that tells of the event loop.
    """

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if environ.get("PATH_INFO") != "/health":
            return app(environ, start_response)
        state = node.state()
        is_well = state["heartbeat_age_s"] < MAX_HEARTBEAT_AGE_S
        start_response("200 OK" if is_well else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [json.dumps(state).encode()]

    return answer


def _always_text(app: Any) -> Any:
    """Return the app without content negotiation.

    In OpenMetrics the client library replaces the colon of `vllm:…` by an underscore, and dashboards find nothing.
    """

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop("HTTP_ACCEPT", None)
        return app(environ, start_response)

    return answer


@contextmanager
def serving_metrics(node: MeasuredNode, settings: NodeSettings, loop_watch: LoopWatch | None = None) -> Iterator[int]:
    """Serve the node's metrics on a thread, at the address of its settings. Yield the port. Raises ConfigError."""
    host, port = settings.metrics_host, settings.metrics_port or 0
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(NodeCollector(node, settings, loop_watch))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"metrics_port {port} on {host}: {error.strerror}", param="metrics_port") from error
    server.set_app(_with_health(_always_text(make_wsgi_app(registry)), node))
    log.info("serves metrics", extra={"host": host, "port": server.server_port})
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
