"""A node's counters, as plain numbers: an increment costs next to nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gpu_node.monitor.job_times import JobMetrics
from penstock.runtime.histogram import Histogram

EMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histogram of emit calls."""


@dataclass(slots=True)
class SendCounts:
    """How often a node sent tokens, and the CPU time that this took on its event loop."""

    sends: int = 0
    """Times that tokens were sent, those of all streams together."""
    chunks: int = 0
    """Chunks sent."""
    cpu_s: float = 0.0
    """CPU seconds from packing the chunks until the answers were handled."""

    def note(self, num_chunks: int, cpu_s: float) -> None:
        """Count a send."""
        self.sends += 1
        self.chunks += num_chunks
        self.cpu_s += cpu_s


@dataclass(slots=True)
class NodeCounts:
    """A node's counters since its process started."""

    taken: int = 0
    """Jobs taken."""
    taken_over: int = 0
    """Jobs taken that had run on another node, or were lost with it."""
    finished: int = 0
    """Jobs ended, as acknowledged by Redis."""
    finished_cost: int = 0
    """Total cost of those jobs, in KV tokens like the queue's backlog."""
    dropped: int = 0
    """Jobs dropped because they belonged to another node by then."""
    given_back_drain: int = 0
    given_back_pressure: int = 0
    given_back_lacking: int = 0
    rewinds: int = 0
    """Times that Redis had lost chunks and asked for them again."""
    outages: int = 0
    """Times that publishing failed because Redis was unavailable."""
    emits: Histogram = field(default_factory=lambda: Histogram(EMIT_SECONDS))
    """Seconds that emit calls took."""
    sending: SendCounts = field(default_factory=SendCounts)
    jobs: JobMetrics = field(default_factory=JobMetrics)
    queue_share: float = 0.0
    """The jobs that waited in the queue at the last take, divided by the number of live nodes."""

    def gave_back(self, why: str, num_jobs: int) -> None:
        """Count jobs that were given back. `why`: drain, pressure or lacking."""
        name = f"given_back_{why}"
        setattr(self, name, getattr(self, name) + num_jobs)
