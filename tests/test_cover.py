"""Covers of combinations: no combination is lost, and no pair of values waits for the slow tests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest
from fakes.cover import each_value, pairwise

AXES = ("abcdefgh", (1, 2), ("x", "y"), (None, 5, 7))


@pytest.mark.parametrize(("cover", "strength"), [(pairwise, 2), (each_value, 1)])
def test_all_combinations_are_there_and_each_choice_of_values_is_tested_in_every_run(
    cover: Callable[..., list[Any]], strength: int
) -> None:
    params = cover(*AXES)
    assert [param.values for param in params] == list(product(*AXES))
    quick = [param.values for param in params if not param.marks]
    for at in combinations(range(len(AXES)), strength):
        wanted = set(product(*(AXES[i] for i in at)))
        assert {tuple(values[i] for i in at) for values in quick} == wanted
    assert len(quick) < len(params) / 2


def test_values_are_spread_evenly() -> None:
    quick = [param.values for param in each_value(range(4), "ab") if not param.marks]
    assert sorted(value for _, value in quick) == ["a", "a", "b", "b"]
