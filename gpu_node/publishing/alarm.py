"""A timer that may be set to several times and rings at the earliest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """A timer that rings at the earliest time set since its last ring. It belongs to the running event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._on_ring = ring

    def set(self, delay_s: float) -> None:
        """Ring after at most `delay_s` seconds."""
        # Rounded up to milliseconds, the resolution of uvloop's timers: a ring before the time would find nothing due.
        at_s = math.ceil((self._loop.time() + delay_s) * 1000) / 1000
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._on_ring()
