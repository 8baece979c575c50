"""`tool_choice: allowed_tools` means the same in each API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.model

FUNCTIONS = [
    {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    for name in ("weather", "time", "news")
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def chat(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    body: dict[str, Any] = {"model": "agent", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    return client.post("/v1/chat/completions", json=body)


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
    answer = chat(tooled, ask, tools=TOOLS, tool_choice=allowed("required", name, is_flat=is_flat), max_tokens=80)
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {name}


def test_allowed_tools_mean_the_same_in_jobs(tooled: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
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
