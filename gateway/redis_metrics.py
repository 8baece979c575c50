"""Metrics of Redis that a gateway reports: its memory, its files, its replicas, and whether another one answers.

Every gateway reports the same values, apart from `penstock_redis_changes_total`, which counts from a gateway's start.
Aggregate them over gateways with max.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock.contract.pool import RedisState


class RedisMetrics:
    """Turns the state of Redis into metrics, and counts how often another process of Redis answered."""

    def __init__(self) -> None:
        self._run_id = ""
        self._num_changes = 0

    def metrics(self, state: RedisState | None) -> Iterator[Metric]:
        """Yield the metrics of one scrape; `state` is None if Redis did not answer."""
        if state is not None:
            self._num_changes += self._run_id not in ("", state.run_id)
            self._run_id = state.run_id
        yield GaugeMetricFamily("penstock_redis_up", "Whether Redis answers.", value=state is not None)
        text = "Times that a restarted or another Redis answered a scrape of this gateway, such as after a fail-over."
        yield CounterMetricFamily("penstock_redis_changes", text, value=self._num_changes)
        if state is not None:
            yield from _of(state)


def _of(state: RedisState) -> Iterator[Metric]:
    yield GaugeMetricFamily("penstock_redis_used_bytes", "Memory that Redis uses.", value=state.used_bytes)
    text = "Memory limit of Redis; 0 means no limit."
    yield GaugeMetricFamily("penstock_redis_max_bytes", text, value=state.max_bytes)
    text = "Whether the last write to the append-only file (aof), or the last snapshot, succeeded. No aof without one."
    written = GaugeMetricFamily("penstock_redis_persistence_ok", text, labels=("kind",))
    if state.is_aof_on:
        written.add_metric(("aof",), state.is_aof_ok)
    written.add_metric(("snapshot",), state.is_snapshot_ok)
    yield written
    text = "Writes to the append-only file that waited for a slow disk, since Redis started."
    yield CounterMetricFamily("penstock_redis_delayed_fsyncs", text, value=state.delayed_fsyncs)
    yield GaugeMetricFamily("penstock_redis_replicas", "Replicas that are connected.", value=state.num_replicas)
    if state.replica_lag_s is not None and state.replica_lag_bytes is not None:
        text = "Seconds since the slowest replica acknowledged anything. Absent without replicas."
        yield GaugeMetricFamily("penstock_redis_replica_lag_seconds", text, value=state.replica_lag_s)
        text = "Bytes that the slowest replica has not acknowledged. Absent without replicas."
        yield GaugeMetricFamily("penstock_redis_replica_lag_bytes", text, value=state.replica_lag_bytes)
