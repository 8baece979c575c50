"""A request disables reasoning of a model whose chat template starts it. The node echoes the last message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import EchoEngine, Stack

MODEL = "acme/thinker"
TEXT = "So</think>The answer"


@pytest.fixture(scope="module")
def url(stack: Stack, shared_engine: EchoEngine) -> str:
    engine = type(shared_engine)()
    engine.tokenizer.reasoning_parser = "think_open"
    engine.tokenizer.thinking_switches = ("enable_thinking=false",)
    stack.start_node(engine, model=MODEL, pool="thinker", tool_parser="hermes")
    stack.start_node(
        type(shared_engine)(), model="acme/other", pool="other", tool_parser="hermes", reasoning_parser="think"
    )
    url: str = stack.start_gateway()
    return url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def said(http: httpx.Client, text: str, **fields: Any) -> tuple[str | None, str | None]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"]


@pytest.mark.parametrize(
    "off", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}], ids=str
)
def test_answer_without_reasoning_is_content(http: httpx.Client, off: dict[str, Any]) -> None:
    assert said(http, "The answer", **off) == (None, "The answer")
    assert said(http, "The answer", **off, response_format={"type": "text"}) == (None, "The answer")


@pytest.mark.parametrize("on", [{}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"}])
def test_answer_with_reasoning_begins_inside_it(http: httpx.Client, on: dict[str, Any]) -> None:
    assert said(http, TEXT, **on) == ("So", "The answer")


def test_parser_that_the_operator_chose_stays(http: httpx.Client) -> None:
    off = {"model": "acme/other", "reasoning_effort": "none"}
    assert said(http, "<think>So</think>The answer", **off) == ("So", "The answer")


def test_stream_without_reasoning_is_content(http: httpx.Client) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    lines = http.post("/v1/chat/completions", json={**chat, "reasoning_effort": "none"}).text.split("\n\n")
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines if "delta" in line]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello"
    assert not any("reasoning_content" in delta for delta in deltas)


def test_messages_and_responses_follow_it_too(http: httpx.Client) -> None:
    chat = [{"role": "user", "content": "The answer"}]
    body = {"model": MODEL, "input": "The answer", "reasoning": {"effort": "none"}, "store": False}
    output = http.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in output] == ["message"]
    body = {"model": MODEL, "messages": chat, "max_tokens": 50, "thinking": {"type": "disabled"}}
    content = http.post("/v1/messages", json=body).json()["content"]
    assert [(block["type"], block["text"]) for block in content] == [("text", "The answer")]
