"""The order in which new grammars are tried out: tenants in turn, and each tenant's grammars in order of arrival."""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.gpu_node.engine.structured.grammar import Kind, TrialResult

MAX_AT_ONCE = 2
MAX_LOSSES = 3
"""A grammar is refused after its trial's process was lost more often than this."""


@dataclass(slots=True, eq=False)
class Trial:
    """A grammar to try out, or the parts of one: the trial ends at the first text that fails."""

    kind: Kind
    texts: list[str]
    num_losses: int = 0
    result: Future[TrialResult] = field(default_factory=Future)


class TrialQueue:
    """Waiting trials. A tenant runs at most one trial at a time."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Trial]] = OrderedDict()
        self._running: dict[Trial, str] = {}

    def add(self, tenant: str, trial: Trial) -> None:
        """Queue a trial."""
        self._waiting.setdefault(tenant, deque()).append(trial)

    @property
    def has_any(self) -> bool:
        """Whether a trial is waiting or running."""
        return bool(self._waiting or self._running)

    def start(self) -> Trial | None:
        """Return the next trial, if one may run now."""
        if len(self._running) >= MAX_AT_ONCE or not self._waiting:
            return None
        busy = set(self._running.values())
        # A tenant's second trial waits, so that a slot stays free for the next tenant.
        tenant = next((one for one in self._waiting if one not in busy), None)
        if tenant is None:
            return None
        waiting = self._waiting.pop(tenant)
        trial = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting
        self._running[trial] = tenant
        return trial

    def end(self, trial: Trial, result: TrialResult) -> None:
        """Set the result of a running trial."""
        self._running.pop(trial, None)
        trial.result.set_result(result)

    def retry(self, trial: Trial) -> None:
        """Queue a trial again after its process was killed from outside; refuse it after too many such losses."""
        tenant = self._running.pop(trial)
        trial.num_losses += 1
        if trial.num_losses > MAX_LOSSES:
            trial.result.set_result(TrialResult(is_too_costly=True, is_killed=True))
        else:
            self.add(tenant, trial)

    def put_back(self, trial: Trial) -> None:
        """Queue a trial again, before all others, because it could not be started."""
        tenant = self._running.pop(trial)
        self._waiting.setdefault(tenant, deque()).appendleft(trial)
        self._waiting.move_to_end(tenant, last=False)

    def clear(self) -> list[Trial]:
        """Remove and return all trials, because none can run any more."""
        trials = [trial for waiting in self._waiting.values() for trial in waiting] + list(self._running)
        self._waiting.clear()
        self._running.clear()
        return trials
