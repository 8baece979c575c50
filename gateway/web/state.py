"""The state that the dashboard shows, as JSON: pools, nodes, tenants, events, and this gateway's times."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from penstock.contract.priority import NUM_PRIORITIES, Priority
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.recent_times import WINDOW_S, RecentTimes
from penstock.queue.broker.producer import ServedPool
from penstock.queue.pool_activity import LiveNode, PoolActivity

MAX_POOLS = 16
"""Pools in a state; those with a live node come first."""
MAX_NODES = 64
"""Nodes of a pool in a state, by name. Sums cover all nodes."""
MAX_TENANTS = 8
"""Tenants of a pool in a state, those with the most jobs. One entry sums up the others."""
_PERCENTS = (50, 90, 99)
_GATEWAY_NAME = f"{socket.gethostname()}:{os.getpid()}"
_OF_NODE = (
    *("node_id", "draining", "troubles", "num_jobs", "num_running", "num_waiting", "max_num_seqs", "mean_batch"),
    *("kv_blocks_total", "kv_blocks_free", "kv_blocks_cached", "block_size"),
    *("swap_blocks_total", "swap_blocks_free", "swap_blocks_cached"),
    *("prefill_tokens", "decode_tokens", "num_preemptions", "step_ms_p50", "step_ms_p99"),
)
"""The fields of a pressure record that the dashboard shows."""


def gateway_of(metrics: GatewayMetrics) -> dict[str, Any]:
    """Return the name of this gateway, and the times that it measured in the last minutes."""
    return {
        "name": _GATEWAY_NAME,
        "window_s": WINDOW_S,
        "first_token": _times(metrics.recent_first_token),
        "per_token": _times(metrics.recent_token),
    }


def pool_of(record: ServedPool, activity: PoolActivity) -> dict[str, Any]:
    """Return the state of one pool."""
    return {
        "pool": activity.pool,
        "model": record.model,
        "classes": _classes(activity),
        "tenants": _tenants(activity),
        "counts": dict(activity.counts),
        "num_nodes": len(activity.nodes),
        "nodes": [_node(node) for node in activity.nodes[:MAX_NODES]],
        "totals": _totals(activity.nodes),
        "events": [
            {"at_ms": event.at_ms, "kind": event.kind, "node": event.node_id, "job": event.job_id}
            | {"from": event.source, "reason": event.reason}
            for event in activity.events
        ],
    }


def now_ms() -> int:
    """Return the Unix time in ms by this machine's clock."""
    return time.time_ns() // 1_000_000


def _times(recent: RecentTimes) -> dict[str, Any]:
    count, values = recent.percentiles(_PERCENTS)
    percentiles = zip(_PERCENTS, values, strict=False)
    return {"count": count, **{f"p{percent}_ms": round(1000 * value, 2) for percent, value in percentiles}}


def _classes(activity: PoolActivity) -> list[dict[str, Any]]:
    # A node of an older release reports no classes.
    reports = [(0,) * NUM_PRIORITIES, *(node.pressure.jobs_by_class for node in activity.nodes)]
    running = [sum(column) for column in zip_longest(*reports, fillvalue=0)]
    rows = zip(Priority, activity.depth, activity.oldest_ms, running, strict=False)
    return [
        {"class": priority.label, "queued": queued, "oldest_ms": oldest_ms, "running": num_running}
        for priority, queued, oldest_ms, num_running in rows
    ]


def _tenants(activity: PoolActivity) -> list[dict[str, Any]]:
    """Return the jobs of the tenants with the most, and of the others together, under the tenant None."""
    running: Counter[str] = Counter()
    for node in activity.nodes:
        running.update(node.pressure.jobs_by_tenant)
    queued = Counter(activity.queued_of_tenants)
    shown = [tenant for tenant, _ in (running + queued).most_common(MAX_TENANTS)]
    rows: list[dict[str, Any]] = [
        {"tenant": tenant, "running": running[tenant], "queued": queued[tenant]} for tenant in shown
    ]
    others = _others(rows, {"running": _sum(activity.nodes, "num_jobs"), "queued": sum(activity.depth)})
    return [*rows, {"tenant": None, **others}] if any(others.values()) else rows


def _others(rows: Sequence[Mapping[str, Any]], totals: Mapping[str, int]) -> dict[str, int]:
    # Numbers of one moment come from several reads, so a difference may be negative.
    return {name: max(0, total - sum(row[name] for row in rows)) for name, total in totals.items()}


def _node(node: LiveNode) -> dict[str, Any]:
    return {"silent_ms": node.silent_ms, **{name: getattr(node.pressure, name) for name in _OF_NODE}}


def _totals(nodes: Sequence[LiveNode]) -> dict[str, int]:
    names = ("kv_blocks_total", "kv_blocks_free", "kv_blocks_cached", "num_jobs", "num_preemptions")
    return {name: _sum(nodes, name) for name in names}


def _sum(nodes: Sequence[LiveNode], name: str) -> int:
    return sum(getattr(node.pressure, name) for node in nodes)
