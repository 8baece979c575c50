"""What operators watch of a pool: how much waits, since when, what happened, and what its nodes say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.queue.wire import NodePressure

EVENTS = {
    "submitted": "jobs that were accepted",
    "ended_done": "jobs that ended well",
    "ended_failed": "jobs that failed",
    "ended_cancelled": "jobs that were cancelled, or that nobody read any more",
    "ended_expired": "jobs whose deadline passed",
    "dead_letters": "jobs that lost their nodes too often without progress",
    "nodes_lost": "nodes that fell silent for a lease",
    "losses": "running jobs whose node was lost",
    "takeovers": "jobs that a node took which another one had begun, or was lost with",
    "fenced": "writes of a node for a job that was no longer its own",
    "given_back_drain": "jobs that a node returned because it was told to go",
    "given_back_pressure": "jobs that a node returned so that another may run them",
    "given_back_lacking": "jobs that a node returned for want of their adapter",
    "given_back_unlisted": "jobs that a node turned out not to know of",
    "sweep_resets": "times that nobody had swept for half a lease: Redis was away, or nobody was there",
}
"""What scripts count in P:count."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment; tuples are per class, the most urgent first."""

    pool: str
    depth: tuple[int, ...]
    oldest_ms: tuple[int, ...]
    """How long the oldest queued job has waited; 0 where none does."""
    cost: tuple[int, ...]
    """Queued cost in KV tokens."""
    num_open: int
    counts: Mapping[str, int]
    """How often what happened since the pool began; see `EVENTS`."""
    nodes: tuple[NodePressure, ...]
    """Those that gave a sign of life within their lease."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each tenant's open jobs may come to hold and its ended ones hold."""
