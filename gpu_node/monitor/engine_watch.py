"""Reads an engine's statistics once for each heartbeat, and detects that the engine hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from penstock.contract.errors import UnavailableError
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.engine_worker import EngineWorker
from penstock.gpu_node.monitor.watchdog import Watchdog

log = logging.getLogger(__name__)

_INTERVALS_A_LOOK = 3
"""Longest time between two looks at the engine: its answer, the heartbeat and the pause each take one interval."""


class EngineWatch:
    """Looks at an engine every `interval_s` seconds, and waits no longer than that for its answer."""

    def __init__(self, worker: EngineWorker, *, interval_s: float, stall_after_s: float) -> None:
        self._worker = worker
        self._interval_s = interval_s
        self._watchdog = Watchdog(
            stall_after_s=stall_after_s, max_look_s=_INTERVALS_A_LOOK * interval_s, now_s=time.monotonic()
        )
        self.stats: EngineStats | None = None
        """The engine's last statistics; None before the first."""

    @property
    def stalled_s(self) -> float:
        """Seconds without progress, as known at the last look."""
        return self._watchdog.stalled_s

    async def look(self) -> EngineStats:
        """Return the engine's statistics; the last known ones while a long step blocks it, so that heartbeats go on.

        Raises UnavailableError before the first ones, EngineStalledError if the engine hangs.
        """
        answer: EngineStats | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                self.stats = answer = await asyncio.wrap_future(self._worker.stats())
        self._watchdog.look(answer, may_step=not self._worker.is_paused, now_s=time.monotonic())
        if self.stats is None:
            # Logged here, because joining retries silently on UnavailableError, as while Redis is unavailable.
            log.warning("the engine has not answered yet", extra={"waited_s": round(self.stalled_s, 1)})
            raise UnavailableError("the engine has not answered yet")
        return self.stats
