"""FIELDS.md describes what the endpoints do with every field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.gateway.openai.field_table import BEGIN, END, HONORED, REFUSED, UNKNOWN, WITHOUT_EFFECT, effects, tables
from tests.source_tree import ROOT

EFFECTS = effects()
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
PROMPTS = {"/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}
MODEL = "acme/echo"
HINTS: dict[str, Any] = {
    "max_tool_calls": 1,
    "metadata": {"a": "b"},
    "client_metadata": {"a": "b"},
    "prompt_cache_retention": "24h",
    "store": True,
    "verbosity": "low",
}
"""Values of fields without an effect; the others take a text."""
NOT_NEUTRAL = {"x": 1}


def refusal_of(http: httpx.Client, path: str, name: str, value: object) -> dict[str, Any]:
    prompt = PROMPTS.get(path, {"messages": [{"role": "user", "content": "hi"}]})
    response = http.post(path, json={"model": MODEL, **prompt, name: value})
    assert response.status_code in (200, 400), response.text
    return response.json().get("error") or {}


def test_the_page_has_the_tables_of_the_code() -> None:
    page = (ROOT / "FIELDS.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == tables().strip(), "run `make fields`"


def test_every_kind_of_effect_occurs() -> None:
    kinds = {HONORED, REFUSED, UNKNOWN, WITHOUT_EFFECT}
    assert kinds < set(EFFECTS.values())
    assert len(EFFECTS) > 200


@pytest.mark.parametrize("path", PATHS)
def test_fields_do_what_the_page_says(http: httpx.Client, path: str) -> None:
    for (endpoint, name), effect in EFFECTS.items():
        if endpoint != path:
            continue
        if effect == UNKNOWN:
            assert refusal_of(http, path, name, None)["code"] == "unknown_field", name
        elif effect == WITHOUT_EFFECT:
            assert not refusal_of(http, path, name, HINTS.get(name, "text")), name
        elif effect != HONORED:
            refused = refusal_of(http, path, name, NOT_NEUTRAL)
            assert (refused["param"], refused["code"]) == (name, "unsupported_value"), name


def test_a_batch_file_restricts_what_a_row_cannot_have() -> None:
    rows = {name: effect for (endpoint, name), effect in EFFECTS.items() if endpoint == "batch: /v1/chat/completions"}
    assert (rows["stream"], rows["tools"], rows["stream_options"]) == ("only `false`", "only `[]`", REFUSED)
    assert rows["service_tier"] == 'only `"auto"` or `"default"` or `"flex"`'
    assert rows["priority"] == UNKNOWN
