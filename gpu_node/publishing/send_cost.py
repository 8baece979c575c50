"""The CPU time that sending takes on the node's event loop, learned from each send."""

from __future__ import annotations

SEND_S = 200e-6
CHUNK_S = 20e-6
"""First estimate: CPU seconds of each send, and of each chunk in it. Measured on busy cores."""
RATE = 0.05
"""Weight of the newest send in the learned ratio."""
MAX_RATIO = 8.0
"""Bound of what one send teaches, since other work of the event loop may fall into its time."""


class SendCost:
    """Expected CPU seconds of a send: the first estimate times a ratio learned from measured sends."""

    def __init__(self) -> None:
        self._ratio = 1.0

    def of(self, num_chunks: int) -> float:
        """Return the expected CPU seconds of a send with this number of chunks."""
        return self._ratio * (SEND_S + num_chunks * CHUNK_S)

    def note(self, num_chunks: int, cpu_s: float) -> None:
        """Learn from a send that took `cpu_s`."""
        ratio = cpu_s / (SEND_S + num_chunks * CHUNK_S)
        self._ratio += RATE * (min(ratio, MAX_RATIO) - self._ratio)
