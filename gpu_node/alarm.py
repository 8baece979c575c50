"""A timer that one task awaits and others set."""

from __future__ import annotations

import asyncio


class Alarm:
    """A timer that rings at the earliest time set since its last ring. It belongs to the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rung = asyncio.Event()

    def set(self, delay_s: float) -> None:
        """Ring after at most `delay_s` seconds; at once if it is not positive."""
        at_s = self._loop.time() + delay_s
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        if delay_s <= 0:
            self._ring()
        else:
            self._timer = self._loop.call_at(at_s, self._ring)

    async def wait(self) -> None:
        """Wait until it rings. A ring since the last wait counts."""
        await self._rung.wait()
        self._rung.clear()

    def _ring(self) -> None:
        self._timer = None
        self._rung.set()
