"""Statistics of a pool for operators: queue lengths and waits, event counts, and the nodes' pressure records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.queue.wire import NodePressure

EVENTS = {
    "submitted": "jobs that were accepted",
    "refused_busy": "submissions that a limit of the pool refused",
    "refused_memory": "submissions that the limit of Redis's memory refused",
    "refused_tenant_limit": "submissions that a limit of their tenant refused",
    "refused_tenant_memory": "submissions that the limit of their tenant's memory refused",
    "ended_done": "jobs that completed",
    "ended_failed": "jobs that failed",
    "ended_cancelled": "jobs that were canceled, or had no reader left",
    "ended_expired": "jobs that passed their deadline",
    "dead_letters": "jobs that lost their nodes too often without progress",
    "nodes_lost": "nodes without a heartbeat for a lease",
    "losses": "running jobs whose node was lost",
    "takeovers": "jobs that a node took after another node had started or lost them",
    "fenced": "writes of a node for a job that another node holds",
    "given_back_drain": "jobs that a node gave back because it was draining",
    "given_back_pressure": "jobs that a node gave back because another node had capacity for them",
    "given_back_lacking": "jobs that a node gave back because it lacks their adapter",
    "given_back_unlisted": "jobs assigned to a node that did not know of them",
    "sweep_resets": "sweeps after half a lease without one: Redis was unreachable, or no process was running",
}
"""Counters in P:counts, with their help texts."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment. Tuples have one entry per class, most urgent first."""

    pool: str
    depth: tuple[int, ...]
    """Number of queued jobs."""
    oldest_ms: tuple[int, ...]
    """Waiting time of the oldest queued job, in ms; 0 without queued jobs."""
    cost: tuple[int, ...]
    """Predicted KV tokens of the queued jobs."""
    num_open: int
    counts: Mapping[str, int]
    """Number of occurrences of each of `EVENTS` since the pool was created."""
    nodes: tuple[NodePressure, ...]
    """Pressure records of the live nodes."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Tenant → bytes of Redis memory, of its jobs as stored, and what its running jobs may still write."""
