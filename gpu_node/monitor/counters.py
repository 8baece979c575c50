"""What a node counts of itself, in plain numbers: an increment a call costs nothing beside the call."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


class Latencies:
    """How long calls took, in classes: `counts[i]` took at most `BOUNDS_S[i]`, the last one longer than all."""

    BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        self.total_s = 0.0

    def note(self, seconds: float) -> None:
        """One call took so long."""
        self.counts[bisect_left(self.BOUNDS_S, seconds)] += 1
        self.total_s += seconds


@dataclass(slots=True)
class NodeCounts:
    """Since the process began."""

    taken: int = 0
    """Jobs."""
    taken_over: int = 0
    """Jobs that another node had begun, or was lost with."""
    finished: int = 0
    """Jobs whose end Redis has."""
    dropped: int = 0
    """Jobs that turned out to be no longer this node's."""
    given_back_drain: int = 0
    given_back_pressure: int = 0
    given_back_lacking: int = 0
    rewinds: int = 0
    """Times that Redis asked for chunks again, because it had lost them."""
    outages: int = 0
    """Times that a send failed because Redis was away."""
    emits: Latencies = field(default_factory=Latencies)

    def gave_back(self, why: str, num_jobs: int) -> None:
        """Jobs went back to the queue, for one of the reasons above."""
        name = f"given_back_{why}"
        setattr(self, name, getattr(self, name) + num_jobs)
