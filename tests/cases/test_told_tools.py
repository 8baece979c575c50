"""A model whose template takes no tools calls functions in the form that the node tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.served_model import served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Rome?"
FUNCTION = {"name": "weather", "description": "Look the weather up.", "parameters": SCHEMA}
CHAT = {
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_tokens": 200,
}
RESPONSE = {"input": QUESTION, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 200}
MESSAGE = {
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [{"name": "weather", "description": "Look the weather up.", "input_schema": SCHEMA}],
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def door(tiny: Path) -> Iterator[httpx.Client]:
    with served(tiny, dtype="bfloat16") as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(door: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = door.get("/v1/models").json()["data"][0]
    return found


def events(door: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with door.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def check(arguments: Any) -> None:
    assert arguments["city"] in ("Rome", "Oslo") and arguments["days"] <= 9 and len(arguments) == 2


def test_the_format_is_shown(model: dict[str, Any]) -> None:
    assert model["tool_format"] == "json"
    assert model["tool_format_reason"] == "the template takes no tools"


def test_a_chat_calls_and_continues_after_the_result(door: httpx.Client, model: dict[str, Any]) -> None:
    body = CHAT | {"model": model["id"], "tool_choice": "required", "seed": 1}
    answered = door.post("/v1/chat/completions", json=body)
    assert answered.status_code == 200, answered.text
    message = answered.json()["choices"][0]["message"]
    call = message["tool_calls"][0]
    check(json.loads(call["function"]["arguments"]))
    deltas = [
        one["choices"][0]["delta"].get("tool_calls", [{}])[0].get("function", {}).get("arguments", "")
        for one in events(door, "/v1/chat/completions", body | {"parallel_tool_calls": False})
        if one["choices"]
    ]
    check(json.loads("".join(deltas)))
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
    more = [*CHAT["messages"], message, result]  # type: ignore[misc]
    again = door.post("/v1/chat/completions", json=CHAT | {"model": model["id"], "messages": more})
    assert again.status_code == 200, again.text


def test_a_response_calls(door: httpx.Client, model: dict[str, Any]) -> None:
    body = RESPONSE | {"model": model["id"], "tool_choice": {"type": "function", "name": "weather"}}
    (item,) = door.post("/v1/responses", json=body).json()["output"]
    check(json.loads(item["arguments"]))
    done = [one for one in events(door, "/v1/responses", body) if one["type"] == "response.completed"]
    check(json.loads(done[0]["response"]["output"][0]["arguments"]))


def test_a_message_calls(door: httpx.Client, model: dict[str, Any]) -> None:
    body = MESSAGE | {"model": model["id"], "tool_choice": {"type": "tool", "name": "weather"}}
    answered = door.post("/v1/messages", json=body).json()
    check(answered["content"][0]["input"])
    parts = [one["delta"] for one in events(door, "/v1/messages", body) if one["type"] == "content_block_delta"]
    check(json.loads("".join(part["partial_json"] for part in parts)))


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)]
)
def test_a_free_choice_is_answered(door: httpx.Client, model: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    assert door.post(path, json=body | {"model": model["id"]}).status_code == 200
    assert events(door, path, body | {"model": model["id"]})
