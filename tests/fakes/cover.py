"""Parameter combinations: every run tests a covering subset, `make check-full` tests all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
"""Whether `make check-full` runs."""
EXAMPLES_EACH_RUN = 0.2

Pair = tuple[tuple[int, int], ...]


def examples(count: int) -> int:
    """Return the number of a property's examples in this run; `count` is that of `make check-full`."""
    return count if FULL else round(count * EXAMPLES_EACH_RUN)


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Return every combination of the axes' values. Those that every run tests contain each pair of values of two axes.

    The other combinations are marked slow.
    """
    return _cover([list(axis) for axis in axes], strength=2)


def each_value(*axes: Iterable[Any]) -> list[Any]:
    """Return every combination of the axes' values. Those that every run tests contain each value; others are slow."""
    return _cover([list(axis) for axis in axes], strength=1)


def _cover(axes: Sequence[Sequence[Any]], strength: int) -> list[Any]:
    places = list(product(*(range(len(axis)) for axis in axes)))
    wanted = {place: _parts(place, strength) for place in places}
    missing, chosen = set().union(*wanted.values()), set()
    uses: Counter[tuple[int, int]] = Counter()
    while missing:
        best = max(places, key=lambda place: (len(wanted[place] & missing), -sum(uses[at] for at in enumerate(place))))
        chosen.add(best)
        missing -= wanted[best]
        uses.update(enumerate(best))
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, place, strict=True)),
            marks=() if place in chosen else pytest.mark.slow,
        )
        for place in places
    ]


def _parts(place: tuple[int, ...], strength: int) -> set[Pair]:
    """Every choice of `strength` axes with the place's values there."""
    return set(combinations(enumerate(place), strength))
