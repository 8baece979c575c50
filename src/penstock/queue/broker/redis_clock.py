"""Redis's clock as a process knows it: this machine's clock, and by how much it differs.

What one process writes and another one compares has Redis's time or that of its pool. docs/CLOCKS.md lists each
comparison.
"""

from __future__ import annotations

import logging
import time

from redis.asyncio import Redis

WARN_S = 30.0
"""A difference from which on it is logged. Half of it ends the warning."""
MAX_ROUND_TRIP_S = 1.0
"""An answer that took longer says too little about the clock."""
_LOG = logging.getLogger(__package__)


class RedisClock:
    """The clock of one Redis."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        """Seconds by which Redis's clock is ahead of this machine's; 0 until it is known."""
        self._is_told = False

    def note(self, redis_us: int, sent_s: float, received_s: float) -> None:
        """Learn from an answer with Redis's time in microseconds. `sent_s`, `received_s`: by this machine's clock."""
        if not 0 <= received_s - sent_s <= MAX_ROUND_TRIP_S:
            return
        self.offset_s = redis_us / 1e6 - (sent_s + received_s) / 2
        facts = {"offset_s": round(self.offset_s, 1)}
        if abs(self.offset_s) >= WARN_S and not self._is_told:
            self._is_told = True
            _LOG.warning("this machine's clock differs from that of redis", extra=facts)
        elif abs(self.offset_s) < WARN_S / 2 and self._is_told:
            self._is_told = False
            _LOG.warning("this machine's clock agrees with that of redis again", extra=facts)

    async def ask(self, redis: Redis) -> None:
        """Ask Redis for its time. Raises redis-py's errors."""
        sent_s = time.time()
        seconds, us = await redis.time()
        self.note(seconds * 1_000_000 + us, sent_s, time.time())

    def now_s(self) -> float:
        """Return Redis's time as Unix time in seconds."""
        return time.time() + self.offset_s
