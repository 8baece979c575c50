"""A clock that one task waits for and others set."""

from __future__ import annotations

import asyncio


class Alarm:
    """Rings at the earliest of the times that it was set to since it rang last. It belongs to the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rung = asyncio.Event()

    def set(self, delay_s: float) -> None:
        """Rings after `delay_s` at the latest, at once where that is over."""
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
        """Until it rings; a ring that nobody has waited for yet counts."""
        await self._rung.wait()
        self._rung.clear()

    def _ring(self) -> None:
        self._timer = None
        self._rung.set()
