"""Replayed backlogs: estimates are near the true waits from the first minute, and again after a node joins or dies."""

from __future__ import annotations

import math
from statistics import median

import pytest
from bench.studies.wait_estimates import counted, row
from bench.studies.wait_replay import SCENARIOS, ComparedWait, Replay, Scenario

MAX_MEDIAN, MAX_P90 = 1.3, 1.5


def p90(errors: list[float]) -> float:
    return sorted(errors)[len(errors) * 9 // 10]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_estimates_are_good_in_the_first_minute_and_later(scenario: Scenario) -> None:
    compared = counted(Replay(scenario, seed=7).run(), scenario.changes_s)
    until_s = 60 + (scenario.joins_s[0] if scenario.changes_s == math.inf else scenario.changes_s + 30)
    for errors in ([one.error for one in compared if one.at_s < until_s], [one.error for one in compared]):
        assert len(errors) > 100
        assert median(errors) <= MAX_MEDIAN
        assert p90(errors) <= MAX_P90


def test_only_waits_that_the_report_names_count() -> None:
    waits = [ComparedWait(at_s, 0, true_s, 20, 15, 30) for at_s, true_s in ((0, 5), (0, 40), (50, 40), (95, 40))]
    assert [one.at_s for one in counted(waits)] == [0, 50, 95]
    assert [one.at_s for one in counted(waits, 60)] == [95]
    assert row("x", waits) == "| x | 2.00 | 2.00 | 0% | 2.00 | 2.00 | 0% |"
    assert row("x", []) == "| x | – | – | – | – | – | – |"
