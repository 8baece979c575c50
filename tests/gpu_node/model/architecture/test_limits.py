"""The ranges of numbers in a model's files."""

from __future__ import annotations

import math

import pytest

from penstock.gpu_node.model.architecture.limits import Limit


@pytest.mark.parametrize("value", [1, 7, 7.0, 9])
def test_whole_numbers_within_the_ends_are_allowed(value: float) -> None:
    assert Limit(1, 9).allows(value)


@pytest.mark.parametrize("value", [0, 10, 2.5, math.nan, math.inf, -math.inf, True, "7", None, [7], 10**400])
def test_all_else_is_not(value: object) -> None:
    assert not Limit(1, 9).allows(value)
    assert not Limit(1, 9, is_whole=False).allows(value) or value == 2.5
