"""Percentiles of the times that a gateway measured in the last minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

WINDOW_S = 300
"""Seconds over which percentiles are taken."""
MAX_TIMES = 2000
"""The newest times that are kept. With more streams in the window, percentiles cover the newest ones."""


class RecentTimes:
    """The times of the last `WINDOW_S` seconds, `MAX_TIMES` at most."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)

    def note(self, seconds: float) -> None:
        """Add a time."""
        self._times.append((time.monotonic(), seconds))

    def percentiles(self, percents: Sequence[int]) -> tuple[int, list[float]]:
        """Return the number of times, and these percentiles in seconds (none without times)."""
        oldest_s = time.monotonic() - WINDOW_S
        while self._times and self._times[0][0] < oldest_s:
            self._times.popleft()
        ordered = sorted(seconds for _, seconds in self._times)
        if not ordered:
            return 0, []
        return len(ordered), [ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in percents]
