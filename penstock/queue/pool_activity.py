"""The state of a pool at one moment, for the dashboard: its queue, its nodes and its newest events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.queue.wire import NodePressure


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """An entry of P:events. Names that an event does not have are empty."""

    at_ms: int
    kind: str
    """`node_joined`, `node_left`, `node_lost`, `takeover` or `dead_letter`."""
    node_id: str
    """The node that joined, left, was lost, or took over the job."""
    job_id: str
    source: str
    """The node from which the job moved."""
    reason: str
    """Why the job moved; see `PastLease`."""


@dataclass(frozen=True, slots=True)
class LiveNode:
    """A node that sent a heartbeat within a lease."""

    pressure: NodePressure
    silent_ms: int
    """Milliseconds since its last heartbeat."""


@dataclass(frozen=True, slots=True)
class PoolActivity:
    """A pool at one moment. Tuples of numbers have one entry per class, most urgent first."""

    pool: str
    depth: tuple[int, ...]
    """Number of queued jobs."""
    oldest_ms: tuple[int, ...]
    """Waiting time of the oldest queued job, in ms; 0 without queued jobs."""
    queued_of_tenants: Mapping[str, int]
    """Queued jobs of the tenants that wait for the most KV tokens."""
    counts: Mapping[str, int]
    """Number of occurrences of each of `EVENTS` since the pool was created."""
    nodes: tuple[LiveNode, ...]
    events: tuple[PoolEvent, ...]
    """The newest events, oldest first."""
