"""A node's metrics for Prometheus, on their own port. They are collected at each scrape."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.monitor.counters import Latencies, NodeCounts
from penstock.gpu_node.node import Node
from penstock.runtime.loop_metrics import loop_metrics
from penstock.runtime.loop_watch import LoopWatch

log = logging.getLogger(__name__)

_COUNTED = {
    "taken": "Jobs taken.",
    "taken_over": "Jobs taken that had run on another node, or were lost with it.",
    "finished": "Jobs ended, as acknowledged by Redis.",
    "dropped": "Jobs dropped because they belonged to another node by then: this node's writes were fenced.",
    "given_back_drain": "Jobs given back because the node was draining.",
    "given_back_pressure": "Jobs given back because they did not fit here and did on another node.",
    "given_back_lacking": "Jobs given back because this node lacks their adapter.",
    "rewinds": "Times that Redis had lost chunks and asked for them again.",
    "outages": "Times that publishing failed because Redis was unavailable.",
}
_ENGINE_COUNTS = {
    "steps": "Engine steps.",
    "prefill_tokens": "Prompt tokens computed.",
    "decode_tokens": "Tokens sampled.",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache.",
    "drafted_tokens": "Draft tokens computed.",
    "accepted_tokens": "Draft tokens accepted.",
    "num_preemptions": "Preempted sequences.",
    "grammar_trials": "New grammars that were tried out.",
    "grammar_refusals": "New grammars that were refused.",
    "grammar_costly_refusals": "New grammars that a limit of time, memory or work refused.",
    "grammar_kills": "Grammar processes that a limit killed.",
    "grammar_restarts": "Grammar processes started to replace one that ended.",
    "late_masks": "Times that a sequence sat out a step because its mask was not ready.",
    "failed_guides": "Choices that ended because of their grammar.",
}
_ENGINE_GAUGES = {
    "kv_blocks_total": "KV blocks.",
    "kv_blocks_free": "Free KV blocks.",
    "num_running": "Sequences in the running batch.",
    "num_waiting": "Sequences that wait inside the engine.",
    "num_swapped": "Preempted sequences with their blocks in host memory.",
    "step_ms_p50": "Milliseconds of a step, median of the last few hundred.",
    "step_ms_p99": "Milliseconds of a step, 99th percentile of the last few hundred.",
}


class NodeCollector(Collector):
    """A Prometheus collector of a node's counters, and of its engine's statistics as of the last heartbeat."""

    def __init__(self, node: Node, loop_watch: LoopWatch | None = None) -> None:
        self._node = node
        self._loop_watch = loop_watch

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        ledger, stats = self._node.ledger, self._node.engine_stats
        yield GaugeMetricFamily("penstock_node_jobs", "Jobs held.", value=len(ledger))
        text = "Bytes of chunks that Redis has not acknowledged."
        yield GaugeMetricFamily("penstock_node_unsent_bytes", text, value=ledger.unsent_bytes)
        yield from _of_counts(ledger.counts)
        if self._loop_watch is not None:
            yield from loop_metrics(
                "penstock_node_loop_late_seconds", "penstock_node_loop_hold_seconds", self._loop_watch
            )
        if stats is not None:
            yield from _of_engine(stats)


def _of_counts(counts: NodeCounts) -> Iterator[Metric]:
    for name, text in _COUNTED.items():
        yield CounterMetricFamily(f"penstock_node_{name}", text, value=getattr(counts, name))
    latencies = counts.emits
    bounds = [str(bound) for bound in Latencies.BOUNDS_S] + ["+Inf"]
    buckets = list(zip(bounds, accumulate(latencies.counts), strict=True))
    text = "Seconds that an emit call took, which publishes a step's chunks."
    yield HistogramMetricFamily("penstock_node_emit_seconds", text, buckets=buckets, sum_value=latencies.total_s)


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for name, text in _ENGINE_COUNTS.items():
        yield CounterMetricFamily(f"penstock_engine_{name.removeprefix('num_')}", text, value=getattr(stats, name))
    for name, text in _ENGINE_GAUGES.items():
        yield GaugeMetricFamily(f"penstock_engine_{name.removeprefix('num_')}", text, value=getattr(stats, name))


@contextmanager
def serving_metrics(node: Node, host: str, port: int, loop_watch: LoopWatch | None = None) -> Iterator[int]:
    """Serve the node's metrics on a thread; yields the port, which 0 leaves to the system. Raises ConfigError."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(node, loop_watch))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"metrics_port {port} on {host}: {error.strerror}", param="metrics_port") from error
    log.info("serves metrics", extra={"host": host, "port": server.server_port})
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
