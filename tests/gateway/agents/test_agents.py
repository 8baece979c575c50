"""What coding agents send, and the answers that they can use. The model says what a script tells it.

The folders have requests of Claude Code 2.1.331, OpenCode 1.18.33 and Cline 3.0.65, as `make clients` records them.
Each text is replaced by the name of its member and its length (`tests/clients/recording.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.scripted_model import ScriptedEngine, call_text, script_of

HERE = Path(__file__).parent
MODEL = "acme/scripted"
SAID = "Look: é.\n"
CLAUDE_CODE = {
    "resumed": "Read",
    "compacted": "Bash",
    "known_model": "mcp__rivers__length_of",
    "agent": "Edit",
    "structured_output": "StructuredOutput",
}
"""Names of recorded requests, and a tool of each."""
CHATS = {
    "opencode/resumed": "edit",
    "opencode/agent": "bash",
    "cline/session": "editor",
    "cline/mcp_server": "rivers__length_of",
    "cline/agent": "run_commands",
}
ARGUMENTS = {"river": "Nile", "lines": ['"a"', "é\n"], "all": True}


@pytest.fixture(scope="module")
def scripted(stack: Any) -> ScriptedEngine:
    engine = ScriptedEngine()
    stack.start_node(engine, model=MODEL, pool="scripted", tool_parser="hermes")
    return engine


def recorded(name: str) -> dict[str, Any]:
    request: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return request


def replayed(url: str, name: str, *answers: str, **more: Any) -> httpx.Response:
    """Send a recorded request with a last message that makes the model give these answers."""
    request = recorded(name)
    body = request["body"] | {"model": MODEL} | more
    body["messages"] = [*body["messages"], {"role": "user", "content": script_of(*answers)}]
    answer = httpx.post(url + request["path"], headers=request["headers"], content=json.dumps(body), timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def messages_of(engine: ScriptedEngine) -> list[dict[str, Any]]:
    assert engine.tokenizer.last_chat is not None
    return list(engine.tokenizer.last_chat[0])


def offered(engine: ScriptedEngine) -> list[dict[str, Any]]:
    assert engine.tokenizer.last_chat is not None
    return [tool["function"] for tool in json.loads(engine.tokenizer.last_chat[1] or "[]")]


def calls_in(messages: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [(call["id"], call["name"], json.loads(call["arguments"])) for call in calls]


def results_in(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["tool_call_id"], message["content"]) for message in messages if message["role"] == "tool"]


# Claude Code ------------------------------------------------------------------------------------


def content_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content of a streamed message. Assert that its events come in order."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "parts": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            blocks[-1]["parts"] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
    ends = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert ends == [*range(len(blocks))]
    return blocks


EFFORT_OF_A_MESSAGE = "messages.output_config.effort"
"""What newer versions set beside a system message in the middle of a conversation; it has no effect."""


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_claude_code_gets_text_and_a_call_of_its_tool(scripted: ScriptedEngine, url: str, name: str) -> None:
    tool = CLAUDE_CODE[name]
    answer = replayed(url, f"claude_code/{name}", SAID + call_text(tool, **ARGUMENTS))
    events = events_of(answer)
    text, call = content_of(events)
    assert (text["type"], text["parts"]) == ("text", SAID)
    assert (call["type"], call["name"], json.loads(call["parts"])) == ("tool_use", tool, ARGUMENTS)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    ignored = answer.headers.get("x-penstock-ignored-fields", EFFORT_OF_A_MESSAGE)
    assert ignored == EFFORT_OF_A_MESSAGE
    whole = replayed(url, f"claude_code/{name}", SAID + call_text(tool, **ARGUMENTS), stream=False).json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert (whole["content"][1]["input"], whole["stop_reason"]) == (ARGUMENTS, "tool_use")


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_the_model_sees_the_session_of_claude_code(scripted: ScriptedEngine, url: str, name: str) -> None:
    replayed(url, f"claude_code/{name}", "Yes.")
    body = recorded(f"claude_code/{name}")["body"]
    messages = messages_of(scripted)
    assert [message["role"] for message in messages][:2] == ["system", "user"]
    assert messages[0]["content"] == "\n".join(block["text"] for block in body["system"][1:])
    sent = [
        block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]
    ]
    uses = [block for block in sent if block["type"] == "tool_use"]
    assert calls_in(messages) == [(use["id"], use["name"], use["input"]) for use in uses]
    assert [call_id for call_id, _ in results_in(messages)] == [use["id"] for use in uses]
    assert all(result for _, result in results_in(messages))
    assert not any(message["role"] == "system" for message in messages[1:])


def test_deferred_tools_of_claude_code_are_offered_once_they_are_found(scripted: ScriptedEngine, url: str) -> None:
    replayed(url, "claude_code/known_model", "Yes.")
    tools = recorded("claude_code/known_model")["body"]["tools"]
    assert [tool["name"] for tool in tools if tool.get("defer_loading")] == [
        *("CronCreate", "SendMessage", "TaskStop", "WebSearch", "DeferredToolPlaceholder", "mcp__rivers__length_of")
    ]
    expected = [tool for tool in tools if tool["name"] != "DeferredToolPlaceholder"]
    assert [(tool["name"], tool["parameters"]) for tool in offered(scripted)] == [
        (tool["name"], tool["input_schema"]) for tool in expected
    ]
    results = dict(results_in(messages_of(scripted)))
    assert "mcp__rivers__length_of" in results["call_1"]
    assert results["call_3"] == "[image left out: this model reads only text]"


def test_a_search_of_the_web_is_answered_without_it(scripted: ScriptedEngine, url: str) -> None:
    answer = replayed(url, "claude_code/web_search", "I cannot search.")
    assert [block["parts"] for block in content_of(events_of(answer))] == ["I cannot search."]
    assert answer.headers["x-penstock-ignored-fields"] == "tools.web_search_20250305"
    assert offered(scripted) == []


# OpenCode and Cline -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_gets_text_and_two_calls_of_its_tools(scripted: ScriptedEngine, url: str, name: str) -> None:
    tool = CHATS[name]
    said = SAID + call_text(tool, **ARGUMENTS) + call_text(tool)
    answer = replayed(url, name, said)
    *events, last = events_of(answer)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len(said.encode()))
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == SAID
    calls: dict[int, dict[str, str]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        call = calls.setdefault(part["index"], {"id": part.get("id"), "name": part["function"].get("name"), "text": ""})
        call["text"] += part["function"].get("arguments") or ""
    assert [(call["name"], json.loads(call["text"])) for call in calls.values()] == [(tool, ARGUMENTS), (tool, {})]
    assert len({call["id"] for call in calls.values()}) == 2
    assert "x-penstock-ignored-fields" not in answer.headers


@pytest.mark.parametrize("name", CHATS)
def test_the_model_sees_the_chat_with_its_calls_and_results(scripted: ScriptedEngine, url: str, name: str) -> None:
    replayed(url, name, "Yes.")
    body = recorded(name)["body"]
    messages = messages_of(scripted)
    assert [message["role"] for message in messages] == [*(message["role"] for message in body["messages"]), "user"]
    calls = [call for message in body["messages"] for call in message.get("tool_calls", ())]
    assert calls_in(messages) == [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]
    assert results_in(messages) == [
        (message["tool_call_id"], message["content"]) for message in body["messages"] if message["role"] == "tool"
    ]
    assert [(tool["name"], tool["parameters"]) for tool in offered(scripted)] == [
        (tool["function"]["name"], tool["function"]["parameters"]) for tool in body["tools"]
    ]


def test_opencode_gets_a_title(scripted: ScriptedEngine, url: str) -> None:
    events = events_of(replayed(url, "opencode/title", "Rivers"))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1]) == "Rivers"
    assert [message["role"] for message in messages_of(scripted)] == ["system", "user", "user", "user"]
