"""Other servers' names for structured outputs: older ones of vLLM, and those of llama.cpp and SGLang."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import MODEL, EchoEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = 'start: "a"'
NAMES = {
    "guided_json": (SCHEMA, "json"),
    "guided_regex": ("a+", "regex"),
    "guided_choice": (["a", "b"], "choice"),
    "guided_grammar": (GRAMMAR, "grammar"),
    "json_schema": (SCHEMA, "json"),
    "regex": ("a+", "regex"),
    "grammar": (GRAMMAR, "grammar"),
    "ebnf": (GRAMMAR, "grammar"),
}
FORMS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
}


def ask(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    return http.post(f"/v1/{path}", json={"model": MODEL, **FORMS[path], **fields})


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_an_older_name_is_the_same_constraint(http: httpx.Client, engine: EchoEngine, path: str, name: str) -> None:
    value, member = NAMES[name]
    assert ask(http, path, structured_outputs={member: value}).status_code == 200
    expected = engine.last_params.structured_outputs
    given = [value, json.dumps(value)] if member == "json" else [value]
    for one in given:
        assert ask(http, path, **{name: one}).status_code == 200
        assert engine.last_params.structured_outputs == expected


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("other", "its_value"),
    [
        ("structured_outputs", {"regex": "a"}),
        ("response_format", {"type": "json_object"}),
        ("guided_regex", "b"),
        ("guided_grammar", GRAMMAR),
    ],
)
def test_two_constraints_are_refused_by_name(
    http: httpx.Client, path: str, name: str, other: str, its_value: Any
) -> None:
    if name == other:
        return
    error = ask(http, path, **{name: NAMES[name][0], other: its_value}).json()["error"]
    assert error["code"] == "unsupported_value"
    assert error["param"] in (name, other)
    assert "conflicts with" in error["message"] and {name, other} <= {
        *error["message"].replace(":", " ").replace(";", " ").split()
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("guided_regex", ""), ("guided_choice", []), ("guided_json", "[]"), ("guided_choice", [1]), ("guided_json", 5)],
)
def test_an_invalid_constraint_is_refused_by_the_callers_name(http: httpx.Client, name: str, value: Any) -> None:
    answer = ask(http, "completions", **{name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(name)
