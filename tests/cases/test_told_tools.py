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


# Public reports about Ollama, LM Studio and other servers.


def chatted(door: httpx.Client, model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the choice of an answer."""
    answered = door.post("/v1/chat/completions", json=CHAT | {"model": model["id"], "seed": 1} | changes)
    assert answered.status_code == 200, answered.text
    choice: dict[str, Any] = answered.json()["choices"][0]
    return choice


def refused(door: httpx.Client, model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    answered = door.post("/v1/chat/completions", json=CHAT | {"model": model["id"]} | changes)
    assert answered.status_code == 400, answered.text
    error: dict[str, Any] = answered.json()["error"]
    return error


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_choice_is_never_an_empty_answer(door: httpx.Client, model: dict[str, Any], choice: Any) -> None:
    """lmstudio-bug-tracker#1904, #2115: an empty answer, or a call as text; #670: the object form was refused."""
    found = chatted(door, model, tool_choice=choice, parallel_tool_calls=False)
    message, is_named = found["message"], isinstance(choice, dict)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert not message["content"] and found["finish_reason"] == ("stop" if is_named else "tool_calls")


def test_an_answer_without_calls_has_no_empty_list_of_them(door: httpx.Client, model: dict[str, Any]) -> None:
    """lmstudio-bug-tracker#1318."""
    assert "tool_calls" not in chatted(door, model, tool_choice="none", max_tokens=8)["message"]


def test_a_call_has_an_id_and_a_client_may_send_back_an_empty_one(door: httpx.Client, model: dict[str, Any]) -> None:
    """lmstudio-bug-tracker#830: a call with the id "", which the server then refused."""
    message = chatted(door, model, tool_choice="required", parallel_tool_calls=False)["message"]
    assert message["tool_calls"][0]["id"]
    message["tool_calls"][0]["id"] = ""
    result = {"role": "tool", "tool_call_id": "", "content": "Sunny."}
    assert chatted(door, model, messages=[*CHAT["messages"], message, result], max_tokens=8)  # type: ignore[misc]


def test_a_function_without_parameters_is_called_with_an_empty_object(
    door: httpx.Client, model: dict[str, Any]
) -> None:
    """hermes-agent#87900: the arguments of such a call were left out."""
    for function in ({"name": "now"}, {"name": "now", "description": None, "parameters": None, "strict": None}):
        tools = [{"type": "function", "function": function}]
        found = chatted(door, model, tools=tools, tool_choice="required", parallel_tool_calls=False)
        assert isinstance(json.loads(found["message"]["tool_calls"][0]["function"]["arguments"]), dict)


def test_a_call_beside_text_is_taken_in_the_history(door: httpx.Client, model: dict[str, Any]) -> None:
    """ollama#8337, vllm#21544: text and a call in one message, and braces without an end in its arguments."""
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "{Rome"}'}}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Sunny."}]}
    assert chatted(door, model, messages=[*CHAT["messages"], message, result], max_tokens=8)  # type: ignore[misc]


def test_what_no_server_can_do_is_refused_by_name(door: httpx.Client, model: dict[str, Any]) -> None:
    """dspy#10397: a choice without tools. ollama-ai-provider#11: a result that is an object and no text."""
    error = refused(door, model, tools=None, tool_choice="required")
    assert error["param"] == "tool_choice", error
    absent = {"type": "function", "function": {"name": "absent"}}
    assert refused(door, model, tool_choice=absent)["param"].startswith("tool_choice")
    result = {"role": "tool", "tool_call_id": "c1", "content": {"sky": "blue"}}
    error = refused(door, model, messages=[*CHAT["messages"], result])  # type: ignore[misc]
    assert "content" in error["message"], error


def test_a_stream_with_tools_has_calls_in_its_deltas(door: httpx.Client, model: dict[str, Any]) -> None:
    """ollama-python#279: streams had the call as text. vllm#17614: pieces without an index or with a second name."""
    body = CHAT | {"model": model["id"], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    deltas = [one["choices"][0]["delta"] for one in events(door, "/v1/chat/completions", body) if one["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    assert not any(delta.get("content") for delta in deltas)
    assert {piece["index"] for piece in pieces} == {0}
    assert [piece["function"]["name"] for piece in pieces if piece["function"].get("name")] == ["weather"]
    check(json.loads("".join(piece["function"].get("arguments", "") for piece in pieces)))
