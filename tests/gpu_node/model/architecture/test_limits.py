"""The ranges of numbers in a model's files, and the page that has them."""

from __future__ import annotations

import math
from itertools import chain

import pytest

from penstock.gpu_node.model.architecture.limits import (
    ADAPTER_LIMITS,
    CONFIG_LIMITS,
    QUANTIZATION_LIMITS,
    ROPE_LIMITS,
    Limit,
)
from tests.source_tree import ROOT


@pytest.mark.parametrize("value", [1, 7, 7.0, 9])
def test_whole_numbers_within_the_ends_are_allowed(value: float) -> None:
    assert Limit(1, 9).allows(value)


@pytest.mark.parametrize("value", [0, 10, 2.5, math.nan, math.inf, -math.inf, True, "7", None, [7], 10**400])
def test_all_else_is_not(value: object) -> None:
    assert not Limit(1, 9).allows(value)
    assert not Limit(1, 9, is_whole=False).allows(value) or value == 2.5


def test_the_page_has_each_range() -> None:
    lines = (ROOT / "docs" / "MODELS.md").read_text().splitlines()
    tables = (CONFIG_LIMITS, ROPE_LIMITS, QUANTIZATION_LIMITS, ADAPTER_LIMITS)
    for name, limit in chain.from_iterable(table.items() for table in tables):
        ends = str(limit).partition(" from ")[2]
        assert any(f"`{name}`" in line and ends in line for line in lines), name
