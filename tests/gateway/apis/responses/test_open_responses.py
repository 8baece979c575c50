"""The compliance checks of Open Responses (openresponses.org), each request with the members that its schema requires.

The node answers with a text, or with a call if the request has tools.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

MODEL = "acme/weather"
TEXT = "Hello there, captain."
CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}</tool_call>'
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}
REQUIRED_OF_ITEM = {
    "message": {"type", "id", "status", "role", "content"},
    "reasoning": {"type", "id", "summary"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status"},
}
REQUIRED_OF_EVENT = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.completed": {"response"},
    "response.output_item.added": {"output_index", "item"},
    "response.output_item.done": {"output_index", "item"},
    "response.content_part.added": {"item_id", "output_index", "content_index", "part"},
    "response.content_part.done": {"item_id", "output_index", "content_index", "part"},
    "response.output_text.delta": {"item_id", "output_index", "content_index", "delta", "logprobs"},
    "response.output_text.done": {"item_id", "output_index", "content_index", "text", "logprobs"},
    "response.reasoning_text.delta": {"item_id", "output_index", "content_index", "delta"},
    "response.reasoning_text.done": {"item_id", "output_index", "content_index", "text"},
    "response.function_call_arguments.delta": {"item_id", "output_index", "delta"},
    "response.function_call_arguments.done": {"item_id", "output_index", "arguments"},
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state"}},
        "required": ["location"],
    },
}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


ASKED = [message("user", "What's the weather like in San Francisco?")]
HISTORY = [message("user", "I am Alice."), message("assistant", "Hello Alice!"), message("user", "What is my name?")]
IMAGE = [
    {"type": "input_text", "text": "What is this?"},
    {"type": "input_image", "image_url": "data:image/png;base64,"},
]


@pytest.fixture(scope="module")
def weather(stack: Any, shared_engine: Any) -> str:
    engine = type(shared_engine)()
    engine.tokenizer.encode_chat = lambda messages, tools=None, _kwargs=None, **_: list(
        (CALL if tools else TEXT).encode()
    )
    stack.start_node(engine, model=MODEL, pool="weather", tool_parser="hermes", reasoning_parser="think")
    return str(stack.start_gateway())


def check(response: dict[str, Any]) -> None:
    assert response.keys() >= REQUIRED
    assert response["status"] == "completed"
    assert response["output"]
    for item in response["output"]:
        assert REQUIRED_OF_ITEM[item["type"]] <= item.keys()
    for tool in response["tools"]:
        assert {"type", "name", "description", "parameters", "strict"} <= tool.keys()
    usage = response["usage"]
    assert usage.keys() >= {"input_tokens", "output_tokens", "total_tokens"}
    assert set(usage["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}
    assert "reasoning_tokens" in usage["output_tokens_details"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"input": [message("user", "Say hello in exactly 3 words.")]}, "message"),
        ({"input": [message("system", "You are a pirate."), message("user", "Say hello.")]}, "message"),
        ({"input": ASKED, "tools": [WEATHER]}, "function_call"),
        ({"input": HISTORY}, "message"),
    ],
    ids=["basic", "system-prompt", "tool-calling", "multi-turn"],
)
def test_a_response_has_what_the_schema_requires(weather: str, options: dict[str, Any], kind: str) -> None:
    answer = httpx.post(f"{weather}/v1/responses", json={"model": MODEL, "stream": False, **options}, timeout=60)
    assert answer.status_code == 200
    check(answer.json())
    assert kind in [item["type"] for item in answer.json()["output"]]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"input": [message("user", "Count from 1 to 5.")]}, "message"),
        ({"input": ASKED, "tools": [WEATHER]}, "function_call"),
    ],
    ids=["streaming", "tool-calling-streaming"],
)
def test_a_stream_has_what_the_schema_requires(weather: str, options: dict[str, Any], kind: str) -> None:
    answer = httpx.post(f"{weather}/v1/responses", json={"model": MODEL, "stream": True, **options}, timeout=60)
    *blocks, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert REQUIRED_OF_EVENT[event["type"]] | {"sequence_number"} <= event.keys()
        events.append(event)
    check(events[-1]["response"])
    for at in ("added", "done"):
        assert kind in [event["item"]["type"] for event in events if event["type"] == f"response.output_item.{at}"]
    if kind == "function_call":
        seen = {event["type"] for event in events}
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= seen


def test_an_image_is_refused_by_name(weather: str) -> None:
    answer = httpx.post(f"{weather}/v1/responses", json={"model": MODEL, "input": [message("user", IMAGE)]}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input", "unsupported_value")
    assert "input_image" in error["message"]
