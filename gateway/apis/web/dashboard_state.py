"""The state that the dashboard shows, as JSON: pools, nodes, tenants, events, and this gateway's times."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.contract.pool import JOB_TIMES, LiveNode, PoolActivity, QueueState
from penstock.contract.priority import NUM_LEVELS, is_background, level_label
from penstock.gateway.metrics import TIMES_WINDOW_S, GatewayMetrics, RecentTimes
from penstock.queue.broker.producer import ServedPool

MAX_POOLS = 16
"""Pools in a state; those with a live node come first."""
MAX_NODES = 64
"""Nodes of a pool in a state, by name. Sums cover all nodes."""
MAX_TENANTS = 8
"""Tenants of a pool in a state, those with the most jobs. One entry sums up the others."""
_PERCENTS = (50, 90, 99)
_GATEWAY_NAME = f"{socket.gethostname()}:{os.getpid()}"
_OF_NODE = (
    *("node_id", "draining", "troubles", "past_troubles", "num_jobs", "num_running", "num_held_back", "num_waiting"),
    *("max_num_seqs", "mean_batch"),
    *("kv_blocks_total", "kv_blocks_free", "kv_blocks_cached", "block_size"),
    *("swap_blocks_total", "swap_blocks_free", "swap_blocks_cached"),
    *("state_slots_total", "state_slots_free", "state_snapshots", "state_hits", "state_evictions"),
    *("window_blocks_total", "window_blocks_free", "window_blocks_cached", "window_evictions"),
    *("prefill_tokens", "decode_tokens", "num_preemptions", "num_swaps", "step_ms_p50", "step_ms_p99"),
    *("prefix_lookup_tokens", "prefix_hit_tokens", "prefix_hit_rate", "page_utilization", "weight_bytes"),
    *("num_ranks", "num_rank_losses", "stage_idle", "rank_exchange_ms", "rank_wait_ms"),
    *("rank_weight_bytes", "rank_kv_bytes", "gpu_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes"),
)
"""The fields of a pressure record that the dashboard shows."""
_SUMMED = (
    *("kv_blocks_total", "kv_blocks_free", "kv_blocks_cached", "num_jobs", "num_preemptions", "num_swaps"),
    *("prefix_lookup_tokens", "prefix_hit_tokens"),
)
"""The fields that it shows as sums over all nodes of a pool."""


def gateway_of(metrics: GatewayMetrics) -> dict[str, Any]:
    """Return the name of this gateway, and the times that it measured in the last minutes."""
    return {
        "name": _GATEWAY_NAME,
        "window_s": TIMES_WINDOW_S,
        "first_token": _times(metrics.recent_first_token),
        "per_token": _times(metrics.recent_token),
    }


def pool_of(record: ServedPool, activity: PoolActivity) -> dict[str, Any]:
    """Return the state of one pool."""
    return {
        "pool": activity.pool,
        "model": record.model,
        "classes": _classes(activity.queue),
        "backlog_s": dict(zip(("foreground", "background"), activity.queue.backlog_s, strict=True)),
        "paused": [pause.words for pause in activity.pauses],
        "background_share": activity.queue.background_share,
        "tenants": _tenants(activity),
        "counts": dict(activity.counts),
        "num_nodes": len(activity.nodes),
        "nodes": [_node(node) for node in activity.nodes[:MAX_NODES]],
        "totals": {name: _sum(activity.nodes, name) for name in _SUMMED},
        "last_hour": _last_hour(activity.nodes),
        "events": [
            {"at_ms": event.at_ms, "kind": event.kind, "node": event.node_id, "job": event.job_id}
            | {"from": event.source, "reason": event.reason}
            for event in activity.events
        ],
    }


def _times(recent: RecentTimes) -> dict[str, Any]:
    count, values = recent.percentiles(_PERCENTS)
    percentiles = zip(_PERCENTS, values, strict=False)
    return {"count": count, **{f"p{percent}_ms": round(1000 * value, 2) for percent, value in percentiles}}


def _last_hour(nodes: Sequence[LiveNode]) -> dict[str, Any]:
    """Return percentiles of the jobs' times in the last hour, over all nodes, by interpolation in histograms."""
    return {
        name: _percentiles([node.pressure.times_of_hour.get(name, ()) for node in nodes], bounds)
        for name, bounds in JOB_TIMES.items()
    }


def _percentiles(of_nodes: Sequence[Sequence[int]], bounds: Sequence[float]) -> dict[str, Any]:
    # A node of another release may have other buckets.
    counts = [sum(each) for each in zip(*(one for one in of_nodes if len(one) == len(bounds) + 1), strict=True)]
    total = sum(counts)
    found: dict[str, Any] = {"count": total}
    for percent in _PERCENTS if total else ():
        rank, below = total * percent / 100, 0
        for index, count in enumerate(counts):
            if below + count >= rank:
                low, high = bounds[index - 1] if index else 0.0, bounds[min(index, len(bounds) - 1)]
                found[f"p{percent}_ms"] = round(1000 * (low + max(0.0, high - low) * (rank - below) / count), 2)
                break
            below += count
    return found


def _classes(queue: QueueState) -> list[dict[str, Any]]:
    return [
        {"class": level_label(level), "running": queue.running[level], "expired": queue.expired[level]}
        | {state: jobs.count[level] for state, jobs in queue.waiting.items()}
        | {"oldest_ms": queue.longest_wait_ms[level]}
        | {"engine_share": None if queue.engine_shares is None else round(queue.engine_shares[level], 4)}
        for level in range(NUM_LEVELS)
        if not is_background(level) or queue.is_used(level)
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
    totals = {"running": _sum(activity.nodes, "num_jobs"), "queued": sum(activity.queue.queued)}
    # Numbers of one moment come from several reads, so a difference may be negative.
    others = {name: max(0, total - sum(row[name] for row in rows)) for name, total in totals.items()}
    return [*rows, {"tenant": None, **others}] if any(others.values()) else rows


def _node(node: LiveNode) -> dict[str, Any]:
    return {"silent_ms": node.silent_ms, **{name: getattr(node.pressure, name) for name in _OF_NODE}}


def _sum(nodes: Sequence[LiveNode], name: str) -> int:
    return sum(getattr(node.pressure, name) for node in nodes)
