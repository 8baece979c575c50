"""Detects a hung engine: it does not answer, or it has work and its step counter does not move."""

from __future__ import annotations

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.records import EngineStats


class EngineStalledError(InvariantError):
    """The engine hangs. Its node must end, so that other nodes take over its jobs."""

    code = "engine_stalled"


class Watchdog:
    """The time that an engine has made no progress.

    A look may be late because the whole process was paused. Such an interval counts for at most `max_look_s`.
    """

    def __init__(self, *, stall_after_s: float, max_look_s: float, now_s: float) -> None:
        self._stall_after_s = stall_after_s
        self._max_look_s = max_look_s
        self._looked_s = now_s
        self._num_steps = -1
        self.stalled_s = 0.0
        """Seconds without progress, as known at the last look."""

    def look(self, stats: EngineStats | None, *, may_step: bool, now_s: float) -> None:
        """Check the engine's statistics; None: it did not answer. Raises EngineStalledError when it hangs.

        A node that only seemed to live would keep its jobs forever.
        """
        elapsed_s = min(now_s - self._looked_s, self._max_look_s)
        self._looked_s = now_s
        if stats is not None and (stats.steps != self._num_steps or not may_step or not _has_work(stats)):
            self._num_steps, self.stalled_s = stats.steps, 0.0
            return
        self.stalled_s += elapsed_s
        if self.stalled_s > self._stall_after_s:
            raise EngineStalledError(f"the engine has work and has made no step for {self.stalled_s:.0f} s")


def _has_work(stats: EngineStats) -> bool:
    return stats.num_running + stats.num_waiting + stats.num_swapped > 0
