"""What drafted tokens cost a step, as learnt from the steps before."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
from numpy.typing import NDArray

_ENOUGH = 3
_FORGOTTEN_AFTER = 4000
_PACE = 0.02
_LEVEL_PACE = 0.1
_MOST_NEWS = 0.2
"""How far one step may be off what was expected and be believed: others may have held it up."""
_FRESH_FOR = 16
_LEAST_MS = 1e-3
_MARGIN = 2.0
"""Drafts must be worth so many times what they cost: whoever is done earlier spares the others less than its share."""


class Times:
    """Logarithms of what steps take, by a count of their rows or their sequences.

    Between counts that are known lies a line, and beyond them time stands still: what is not known is tried, and is
    known then. What was long not met is forgotten.
    """

    def __init__(self) -> None:
        self.usual: dict[int, float] = {}
        self._first: dict[int, list[float]] = {}
        self._times_met: dict[int, int] = {}
        self._last_met: dict[int, int] = {}

    def note(self, count: int, log_time: float, now: int) -> bool:
        """A step took so long; `now` counts steps. Whether this makes the count known."""
        met = 1 if self._is_forgotten(count, now) else self._times_met[count] + 1
        self._times_met[count], self._last_met[count] = met, now
        if met > _ENOUGH:
            self.usual[count] += max(1 / met, _PACE) * _news(log_time - self.usual[count])
            return False
        self._first[count] = [log_time] if met == 1 else [*self._first[count], log_time]
        self.usual[count] = median(self._first[count])
        return met == _ENOUGH

    def known(self, now: int) -> list[tuple[int, float]]:
        """The counts that are known, ascending, and what they usually take."""
        enough = (count for count, met in self._times_met.items() if met >= _ENOUGH)
        return [(count, self.usual[count]) for count in sorted(enough) if not self._is_forgotten(count, now)]

    def _is_forgotten(self, count: int, now: int) -> bool:
        return now - self._last_met.get(count, -_FORGOTTEN_AFTER - 1) > _FORGOTTEN_AFTER


def _news(surprise: float) -> float:
    return min(max(surprise, -_MOST_NEWS), _MOST_NEWS)


class StepCost:
    """The time of a step by its exact number of rows, and what planning and ending it take beside that.

    Kernels compute rows by the tile, so a row more may cost nothing or a tenth of a step: no line tells. All times
    count relative to a level that follows whatever makes all steps slower, other processes or longer contexts.
    """

    def __init__(self) -> None:
        self._rows, self._plain, self._drafted = Times(), Times(), Times()
        self._level = 0.0
        self._now = 0
        self._needs: list[float] = []
        self._needs_of = (0, 0)
        self._needs_until = 0

    def note(self, num_seqs: int, num_drafted: int, step_ms: float, host_ms: float) -> None:
        """A step in which all decode took the runner so long, and so much more until the next one could begin."""
        num_rows, log_ms = num_seqs + num_drafted, math.log(max(step_ms, _LEAST_MS))
        if num_rows in self._rows.usual:
            self._level += _LEVEL_PACE * _news(log_ms - self._level - self._rows.usual[num_rows])
        self._now += 1
        if self._rows.note(num_rows, log_ms - self._level, self._now):
            self._needs_until = self._now
        host = self._drafted if num_drafted else self._plain
        host.note(num_seqs, math.log(max(host_ms, _LEAST_MS)) - self._level, self._now)

    def needs(self, num_seqs: int, most: int) -> list[float]:
        """How many of 1, 2, ... up to `most` drafted tokens must stand to pay, where so many sequences decode.

        Ends behind the last number that can pay.
        """
        if self._needs_of != (num_seqs, most) or self._now >= self._needs_until:
            self._needs, self._needs_of = self._work_out(num_seqs, most), (num_seqs, most)
            self._needs_until = self._now + _FRESH_FOR
        return self._needs

    def _work_out(self, num_seqs: int, most: int) -> list[float]:
        known = self._rows.known(self._now)
        is_plain_known = any(num_seqs <= 2 * count <= 2 * num_seqs for count, _ in known)
        most = min(most, known[-1][0] * 5 // 4 + 4 - num_seqs) if is_plain_known else 0
        if most <= 0:
            return []
        counts, times = np.array(known).T
        base = times[0]
        # More rows never take less: where they seem to, something held up the fewer.
        rising = np.minimum.accumulate(np.exp(times - base)[::-1])[::-1]
        step = np.interp(num_seqs + np.arange(most + 1), counts, rising)
        plain, drafted = (self._host(times, num_seqs, base) for times in (self._plain, self._drafted))
        extra = step[1:] - step[0] + max(0.0, drafted - plain)
        needs = _MARGIN * extra * num_seqs / (step[0] + plain)
        paying: NDArray[np.intp] = (needs < np.arange(1, most + 1)).nonzero()[0]
        return needs[: paying[-1] + 1].tolist() if len(paying) else []

    def _host(self, times: Times, num_seqs: int, base: float) -> float:
        known = times.known(self._now)
        if not known:
            return 0.0
        counts, logs = np.array(known).T
        return float(np.interp(num_seqs, counts, np.exp(logs - base)))
