"""The checker of histories finds nothing in a good one, and each of 20 planted faults, with its promise and line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from faults.tools.history import Broken, Checker, Recorder

Line = dict[str, Any]
TOKENS = {"a": [1, 2, 3, 4], "b": [5, 6], "c": [7, 8, 9]}


def good() -> list[Line]:
    """Return a history of three jobs, four readers and a fail-over, in which all is as promised."""
    file = io.StringIO()
    note = Recorder(file).note
    note("submit", job="a", key="k", durability="replicated")
    note("submit", job="b", durability="memory")
    note("submit", job="c", durability="replicated")
    safe, quick = {"reader": "r1", "durability": "replicated"}, {"reader": "r2", "durability": "memory"}
    note("chunk", job="a", choice=0, position=0, tokens=[1, 2], **safe)
    note("chunk", job="a", choice=0, position=0, tokens=[1], **quick)
    note("chunk", job="a", choice=0, position=1, tokens=[2, 3], **quick)
    note("chunk", job="c", choice=0, position=0, tokens=[7, 8, 9], **safe)
    note("end", job="c", reader="r1", state="succeeded")
    note("fault", name="primary killed", until="replicated")
    note("kept", job="a", known=True, tokens={"0": [1, 2]}, ended=False)
    note("kept", job="b", known=False, tokens={}, ended=False)
    note("kept", job="c", known=True, tokens={"0": [7, 8, 9]}, ended=True)
    note("submit", job="a", key="k", durability="memory")
    note("chunk", job="a", choice=0, position=2, tokens=[3, 4], **safe)
    note("chunk", job="a", choice=0, position=3, tokens=[4], **quick)
    note("end", job="a", reader="r1", state="succeeded")
    note("end", job="a", reader="r2", state="succeeded")
    note("chunk", job="b", choice=0, position=1, tokens=[6], reader="late", durability="memory")
    note("end", job="b", reader="late", state="succeeded")
    for job, tokens in TOKENS.items():
        note("record", job=job, state="succeeded", tokens={"0": tokens})
    return [json.loads(line) for line in file.getvalue().splitlines()]


def broken(history: list[Line], at_least: str = "memory") -> list[Broken]:
    return Checker(at_least).check([json.dumps(line) for line in history])


def with_values(line: int, **values: Any) -> Callable[[list[Line]], None]:
    """Return what changes a line, counted from 1."""

    def change(history: list[Line]) -> None:
        history[line - 1].update(values)

    return change


def without(line: int) -> Callable[[list[Line]], None]:
    return lambda history: history.__delitem__(line - 1)


def again(line: int, behind: int | None = None, **values: Any) -> Callable[[list[Line]], None]:
    """Return what repeats a line, with other values, behind another one."""
    return lambda history: history.insert(behind or line, {**history[line - 1], **values})


FAULTS: list[tuple[Callable[[list[Line]], None], str, int]] = [
    (with_values(4, tokens=[1]), "no token is lost", 14),
    (without(6), "no token is lost", 14),
    (again(6), "no token is repeated", 7),
    (with_values(6, position=0), "no token is repeated", 6),
    (with_values(15, tokens=[5]), "a token that was shown stays", 15),
    (with_values(6, tokens=[9, 3]), "a token that was shown stays", 6),
    (again(15, behind=17, position=4), "nothing comes behind the end", 18),
    (again(16), "a job ends once", 17),
    (with_values(17, state="failed"), "a job ends once", 17),
    (with_values(17, state="lost"), "each accepted job ends", 17),
    (with_values(10, tokens={"0": [1]}), "a token that was shown survives (replicated)", 10),
    (with_values(10, tokens={"0": [1, 9]}), "a token that was shown survives (replicated)", 10),
    (with_values(12, known=False), "an accepted job survives (replicated)", 12),
    (with_values(13, job="d"), "a repeated submission finds its job", 13),
    (with_values(20, state="failed"), "a job ends once", 20),
    (with_values(20, state=""), "each accepted job ends", 20),
    (with_values(20, tokens={"0": [1, 2, 3]}), "no token is lost", 20),
    (with_values(22, tokens={"0": [7, 7, 9]}), "a token that was shown stays", 22),
    (without(22), "each accepted job ends", 21),
    (without(2), "only accepted jobs run", 10),
]


def test_a_good_history_breaks_nothing() -> None:
    assert broken(good()) == []


@pytest.mark.parametrize(("plant", "promise", "line"), FAULTS, ids=range(1, len(FAULTS) + 1))
def test_each_planted_fault_is_found_where_it_is(plant: Callable[[list[Line]], None], promise: str, line: int) -> None:
    history = good()
    plant(history)
    found = broken(history)
    assert (promise, line) in [(one.promise, one.line) for one in found], found


def test_readers_that_asked_for_less_lose_tokens_if_they_are_taken_to_have_asked_for_more() -> None:
    found = broken(good(), "replicated")
    assert [(one.promise, one.line) for one in found] == [("a token that was shown survives (replicated)", 10)]
    assert "tokens 1 to 2 were shown" in found[0].message


def test_a_line_that_is_none_of_a_history_is_named() -> None:
    found = Checker().check(['{"kind": "submit", "job": "a"}', "x"])
    assert [(one.promise, one.line) for one in found] == [
        ("the history is complete", 1),
        ("the history is complete", 2),
    ]
