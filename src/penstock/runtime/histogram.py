"""A histogram as plain numbers: counting a value costs less than a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

Buckets = list[tuple[str, float]]
"""Upper bounds and cumulative counts, as Prometheus's client takes them."""


class Histogram:
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count has no bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of all values."""

    def note(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """Return a copy that later values do not change."""
        copied = Histogram(self.bounds)
        copied.counts, copied.total = self.counts[:], self.total
        return copied

    @property
    def buckets(self) -> Buckets:
        """The cumulative counts up to each bound, the last one for all values."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


def sum_of(histograms: Iterable[Histogram]) -> Histogram:
    """Return the sum of histograms, at least one, that have the same bounds."""
    first, *others = histograms
    whole = first.copy()
    for one in others:
        whole.counts = [mine + theirs for mine, theirs in zip(whole.counts, one.counts, strict=True)]
        whole.total += one.total
    return whole
