"""Bodies and calls of other programs: official clients and curl, as public reports of other servers show them."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

pytestmark = pytest.mark.model

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
RESPONSE: dict[str, Any] = {"input": "hi", "max_output_tokens": 2}
MESSAGE: dict[str, Any] = {"messages": [USER], "max_tokens": 2}
PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "content in parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [text := {"type": "text", "text": "hi"}]}]},
    ),
    "every optional field null": (
        "/v1/chat/completions",
        CHAT
        | dict.fromkeys(
            ("stream", "stream_options", "tools", "tool_choice", "functions", "function_call", "n", "seed")
        ),
    ),
    "more fields null": (
        "/v1/chat/completions",
        CHAT
        | dict.fromkeys(
            ("stop", "logit_bias", "response_format", "user", "top_p", "temperature", "max_completion_tokens")
        ),
    ),
    "empty lists of tools": ("/v1/chat/completions", CHAT | {"tools": [], "functions": []}),
    "no tools and a choice": ("/v1/chat/completions", CHAT | {"tools": [], "tool_choice": "auto"}),
    "an answer of a model that thinks": (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": None}, USER]},
    ),
    "a developer's message": ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "short"}, USER]}),
    "a name of the user": ("/v1/chat/completions", {"messages": [{**USER, "name": "user"}]}),
    "an empty text": ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}),
    "both limits alike": ("/v1/chat/completions", CHAT | {"max_completion_tokens": 2}),
    "whole numbers as decimals": (
        "/v1/chat/completions",
        CHAT | {"max_tokens": 2.0, "n": 1.0, "seed": 3.0, "top_k": 5.0},
    ),
    "one stop as a text": ("/v1/chat/completions", CHAT | {"stop": "\n"}),
    "no stops": ("/v1/chat/completions", CHAT | {"stop": []}),
    "biases by text": ("/v1/chat/completions", CHAT | {"logit_bias": {"100": -100}}),
    "no biases": ("/v1/chat/completions", CHAT | {"logit_bias": {}}),
    "plain text as format": ("/v1/chat/completions", CHAT | {"response_format": {"type": "text"}}),
    "top_k off as in vLLM": ("/v1/chat/completions", CHAT | {"top_k": -1, "min_p": 0, "repetition_penalty": 1}),
    "zero temperature and a nucleus": ("/v1/chat/completions", CHAT | {"temperature": 0, "top_p": 1}),
    "metadata and a store": ("/v1/chat/completions", CHAT | {"store": False, "metadata": {"a": "b"}}),
    "usage is no stream's": ("/v1/chat/completions", CHAT | {"stream": False, "stream_options": None}),
    "token ids as prompts": ("/v1/completions", {"prompt": [[28, 216], [339]], "max_tokens": 2}),
    "an empty suffix": ("/v1/completions", COMPLETION | {"suffix": None, "best_of": 1, "logprobs": None}),
    "an empty list of includes": ("/v1/responses", RESPONSE | {"include": [], "tools": [], "truncation": "disabled"}),
    "items without a type": ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2}),
    "reasoning without effort": ("/v1/responses", RESPONSE | {"reasoning": {"effort": None, "summary": None}}),
    "blocks with marks of a cache": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [{**text, "cache_control": {"type": "ephemeral"}}]}],
            "max_tokens": 2,
        },
    ),
    "thinking that is off": (
        "/v1/messages",
        MESSAGE | {"thinking": {"type": "disabled"}, "metadata": {"user_id": None}},
    ),
    "a system prompt in blocks": ("/v1/messages", MESSAGE | {"system": [{**text, "cache_control": None}]}),
    "a path that ends in a slash": ("/v1/chat/completions/", CHAT),
    "a message's path that ends in a slash": ("/v1/messages/", MESSAGE),
}


@pytest.mark.parametrize(("path", "body"), TAKEN.values(), ids=TAKEN)
def test_a_body_of_another_program_is_taken(door: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = door.post(path, json={"max_tokens": 2} | body if "chat" in path else body)
    assert answer.status_code == 200, answer.text


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PIXEL]}]}, "messages[0].content"),
    "a sound": ("/v1/chat/completions", CHAT | {"modalities": ["audio"]}, "modalities"),
    "old functions": ("/v1/chat/completions", CHAT | {"functions": [{"name": "f"}]}, "functions"),
    "usage without a stream": (
        "/v1/chat/completions",
        CHAT | {"stream_options": {"include_usage": True}},
        "stream_options",
    ),
    "no messages": ("/v1/chat/completions", {"messages": []}, "messages"),
    "two limits": ("/v1/chat/completions", CHAT | {"max_completion_tokens": 3}, "max_completion_tokens"),
    "a required call without tools": (
        "/v1/chat/completions",
        CHAT | {"tools": [], "tool_choice": "required"},
        "tool_choice",
    ),
    "an unknown model": ("/v1/chat/completions", CHAT | {"model": "gpt-4o"}, "model"),
    "an empty model": ("/v1/chat/completions", CHAT | {"model": ""}, "model"),
}


@pytest.mark.parametrize(("path", "body", "param"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_by_name(door: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    for stream in (False, True) if "stream_options" not in body else (False,):
        refused = door.post(path, json=body | {"stream": stream})
        assert refused.status_code in (400, 404)
        assert refused.headers["content-type"] == "application/json"
        assert refused.json()["error"]["param"] == param, refused.text


@pytest.fixture(scope="module")
def openai(door: httpx.Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{door.base_url}/v1/", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(openai: OpenAI) -> str:
    return next(iter(openai.models.list())).id


class City(BaseModel):
    name: Literal["Bern", "Basel"]
    has_river: bool


def test_openai_parses_an_answer_into_a_model(openai: OpenAI, model: str) -> None:
    asked: Any = [{"role": "user", "content": "Name Bern and its river as JSON."}]
    parsed = openai.chat.completions.parse(
        model=model, messages=asked, response_format=City, temperature=0, max_completion_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_openai_streams_a_chat_with_its_usage(openai: OpenAI, model: str) -> None:
    messages: Any = [USER]
    chunks = [
        *openai.chat.completions.create(
            model=model, messages=messages, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant" and not chunks[-1].choices
    assert chunks[-1].usage is not None and 0 < chunks[-1].usage.completion_tokens <= 4


def test_openai_takes_a_raw_answer_and_a_header_of_its_own(openai: OpenAI, model: str) -> None:
    messages: Any = [USER]
    raw = openai.chat.completions.with_raw_response.create(
        model=model, messages=messages, max_tokens=1, extra_headers={"X-Own": "1"}, extra_body={"top_k": 1}
    )
    assert raw.headers["x-request-id"] and raw.parse().model == model


def test_openai_calls_a_tool_of_a_model_whose_template_takes_none(openai: OpenAI, model: str) -> None:
    messages: Any = [USER]
    answer = openai.chat.completions.create(
        model=model, messages=messages, tools=[pydantic_function_tool(City)], tool_choice="required", max_tokens=200
    )
    assert answer.choices[0].message.tool_calls


def test_anthropic_streams_and_counts(door: httpx.Client, model: str) -> None:
    messages: Any = [USER, {"role": "assistant", "content": "Well,"}]
    base = str(door.base_url).rstrip("/")
    with Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        with client.messages.stream(model=model, max_tokens=4, messages=messages) as stream:
            said = "".join(stream.text_stream)
            assert stream.get_final_message().content[0].type == "text" and said
        assert client.messages.count_tokens(model=model, messages=messages).input_tokens > 0
    with Anthropic(base_url=f"{base}/", api_key="none", max_retries=0) as client:
        assert client.messages.create(model=model, max_tokens=2, messages=messages).usage.output_tokens <= 2


def test_openai_reads_vectors_in_both_encodings(openai: OpenAI, door: httpx.Client, model: str) -> None:
    found = openai.embeddings.create(model=model, input=["a", "b"]).data
    packed = door.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"}).json()["data"][0][
        "embedding"
    ]
    floats = struct.unpack(f"<{len(found[0].embedding)}f", base64.b64decode(packed))
    assert floats == pytest.approx(found[0].embedding, abs=1e-6)


def curl(*words: str) -> str:
    return subprocess.run(("curl", "-s", *words), capture_output=True, text=True, check=True, timeout=60).stdout


def test_curl_needs_no_content_type_and_a_browser_does(door: httpx.Client) -> None:
    """A page of another site could send a body without one, and its browser would say where it comes from."""
    words = (f"{door.base_url}/v1/chat/completions", "-d", json.dumps(CHAT))
    assert '"assistant"' in curl(*words)
    assert "Content-Type must be application/json" in curl("-H", f"Origin: {door.base_url}", *words)
    assert '"assistant"' in curl("-H", "Content-Type: application/json; charset=utf-8", *words)
    assert '"assistant"' in curl("--json", json.dumps(CHAT), words[0])


def test_curl_waits_for_a_hundred(door: httpx.Client) -> None:
    body = json.dumps(CHAT | {"user": "x" * 2000})
    answer = curl(
        "-H",
        "Expect: 100-continue",
        "-H",
        "Content-Type: application/json",
        f"{door.base_url}/v1/chat/completions",
        "-d",
        body,
    )
    assert json.loads(answer)["object"] == "chat.completion"
