"""When the tokens of running jobs leave: a single stream's at every step, those of more streams together, less often.

Each departure costs time that the engine could use: the node, Redis and whoever reads wake up, on cold caches where the
engine computes on the same cores. So a node sends about MAX_CHUNKS_PER_S however many streams it has, up to the longest
time that a token may wait. First tokens, for which somebody waits, leave soon.
"""

from __future__ import annotations

import math

MAX_CHUNKS_PER_S = 200
MIN_INTERVAL_S = 0.02
"""Of two streams and more."""
HURRY_S = 0.01
"""First tokens gather for so long after the last time that something left."""


class Pace:
    """Times of departures on a monotonic clock, in seconds."""

    def __init__(self, max_interval_s: float) -> None:
        """No token waits longer than `max_interval_s`."""
        self._max_interval_s = max_interval_s
        self._all_left_s = self._left_s = -math.inf

    def until_all_s(self, num_streams: int, now_s: float) -> float:
        """How long the tokens of so many streams wait until all leave together; at most 0: not any more."""
        if num_streams < 2:
            return 0.0
        interval_s = min(self._max_interval_s, max(MIN_INTERVAL_S, num_streams / MAX_CHUNKS_PER_S))
        return self._all_left_s + interval_s - now_s

    def until_first_s(self, now_s: float) -> float:
        """How long a first token waits for others; at most 0: not any more."""
        return self._left_s + HURRY_S - now_s

    def note(self, now_s: float, *, all_left: bool) -> None:
        """All that was owed leaves now, or the first tokens of it."""
        self._left_s = now_s
        if all_left:
            self._all_left_s = now_s
