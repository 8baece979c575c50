"""The CPU time that sending takes on the node's event loop, learned while the node sends."""

from __future__ import annotations

DEPARTURE_S = 200e-6
CHUNK_S = 20e-6
"""First estimate of a departure: its own CPU seconds, and those of each chunk in it. Measured on busy cores
(`ops/bench/results/departures.md`)."""
RATE = 0.05
"""Weight of the newest departure in the learned ratio."""
MAX_RATIO = 8.0
"""Bound of what one departure teaches, since other work of the event loop may fall into its time."""


class SendCost:
    """Expected CPU seconds of a departure: the first estimate times a ratio learned from measured departures."""

    def __init__(self) -> None:
        self._ratio = 1.0

    def of(self, num_chunks: int) -> float:
        """Return the expected CPU seconds of a departure with this number of chunks."""
        return self._ratio * (DEPARTURE_S + num_chunks * CHUNK_S)

    def note(self, num_chunks: int, cpu_s: float) -> None:
        """Learn from a departure that took `cpu_s`."""
        ratio = cpu_s / (DEPARTURE_S + num_chunks * CHUNK_S)
        self._ratio += RATE * (min(ratio, MAX_RATIO) - self._ratio)
