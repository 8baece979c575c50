"""Errors under `/v1/messages`: Anthropic's shape, types, status codes and headers, from every part of the gateway."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    JobCancelledError,
    JobExpiredError,
    JobFailedError,
    PenstockError,
    UnavailableError,
)
from penstock.gateway.apis.anthropic.encoder import AnthropicErrors
from penstock.gateway.errors import ErrorShapes
from penstock.gateway.http.middleware.drain import Drain
from penstock.gateway.metrics import GatewayMetrics

MODEL = "acme/echo"
USER = {"role": "user", "content": "hi"}


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8, "messages": [USER], **more}


def refusal(answer: httpx.Response, status: int, kind: str) -> str:
    """Assert the shape of an error. Return its message."""
    assert answer.status_code == status, answer.text
    given = answer.json()
    assert given.keys() == {"type", "error", "request_id"}
    assert (given["type"], given["error"]["type"]) == ("error", kind)
    assert given["request_id"] == answer.headers["request-id"]
    assert given["error"].keys() == {"type", "message"}
    return str(given["error"]["message"])


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}, USER]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: "),
        ({"stop_sequences": [""]}, "stop_sequences[0]: "),
        ({"temperature": -1}, "temperature: "),
        ({"n": 2}, "n: unknown field"),
        ({"compaction": {}}, "compaction: unknown field"),
        ({"container": "c"}, "container: not supported"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported"),
        ({"speed": "fast"}, "speed: not supported"),
        ({"inference_geo": "eu"}, "inference_geo: not supported"),
        ({"context_management": {"edits": [{"keep": 1}]}}, "context_management.edits[0].type: "),
        ({"context_management": {"edits": [{"type": "x"}] * 65}}, "context_management.edits: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        (blocks(IMAGE), 'messages[0].content[0].type: blocks of type "image" are not supported'),
        (blocks({"type": "text", "text": "a"}, DOCUMENT), 'messages[0].content[1].type: blocks of type "document"'),
        (blocks({"type": "text"}), "messages[0].content[0]: text is required in a block of type text"),
        (blocks(CALL), "messages[0]: a message with role user must not have blocks of type tool_use"),
        (
            blocks({"type": "tool_result", "tool_use_id": "c", "content": [{"type": 1}]}),
            "messages[0].content[0].content: blocks of type no name are not supported",
        ),
        ({"system": [IMAGE]}, 'system: blocks of type "image" are not supported'),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 'tools[0]: tools of type "bash_20250124" are not'),
        ({"tools": [{"name": "f"}]}, "tools[0]: input_schema is required in a custom tool"),
        ({"tools": [{"type": "custom", "input_schema": {}}]}, "tools[0]: name is required in a custom tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice: name is required with type tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: the request has no tools"),
        ({"tools": [TOOL]}, "tools: "),
        ({"thinking": {"type": "on"}}, "thinking.type: "),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_field_is_refused_by_name(http: httpx.Client, given: dict[str, Any], expected: str) -> None:
    message = refusal(http.post("/v1/messages", json=body(**given)), 400, "invalid_request_error")
    assert message.startswith(expected), message


def test_refused_thread_has_the_code_that_makes_the_client_send_the_whole_conversation(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json=body(thread={"type": "create"}))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_unknown_members_inside_a_field_are_ignored(http: httpx.Client) -> None:
    text = {"type": "text", "text": "hi", "new": {"deep": [1]}}
    tool_choice = {"type": "auto", "new": 1}
    given = body(messages=[{"role": "user", "content": [text], "new": 1}], tool_choice=tool_choice, metadata={"new": 1})
    clearing = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert http.post("/v1/messages", json={**given, "context_management": clearing}).status_code == 200


def test_unknown_model_is_not_found(http: httpx.Client) -> None:
    assert "nobody" in refusal(http.post("/v1/messages", json=body(model="nobody")), 404, "not_found_error")


def test_other_paths_and_methods_are_refused_in_the_same_shape(http: httpx.Client) -> None:
    refusal(http.post("/v1/messages/none", json={}), 404, "not_found_error")
    refusal(http.get("/v1/messages"), 405, "invalid_request_error")


def test_errors_of_other_paths_keep_openais_shape(http: httpx.Client) -> None:
    answer = http.post("/v1/messagesx")
    assert answer.json()["error"]["code"] == "not_found"
    assert "request-id" not in answer.headers


def test_body_that_is_too_large_is_refused_in_the_same_shape(stack: Any, engine: Any) -> None:
    url = stack.start_gateway(max_body_bytes=2000)
    answer = httpx.post(f"{url}/v1/messages", json=body(system="x" * 2000), timeout=60)
    refusal(answer, 413, "request_too_large")


def test_body_that_is_not_json_is_refused_in_the_same_shape(http: httpx.Client) -> None:
    refusal(
        http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}),
        400,
        "invalid_request_error",
    )
    refusal(http.post("/v1/messages", content=b"{}"), 400, "invalid_request_error")


def test_large_body_is_refused_in_the_same_shape(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}] * 300
    message = refusal(http.post("/v1/messages", json=body(messages=messages)), 400, "invalid_request_error")
    assert message.startswith("messages[0].content[1].type")


def test_prompt_that_is_too_long_is_refused_with_the_words_that_agents_look_for(http: httpx.Client) -> None:
    given = body(messages=[{"role": "user", "content": "x" * 300}])
    message = refusal(http.post("/v1/messages", json=given), 400, "invalid_request_error")
    assert message.startswith("prompt is too long: ")


def test_headers_of_the_protocol_are_accepted_in_any_version(http: httpx.Client) -> None:
    headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "whatever", "x-api-key": "any"}
    answer = http.post("/v1/messages?beta=true", json=body(), headers=headers)
    assert answer.status_code == 200
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BusyError("full", retry_after_ms=1500), 529, "overloaded_error"),
        (BusyError("full", retry_after_ms=1500, code="redis_full"), 529, "overloaded_error"),
        (BusyError("yours", retry_after_ms=1500, code="rate_limit_exceeded"), 429, "rate_limit_error"),
        (BusyError("yours", retry_after_ms=1500, code="memory_share_exceeded"), 429, "rate_limit_error"),
        (UnavailableError("no node", retry_after_ms=1500), 503, "api_error"),
        (JobExpiredError("late"), 504, "timeout_error"),
        (JobCancelledError("gone"), 499, "api_error"),
        (JobFailedError("bad", code="node_lost"), 500, "api_error"),
        (ConflictError("used"), 409, "invalid_request_error"),
        (PenstockError("bug"), 500, "api_error"),
    ],
)
def test_errors_have_anthropics_types_and_statuses(error: PenstockError, status: int, kind: str) -> None:
    answer = AnthropicErrors().response(error, "id")
    assert answer.status_code == status
    assert f'"type":"{kind}"'.encode() in answer.body
    assert ("retry-after" in answer.headers) == isinstance(error, BusyError | UnavailableError)
    fails_again = isinstance(error, ConflictError) or error.code == "node_lost"
    assert (answer.headers.get("x-should-retry") == "false") == fails_again


@pytest.mark.parametrize(("path", "is_anthropic"), [("/v1/messages", True), ("/v1/completions", False)])
@pytest.mark.parametrize("is_begun", [False, True])
async def test_answer_that_a_shutdown_cuts_off_ends_in_the_shape_of_its_path(
    path: str, is_anthropic: bool, is_begun: bool
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def cut_off(scope: Any, receive: Any, send: Any) -> None:
        if is_begun:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise asyncio.CancelledError

    receive: Any = None
    drain = Drain(cut_off, errors=ErrorShapes([AnthropicErrors()]), metrics=GatewayMetrics())
    await drain({"type": "http", "path": path, "headers": [], "state": {"request_id": "r1"}}, receive, send)
    said = sent[-1]["body"].decode()
    assert ('"type":"api_error"' in said) == is_anthropic
    assert said.startswith("event: error\n") == (is_anthropic and is_begun)
    assert ('"request_id":"r1"' in said) == (is_anthropic and not is_begun)


def test_stream_that_fails_after_it_has_begun_ends_with_an_error_event(
    stack: Any, engine: Any, http: httpx.Client
) -> None:
    engine.step_s = 0.2
    with http.stream(
        "POST", "/v1/messages", json=body(messages=[{"role": "user", "content": "abcdef"}], stream=True)
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        job_id = answer.headers["x-penstock-job"]

        async def cancel() -> None:
            async with stack.client() as client:
                await client.cancel(job_id)

        threading.Thread(target=stack.call, args=(cancel(),)).start()
        rest = list(lines)
    assert rest[-3] == "event: error"
    assert '"type":"api_error"' in rest[-2]
    assert "event: message_stop" not in rest
