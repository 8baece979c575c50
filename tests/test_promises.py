"""docs/PROMISES.md names tests that exist, for every promise. So does each line of the tables of faults."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.source_tree import ROOT

TEXT = (ROOT / "docs/PROMISES.md").read_text()
STATES = re.compile(r"^(exact|ties|again|ends|may be lost|kept|written once)\b")


@cache
def names_of_tests() -> frozenset[str]:
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))


def cells() -> list[str]:
    rows = [line.strip("|").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    return [cell.strip() for row in rows for cell in row[1:]]


def test_tests_of_the_promises_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 30
    assert named - names_of_tests() == set()


def test_each_promise_names_a_test_or_says_that_none_proves_it() -> None:
    promises = [cell for cell in cells() if STATES.match(cell) and not cell.startswith("may be lost")]
    assert len(promises) > 25
    excused = ("no test", "by Redis's own promise", "`test_")
    assert [cell for cell in promises if not any(words in cell for words in excused)] == []


@pytest.mark.parametrize(
    ("page", "heading", "at_least"),
    [
        ("docs/PROMISES.md", "## Faults", 40),
        ("ops/RUNBOOK.md", "## Redis fails over", 8),
        ("ops/RUNBOOK.md", "## What each durability setting risks", 9),
    ],
)
def test_each_line_of_a_table_of_faults_names_a_test(page: str, heading: str, at_least: int) -> None:
    section = (ROOT / page).read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= at_least
    tests = [re.findall(r"`(test_\w+)`", row.rpartition(" | ")[2]) for row in rows]
    assert [row for row, named in zip(rows, tests, strict=True) if not named] == []
    assert {name for named in tests for name in named} - names_of_tests() == set()
