"""Bodies that clients of other servers send, and our own output as the next turn's input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.served_model import TOOL_TEMPLATE, served
from fixtures.dequantized import dequantized

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
FUNCTIONS = [
    {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    for name in ("weather", "time", "news")
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CUT = [
    '{"city": "Be',
    '{"city": "Bern", "da',
    '{"city": "Bern"',
    '{"city": [1, 2',
    "{",
    '{"a": "\\ud83d',
    "",
    '{"a": tr',
]


@pytest.fixture(scope="module")
def tooled(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The demo model with a chat template that takes tools."""
    folder = tmp_path_factory.mktemp("models") / "agent"
    folder.mkdir()
    for path in dequantized(str(demo_file)).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    with served(folder) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def chat(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    body = {"model": "agent", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    return client.post("/v1/chat/completions", json=body)


def call_of(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


@pytest.mark.parametrize("arguments", CUT)
def test_arguments_that_max_tokens_cut_off_come_back_in_a_chat(tooled: httpx.Client, arguments: str) -> None:
    turns = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "tool_calls": [call_of(arguments)]}]
    answer = chat(tooled, [*turns, {"role": "tool", "tool_call_id": "c1", "content": "failed"}], tools=TOOLS)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("arguments", CUT)
def test_arguments_that_max_tokens_cut_off_come_back_in_a_response(tooled: httpx.Client, arguments: str) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments, "status": "incomplete"}
    items = [{"role": "user", "content": "Weather?"}, call]
    items.append({"type": "function_call_output", "call_id": "c1", "output": "failed"})
    answer = tooled.post("/v1/responses", json={"model": "agent", "input": items, "max_output_tokens": 8})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("arguments", ["hello", "[1]", "7", '{"a": 1} and more', '{"a": NaN}'])
def test_arguments_that_no_call_begins_with_are_refused(tooled: httpx.Client, arguments: str) -> None:
    answer = chat(tooled, [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call_of(arguments)]}])
    assert answer.status_code == 400 and "arguments" in answer.json()["error"]["param"]


def test_our_own_cut_calls_come_back(tooled: httpx.Client) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Bern?"}]
    cut = 0
    for limit in range(15, 24):
        answer = chat(tooled, messages, tools=TOOLS, tool_choice="required", max_tokens=limit).json()
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        cut += sum(not call["function"]["arguments"].endswith("}") for call in calls)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "cut off"} for call in calls]
        assert chat(tooled, [*messages, message, *results], tools=TOOLS, max_tokens=1).status_code == 200
    assert cut > 0


def allowed(mode: str, *names: str, is_flat: bool = False) -> dict[str, Any]:
    tools = [
        {"type": "function", "name": name} if is_flat else {"type": "function", "function": {"name": name}}
        for name in names
    ]
    inner = {"mode": mode, "tools": tools}
    return {"type": "allowed_tools"} | (inner if is_flat else {"allowed_tools": inner})


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("name", ["weather", "time", "news"])
def test_allowed_tools_are_the_only_ones_that_are_called(tooled: httpx.Client, name: str, is_flat: bool) -> None:
    ask = [{"role": "user", "content": "Weather in Bern?"}]
    answer = chat(tooled, ask, tools=TOOLS, tool_choice=allowed("required", name, is_flat=is_flat), max_tokens=40)
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {name}


def test_allowed_tools_mean_the_same_in_jobs(tooled: httpx.Client) -> None:
    body = {"model": "agent", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
    body |= {"tool_choice": allowed("required", "news"), "params": {"max_tokens": 24}}
    assert tooled.post("/v1/jobs", json=body).status_code == 202


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (allowed("auto", "weather", "nowhere"), "no function 'nowhere'"),
        (allowed("maybe", "weather"), "mode must be auto or required"),
        (allowed("auto"), "must be a list of 1 to"),
        ({"type": "allowed_tools"}, "mode must be auto or required"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}},
            "each of allowed_tools",
        ),
    ],
)
def test_wrong_allowed_tools_are_refused_by_name(tooled: httpx.Client, choice: Any, said: str) -> None:
    error = chat(tooled, [{"role": "user", "content": "x"}], tools=TOOLS, tool_choice=choice).json()["error"]
    assert said in error["message"] and error["param"] == "tool_choice"
