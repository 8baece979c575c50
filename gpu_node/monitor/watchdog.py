"""Whether the engine hangs: it gives no answer, or it has work and its step counter stands still."""

from __future__ import annotations

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.records import EngineStats


class EngineStalledError(InvariantError):
    """The engine hangs: its node must end, so that others get its jobs."""

    code = "engine_stalled"


class Watchdog:
    """Adds up the time without progress. Of a look that comes late, for this process stood still itself, only
    `max_look_s` counts.
    """

    def __init__(self, *, stall_after_s: float, max_look_s: float, now_s: float) -> None:
        self._stall_after_s = stall_after_s
        self._max_look_s = max_look_s
        self._looked_s = now_s
        self._num_steps = -1
        self.stalled_s = 0.0
        """Time without progress, as far as it is known."""

    def look(self, stats: EngineStats | None, *, may_step: bool, now_s: float) -> None:
        """Takes in the engine's figures, None for no answer. Raises EngineStalledError when it hangs: a node that only
        seems to live would keep its jobs for ever.
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
