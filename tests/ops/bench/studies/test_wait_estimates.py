"""Replayed backlogs: estimates are near the true waits from the first minute, and again after a node joins or dies."""

from __future__ import annotations

from statistics import median

import pytest
from bench.studies.wait_estimates import counted, row
from bench.studies.wait_replay import SCENARIOS, ComparedWait, Replay, Scenario

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def p90(errors: list[float]) -> float:
    return sorted(errors)[len(errors) * 9 // 10]


def errors_of(scenario: Scenario, until_s: float = float("inf")) -> list[float]:
    compared = counted(Replay(scenario, seed=7).run(), scenario.changes_s)
    return [one.error for one in compared if one.at_s < until_s]


@pytest.mark.parametrize("name", ["mixed", "own limits", "slowly"])
def test_a_cold_pool_estimates_well_in_its_first_minute(name: str) -> None:
    errors = errors_of(BY_NAME[name], until_s=60)
    assert len(errors) > 100
    assert median(errors) <= 1.3
    assert p90(errors) <= 2


@pytest.mark.parametrize("name", ["joins", "dies", "beside chats"])
def test_estimates_are_good_after_the_number_of_nodes_changes_and_beside_foreground_work(name: str) -> None:
    errors = errors_of(BY_NAME[name])
    assert len(errors) > 100
    assert median(errors) <= 1.3
    assert p90(errors) <= 2


def test_only_waits_that_the_report_names_count() -> None:
    waits = [ComparedWait(at_s, 0, true_s, 20, 15, 30) for at_s, true_s in ((0, 5), (0, 40), (50, 40), (95, 40))]
    assert [one.at_s for one in counted(waits)] == [0, 50, 95]
    assert [one.at_s for one in counted(waits, 60)] == [95]
    assert row("x", waits) == "| x | 2.00 | 2.00 | 0% | 2.00 | 2.00 | 0% |"
    assert row("x", []) == "| x | – | – | – | – | – | – |"
