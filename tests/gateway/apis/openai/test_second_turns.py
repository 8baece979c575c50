"""Second requests of agent frameworks, recorded for each version: they are accepted without loss.

`second_turns.json` has each body as the framework sent it to a server that had answered the first request, often with a
call. Only the long system texts are shortened. `given` is what the model must get of the messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import EchoEngine, Stack

MODEL = "acme/agent"
RECORDED = json.loads((Path(__file__).parent / "second_turns.json").read_text())


@pytest.fixture(scope="module")
def agent_engine(stack: Stack, shared_engine: EchoEngine) -> EchoEngine:
    engine = type(shared_engine)()
    stack.start_node(engine, model=MODEL, pool="agent", tool_parser="hermes", reasoning_parser="think")
    return engine


@pytest.fixture(scope="module")
def agent_url(stack: Stack, agent_engine: EchoEngine) -> str:
    return str(stack.start_gateway())


def last_chat(engine: EchoEngine) -> tuple[Any, str | None]:
    """Return the messages and tools that the model got last."""
    messages, tools = engine.tokenizer.last_chat or (None, None)
    return messages, tools


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value))


def test_requests_of_all_frameworks_are_recorded() -> None:
    clients = {turn["client"].split()[0] for turn in RECORDED}
    assert clients == {"openai", "litellm", "langchain", "pydantic-ai", "openai-agents", "autogen", "instructor"}


@pytest.mark.parametrize("turn", RECORDED, ids=[turn["client"] for turn in RECORDED])
def test_model_receives_the_whole_conversation(agent_url: str, agent_engine: EchoEngine, turn: dict[str, Any]) -> None:
    answer = httpx.post(f"{agent_url}/v1/chat/completions", json=turn["body"] | {"model": MODEL}, timeout=60)
    assert answer.status_code == 200, answer.text
    messages, tools = last_chat(agent_engine)
    given = as_json(messages)
    thoughts = [one.pop("reasoning", None) for one in given if one["role"] == "assistant"]
    asked = [one for one in turn["body"]["messages"] if one["role"] == "assistant"]
    assert given == turn["given"]
    assert thoughts == [one.get("reasoning_content") or one.get("reasoning") for one in asked]
    assert [tool["function"]["name"] for tool in json.loads(tools or "[]")] == [
        tool["function"]["name"] for tool in turn["body"].get("tools", ())
    ]


CALL = {"id": "c1", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, {"content": ""}),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": None, "cache_control": {}}]}, {"content": ""}),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "extra": 1}}]}, {"content": ""}),
    ],
)
def test_a_call_without_arguments_is_one_with_no_members(
    agent_url: str, agent_engine: EchoEngine, message: dict[str, Any], given: Any
) -> None:
    messages = [message, {"role": "user", "content": "x"}]
    answer = httpx.post(f"{agent_url}/v1/chat/completions", json={"model": MODEL, "messages": messages}, timeout=60)
    assert answer.status_code == 200, answer.text
    call = {"id": "c1", "name": "f", "arguments": "{}"}
    assert as_json(last_chat(agent_engine)[0][0]) == {"role": "assistant", "tool_calls": [call], **given}


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
        ({"role": "user", "content": "x", "name": ""}, {"role": "user", "content": "x"}),
        (
            {"role": "user", "content": "x", "name": "ann", "reasoning": 5},
            {"role": "user", "content": "x", "name": "ann"},
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "input_text", "text": "b"}],
            },
            {"role": "user", "content": "ab"},
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "refusal", "refusal": "no"}],
            },
            {"role": "assistant", "content": "no"},
        ),
    ],
)
def test_unknown_names_inside_a_message_are_ignored(
    agent_url: str, agent_engine: EchoEngine, message: dict[str, Any], given: Any
) -> None:
    messages = [message, {"role": "user", "content": "x"}]
    answer = httpx.post(f"{agent_url}/v1/chat/completions", json={"model": MODEL, "messages": messages}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert last_chat(agent_engine)[0][0] == given


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": [1]}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "n" * 257}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
    ],
)
def test_content_that_the_model_cannot_be_given_is_refused(agent_url: str, message: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{agent_url}/v1/chat/completions", json={"model": MODEL, "messages": [message]}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_of_a_tools_result_that_is_no_text_becomes_marked_text(
    agent_url: str, agent_engine: EchoEngine, kind: str
) -> None:
    result = [{"type": "text", "text": "a "}, {"type": kind, kind: {"url": "data:image/png;base64,aGk="}}]
    messages = [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
        {"role": "user", "content": "x"},
    ]
    shown = {"image_url": "image", "input_audio": "audio", "file": "file"}[kind]
    expected = f"a [{shown} left out: this model reads only text]"
    for path, body in (
        ("/v1/chat/completions", {"model": MODEL, "messages": messages}),
        ("/v1/jobs", {"model": MODEL, "messages": messages, "background": False}),
    ):
        agent_engine.tokenizer.last_chat = None
        answer = httpx.post(f"{agent_url}{path}", json=body, timeout=60)
        assert answer.status_code in (200, 202), answer.text
        if path == "/v1/jobs":
            httpx.get(f"{agent_url}{answer.json()['links']['stream']}", timeout=60)
        assert last_chat(agent_engine)[0][1]["content"] == expected


def test_unknown_names_of_tools_are_ignored(agent_url: str, agent_engine: EchoEngine) -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "returns": "x"}
    tools = [{"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    assert httpx.post(f"{agent_url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    del function["returns"]
    assert json.loads(last_chat(agent_engine)[1] or "[]") == [{"type": "function", "function": function}]
