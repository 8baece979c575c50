"""When tokens arrived, and what follows from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

from bench.workload import Workload

SLO_TTFT_S = 0.200
SLO_MEAN_ITL_S = 0.050
"""Goodput is the share of requests that keep both."""


class WrongCountError(Exception):
    """An engine gave another number of tokens than it was asked for: its measurements would not compare."""


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two nearest ranks; 0 for no values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Stopwatch:
    """Arrivals per request. A request counts as asked when it was due; in a closed loop, when it was sent."""

    def __init__(
        self,
        workload: Workload,
        *,
        on_finished: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workload = workload
        self._on_finished = on_finished
        self._clock = clock
        self.start_s = clock()
        self._asked_s: dict[int, float] = {}
        self._arrivals_s: dict[int, list[float]] = {}
        self._num_tokens: dict[int, int] = {}
        self.num_open = 0
        self.num_finished = 0

    def wait_s(self, i: int) -> float:
        """How long until request `i` is due; zero or less when it is."""
        return self.start_s + self._workload.requests[i].at_s - self._clock()

    def asked(self, i: int) -> None:
        """Request `i` was given to the engine."""
        due_s = self.start_s + self._workload.requests[i].at_s
        self._asked_s[i] = due_s if self._workload.max_in_flight is None else self._clock()
        self._num_tokens[i] = 0
        self.num_open += 1

    def saw(self, i: int, num_tokens: int) -> None:
        """Note an output of request `i`. Its number of tokens is 0 if the engine reports it only at the end."""
        self._arrivals_s.setdefault(i, []).append(self._clock())
        self.told(i, num_tokens)

    def told(self, i: int, num_tokens: int) -> None:
        """Request `i` has so many tokens more."""
        self._num_tokens[i] += num_tokens
        if num_tokens and self._num_tokens[i] >= self._workload.requests[i].num_output:
            self.num_open -= 1
            self.num_finished += 1
            if self._on_finished is not None:
                self._on_finished(self.num_finished)

    @property
    def first_arrival_s(self) -> float:
        """When the first token of all came, by the clock."""
        return min(times[0] for times in self._arrivals_s.values())

    def measured(self) -> dict[str, float]:
        """Return the run's measurements; raises WrongCountError."""
        for i, request in enumerate(self._workload.requests):
            if self._num_tokens.get(i, 0) != request.num_output:
                raise WrongCountError(
                    f"request {i} gave {self._num_tokens.get(i, 0)} tokens, asked for {request.num_output}"
                )
        num_tokens = sum(self._num_tokens.values())
        wall_s = max(times[-1] for times in self._arrivals_s.values()) - self.start_s
        found = {"output_tokens": num_tokens, "wall_s": wall_s, "tokens_per_s": num_tokens / wall_s}
        found["tokens_per_event"] = num_tokens / sum(map(len, self._arrivals_s.values()))
        return found | self._latencies()

    def _latencies(self) -> dict[str, float]:
        ttft_s = {i: times[0] - self._asked_s[i] for i, times in self._arrivals_s.items()}
        mean_itl_s = {
            i: (times[-1] - times[0]) / max(1, self._num_tokens[i] - 1) for i, times in self._arrivals_s.items()
        }
        gaps_s = [b - a for times in self._arrivals_s.values() for a, b in pairwise(times)]
        good = sum(ttft_s[i] <= SLO_TTFT_S and mean_itl_s[i] <= SLO_MEAN_ITL_S for i in ttft_s)
        found = {"itl_mean_ms": statistics.median(mean_itl_s.values()) * 1e3, "goodput": good / len(ttft_s)}
        for percent in (50, 90, 99):
            found[f"ttft_p{percent}_ms"] = percentile(list(ttft_s.values()), percent) * 1e3
            found[f"itl_p{percent}_ms"] = percentile(gaps_s, percent) * 1e3
        return found
