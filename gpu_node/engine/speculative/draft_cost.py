"""What drafts cost: the time of a step by its number of rows."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
from numpy.typing import NDArray

_ENOUGH = 3
"""Steps after which the time of a number of rows is known."""
_FORGOTTEN_AFTER = 4000
"""Steps without a number of rows after which its time is forgotten."""
_PACE = 0.02
"""Least weight of a new time in the usual one."""
_LEVEL_PACE = 0.1
"""Weight of a new time in the level of all times."""
_MAX_SURPRISE = 0.2
"""Largest deviation from the expected log time that counts: other processes may have delayed one step."""
_FRESH_STEPS = 16
"""Steps for which the computed needs are reused."""
_LEAST_MS = 1e-3
_MARGIN = 2.0
"""Drafts must be worth this multiple of their cost: a sequence that ends early saves the others less than its share."""


class Times:
    """Logarithms of step times, by number of rows or sequences.

    Times between known numbers are interpolated linearly; beyond them they are constant, so unknown numbers get tried
    and become known. A number that did not occur for long is forgotten.
    """

    def __init__(self) -> None:
        self.usual: dict[int, float] = {}
        self._first: dict[int, list[float]] = {}
        self._times_met: dict[int, int] = {}
        self._last_met: dict[int, int] = {}

    def note(self, count: int, log_time: float, now: int) -> bool:
        """Record a step's time; `now` counts steps. Return whether the number becomes known."""
        met = 1 if self._is_forgotten(count, now) else self._times_met[count] + 1
        self._times_met[count], self._last_met[count] = met, now
        if met > _ENOUGH:
            self.usual[count] += max(1 / met, _PACE) * _clip(log_time - self.usual[count])
            return False
        self._first[count] = [log_time] if met == 1 else [*self._first[count], log_time]
        self.usual[count] = median(self._first[count])
        return met == _ENOUGH

    def known(self, now: int) -> list[tuple[int, float]]:
        """Return the known numbers, ascending, with their usual log times."""
        enough = (count for count, met in self._times_met.items() if met >= _ENOUGH)
        return [(count, self.usual[count]) for count in sorted(enough) if not self._is_forgotten(count, now)]

    def _is_forgotten(self, count: int, now: int) -> bool:
        return now - self._last_met.get(count, -_FORGOTTEN_AFTER - 1) > _FORGOTTEN_AFTER


def _clip(surprise: float) -> float:
    return min(max(surprise, -_MAX_SURPRISE), _MAX_SURPRISE)


class StepCost:
    """The time of a step by its exact number of rows, and the time to plan and complete it.

    Kernels compute rows in tiles, so one more row may cost nothing or a tenth of a step; a linear model does not fit.
    All times are relative to a level, which follows what slows all steps down, such as other processes or longer
    contexts.
    """

    def __init__(self) -> None:
        self._rows, self._plain, self._drafted = Times(), Times(), Times()
        self._level = 0.0
        self._now = 0
        self._needs: list[float] = []
        self._needs_of = (0, 0)
        self._needs_until = 0

    def note(self, num_seqs: int, num_drafted: int, step_ms: float, host_ms: float) -> None:
        """Record a decode step: the runner took `step_ms`, and `host_ms` passed until the next step could begin."""
        num_rows, log_ms = num_seqs + num_drafted, math.log(max(step_ms, _LEAST_MS))
        if num_rows in self._rows.usual:
            self._level += _LEVEL_PACE * _clip(log_ms - self._level - self._rows.usual[num_rows])
        self._now += 1
        if self._rows.note(num_rows, log_ms - self._level, self._now):
            self._needs_until = self._now
        host = self._drafted if num_drafted else self._plain
        host.note(num_seqs, math.log(max(host_ms, _LEAST_MS)) - self._level, self._now)

    def needs(self, num_seqs: int, limit: int) -> list[float]:
        """Return how many of 1, 2, …, `limit` drafted tokens must be accepted to pay, if `num_seqs` sequences decode.

        The list ends with the last number that can pay.
        """
        if self._needs_of != (num_seqs, limit) or self._now >= self._needs_until:
            self._needs, self._needs_of = self._work_out(num_seqs, limit), (num_seqs, limit)
            self._needs_until = self._now + _FRESH_STEPS
        return self._needs

    def _work_out(self, num_seqs: int, limit: int) -> list[float]:
        known = self._rows.known(self._now)
        is_plain_known = any(num_seqs <= 2 * count <= 2 * num_seqs for count, _ in known)
        limit = min(limit, known[-1][0] * 5 // 4 + 4 - num_seqs) if is_plain_known else 0
        if limit <= 0:
            return []
        counts, times = np.array(known).T
        base = times[0]
        # More rows never take less time: where they seem to, the step with fewer rows was delayed.
        rising = np.minimum.accumulate(np.exp(times - base)[::-1])[::-1]
        step = np.interp(num_seqs + np.arange(limit + 1), counts, rising)
        plain, drafted = (self._host(times, num_seqs, base) for times in (self._plain, self._drafted))
        extra = step[1:] - step[0] + max(0.0, drafted - plain)
        needs = _MARGIN * extra * num_seqs / (step[0] + plain)
        paying: NDArray[np.intp] = (needs < np.arange(1, limit + 1)).nonzero()[0]
        return needs[: paying[-1] + 1].tolist() if len(paying) else []

    def _host(self, times: Times, num_seqs: int, base: float) -> float:
        known = times.known(self._now)
        if not known:
            return 0.0
        counts, logs = np.array(known).T
        return float(np.interp(num_seqs, counts, np.exp(logs - base)))
