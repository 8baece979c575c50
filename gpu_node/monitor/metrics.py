"""A node's figures for Prometheus, on a port of their own. Nothing is gathered but when somebody asks."""

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
    "taken_over": "Jobs taken that another node had begun, or was lost with.",
    "finished": "Jobs whose end Redis has.",
    "dropped": "Jobs that turned out to be no longer this node's: its writes were fenced.",
    "given_back_drain": "Jobs given back because the node was told to go.",
    "given_back_pressure": "Jobs given back so that another node may run them.",
    "given_back_lacking": "Jobs given back for want of their adapter.",
    "rewinds": "Times that Redis asked for chunks again, because it had lost them.",
    "outages": "Times that a send failed because Redis was away.",
}
_ENGINE_COUNTS = {
    "steps": "Steps of the engine.",
    "prefill_tokens": "Prompt tokens computed.",
    "decode_tokens": "Tokens sampled.",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache.",
    "drafted_tokens": "Tokens computed ahead because a sequence would probably say them.",
    "accepted_tokens": "Those of them that it said.",
    "num_preemptions": "Sequences that gave way to others.",
    "grammar_trials": "New grammars that were tried out.",
    "grammar_refusals": "New grammars that were refused.",
    "grammar_costly_refusals": "New grammars that a limit of time, memory or work refused.",
    "grammar_kills": "Grammar processes that a limit killed.",
    "grammar_restarts": "Grammar processes that were started in the place of one that ended.",
    "late_masks": "Times that a sequence sat out a step because its mask was not ready.",
    "failed_guides": "Choices that ended because of their grammar.",
}
_ENGINE_GAUGES = {
    "kv_blocks_total": "KV blocks.",
    "kv_blocks_free": "KV blocks that nobody holds.",
    "num_running": "Sequences in the batch.",
    "num_waiting": "Sequences that wait inside the engine.",
    "num_swapped": "Preempted sequences whose blocks are on the host.",
    "step_ms_p50": "Milliseconds of a step, median of the last few hundred.",
    "step_ms_p99": "Milliseconds of a step, 99th percentile of the last few hundred.",
}


class NodeCollector(Collector):
    """Reads a node's counts where they stand; the engine's are those of its last beat."""

    def __init__(self, node: Node, loop_watch: LoopWatch | None = None) -> None:
        self._node = node
        self._loop_watch = loop_watch

    def describe(self) -> list[Metric]:
        """Nothing is looked at when it is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families."""
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
    text = "How long a call took that sends a step's chunks."
    yield HistogramMetricFamily("penstock_node_emit_seconds", text, buckets=buckets, sum_value=latencies.total_s)


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for name, text in _ENGINE_COUNTS.items():
        yield CounterMetricFamily(f"penstock_engine_{name.removeprefix('num_')}", text, value=getattr(stats, name))
    for name, text in _ENGINE_GAUGES.items():
        yield GaugeMetricFamily(f"penstock_engine_{name.removeprefix('num_')}", text, value=getattr(stats, name))


@contextmanager
def serving_metrics(node: Node, host: str, port: int, loop_watch: LoopWatch | None = None) -> Iterator[int]:
    """While the node's figures are served, on a thread; the port, which 0 leaves to the system. Raises ConfigError."""
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
