"""The rows of a flow: what they may say, and what makes them no flow."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.contract.errors import RequestError
from penstock.contract.priority import Priority
from penstock.producer.flows.graph import FlowGraph
from penstock.producer.flows.marks import Mark
from penstock.producer.flows.rows import flow_row

JOB = "echo.0190b5a0-0000-7000-8000-000000000000"


def graph_of(**rows: dict[str, Any]) -> FlowGraph:
    graph = FlowGraph()
    for line, (name, fields) in enumerate(rows.items(), 1):
        graph.add(line, name, {"body": {"prompt": fields.pop("prompt", "x")}, **fields})
    return graph


def problems_of(**rows: dict[str, Any]) -> list[tuple[str, int | None]]:
    return [(wrong.code, line) for wrong, line in graph_of(**rows).problems()]


def test_a_row_waits_for_what_it_names_and_for_what_its_marks_name() -> None:
    fields = {"after": ["a", {"job": JOB}], "for_each": "b.json.list", "priority": "standard", "on_failure": "skip"}
    body = {"prompt": "{{item}} {{c.text}} {{a.json.x}} {{*.text}}"}
    row = flow_row(0, 1, "r", {**fields, "body": body})
    assert (row.after, row.jobs) == (("a", "b", "c"), (JOB,))
    assert (row.for_each, row.priority, row.on_failure) == (Mark("b", ("list",)), Priority.STANDARD, "skip")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"after": "a"}, "after", "must be a list"),
        ({"after": ["a", "a"]}, "after", "twice"),
        ({"after": [{"job": "no id"}]}, "after", "ID"),
        ({"after": ["a", 7]}, "after[1]", "custom_id"),
        ({"on_failure": "ignore"}, "on_failure", "skip"),
        ({"priority": 1}, "priority", "batch"),
        ({"for_each": "a.text"}, "for_each", "list"),
        ({"for_each": "*.json"}, "for_each", "list"),
        ({"prompt": "{{item}}"}, "body.prompt", "for_each"),
        ({"prompt": "{{*.text}}"}, "body.prompt", "after"),
        ({"after": ["a"], "prompt": "{{*.json.x}}"}, "body.prompt", "joins"),
        ({"body": {"model": "{{a.text}}", "prompt": ""}}, "body.model", "only in"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        flow_row(0, 1, "r", {"body": {"prompt": fields.pop("prompt", "x")}, **fields})
    assert str(caught.value.param).startswith(param) and words in caught.value.message


@pytest.mark.parametrize("name", ["*", "item"])
def test_names_with_a_meaning_are_no_rows(name: str) -> None:
    with pytest.raises(RequestError, match="custom_id"):
        flow_row(0, 1, name, {"body": {}})


def test_rows_that_are_no_flow_together_are_named() -> None:
    assert problems_of(a={}, b={"after": ["a", "c"]}) == [("unknown_parent", 2)]
    assert problems_of(a={}, b={"prompt": "{{z.text}}"}) == [("unknown_parent", 2)]
    assert problems_of(a={"after": ["a"]}) == [("cycle", 1)]
    assert problems_of(a={}, b={"for_each": "a.json"}, **{"b[7]": {}}) == [("duplicate_custom_id", 3)]
    assert problems_of(a={}, b={"for_each": "a.json"}, c={"for_each": "b.json"}) == [("unknown_parent", 3)]
    assert problems_of(a={}, b={"after": ["a"]}, c={"after": ["a", "b"]}) == []


def test_a_cycle_is_named_from_row_to_row() -> None:
    rows = {
        "a": {"after": ["b"]},
        "b": {"after": ["root", "c"]},
        "c": {"after": ["a"]},
        "root": {},
        "d": {"after": ["a"]},
    }
    ((wrong, line),) = graph_of(**rows).problems()
    assert line in (1, 2, 3)
    assert any(names in wrong.message for names in ("a → b → c → a", "b → c → a → b", "c → a → b → c"))


def test_the_edges_and_jobs_of_a_flow_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.producer.flows.graph.MAX_EDGES", 2)
    monkeypatch.setattr("penstock.producer.flows.graph.MAX_JOBS", 0)
    assert problems_of(a={"after": [{"job": JOB}]}) == [("too_many_jobs", None)]
    with pytest.raises(RequestError) as caught:
        graph_of(a={}, b={"after": ["a"]}, c={"after": ["a", "b"]})
    assert caught.value.code == "too_many_edges"
