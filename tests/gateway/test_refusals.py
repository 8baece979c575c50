"""Invalid requests: refused with the right status, in OpenAI's shape, with the field's name."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from penstock.contract.errors import InvariantError
from penstock.contract.sampling import MAX_SCHEMA_CHARS
from penstock.gateway.apis.openai.schemas import ChatRequest, CompletionRequest
from penstock.producer.client import AsyncClient

MODEL = "acme/echo"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BROKEN_CALL = CALL | {"function": {"name": "f", "arguments": "[]"}}
HALF_A_CHARACTER = CALL | {"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def goes_on(http) -> Iterator[None]:
    yield
    assert http.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] == "hi"


def error_of(response) -> dict[str, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"bogus": 1}, "bogus"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"n": 17}, "n"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"bad_words": ["a"] * 65}, "bad_words"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark"),
        ({"structured_outputs": {"json": '{"a":' * 10_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"const": NaN}'}}, "structured_outputs.json"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
        ({"priority": "urgent"}, "priority"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [HALF_A_CHARACTER]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"model": ""}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_chat_field_is_named(http, change, param, stream):
    body = {**CHAT, **({"stream": True} if stream and "stream_options" not in change else {}), **change}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "stream"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2}, "beam_width"),
        ({"best_of": 16, "prompt": ["a"] * 17}, "best_of"),
        ({"use_beam_search": True, "beam_width": 16, "prompt": ["a"] * 17}, "use_beam_search"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "prompt_logprobs": 0}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_a_wrong_completion_field_is_named(http, change, param):
    response = http.post("/v1/completions", json={**TEXT, **change})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"a": "x" * MAX_SCHEMA_CHARS}}}


@pytest.mark.parametrize(
    ("change", "param", "other"),
    [
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens (3)"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "response_format", "min_tokens"),
        ({"response_format": SCHEMA}, "response_format.json_schema", str(MAX_SCHEMA_CHARS)),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_options_that_contradict_each_other_are_named_as_they_were_written(http, change, param, other, path):
    response = http.post(f"/v1/{path}", json={**(CHAT if "chat" in path else TEXT), **change})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ") and other in error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "top_p": None, "stop": None, "n": None},
        {"logprobs": False, "top_logprobs": None, "response_format": {"type": "text"}, "tools": [], "store": False},
        {"user": "u", "metadata": {"k": "v"}, "tool_choice": "auto", "parallel_tool_calls": True},
        dict.fromkeys(ChatRequest.model_fields.keys() - CHAT.keys()),
    ],
)
def test_neutral_values_of_chat_fields_are_accepted(http, change):
    assert http.post("/v1/chat/completions", json={**CHAT, **change}).status_code == 200


def test_neutral_values_of_completion_fields_are_accepted(http):
    nulls = dict.fromkeys(CompletionRequest.model_fields.keys() - TEXT.keys())
    assert http.post("/v1/completions", json=TEXT | nulls).status_code == 200
    neutral = {"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "stream_options": None}
    assert http.post("/v1/completions", json={**TEXT, **neutral}).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"model": "\xff"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        "{}".encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": [1' + b"0" * 5000 + b"]}",
    ],
)
def test_body_that_is_no_json_object_is_a_400(http, raw):
    response = http.post("/v1/completions", content=raw, headers=JSON)
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_schema_with_numbers_outside_json_is_refused(http, number):
    raw = json.dumps(TEXT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 0}}}})
    response = http.post("/v1/completions", content=raw.replace("0}", number + "}"), headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == "response_format.json_schema"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("header", ["origin", "sec-fetch-site"])
def test_a_browsers_body_must_be_declared_as_json(http, kind, header):
    headers = {header: {"origin": str(http.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}[header]}
    headers |= {"content-type": kind} if kind else {}
    response = http.post("/v1/completions", content=json.dumps(TEXT).encode(), headers=headers)
    assert response.status_code == 400
    assert error_of(response)["code"] == "unsupported_media_type"


def test_compressed_body_is_refused_as_compressed(http):
    packed = gzip.compress(json.dumps(TEXT).encode())
    response = http.post("/v1/completions", content=packed, headers=JSON | {"Content-Encoding": "gzip"})
    assert response.status_code == 400
    assert error_of(response)["code"] == "unsupported_media_type"
    assert "'gzip'" in error_of(response)["message"]


def chunks_of(num_bytes: int) -> Iterator[bytes]:
    for _ in range(num_bytes >> 16):
        yield b"x" * (1 << 16)


@pytest.mark.parametrize("declared", [False, True])
def test_50_mb_are_refused_unread(http, declared):
    content = b"x" * (50 << 20) if declared else chunks_of(50 << 20)
    response = http.post("/v1/chat/completions", content=content, headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_caller_that_reads_only_after_sending_everything_sees_the_413(url, http, chunked):
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname, address.port, timeout=60)
    body = chunks_of(50 << 20) if chunked else b"x" * (50 << 20)
    connection.request("POST", "/v1/completions", body, JSON, encode_chunked=chunked)
    assert connection.getresponse().status == 413
    connection.close()


def test_expect_100_continue_of_a_large_body_is_answered_with_413(url, http):
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 52428800\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_body_that_does_not_arrive_in_time_is_refused(stack, shared_engine, http):
    address = urlsplit(stack.start_gateway(body_timeout_s=0.2))
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        answer = b""
        while b"body_timeout" not in answer:
            part = connection.recv(4096)
            assert part, answer
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_limit_of_a_head_does_not_add_up_over_requests(http):
    for _ in range(10):
        assert http.get("/v1/models", headers={"x-long": "y" * 8_000}).status_code == 200


def test_unknown_paths_and_methods_have_openais_shape_too(http):
    missing = http.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = http.get("/v1/chat/completions")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_a_bad_idempotency_key_is_named(http):
    response = http.post("/v1/completions", json=TEXT, headers={"Idempotency-Key": "k" * 201})
    assert response.status_code == 400
    assert error_of(response)["param"] == "idempotency-key"


def test_refusals_do_not_repeat_what_was_sent(http):
    secret = "s3cret" * 100
    response = http.post("/v1/completions", json={**TEXT, "prompt": {"secret": secret}, "max_tokens": secret})
    assert "s3cret" not in response.text


def test_internal_errors_are_logged(http, monkeypatch, caplog) -> None:
    async def submit(*_: object, **__: object) -> None:
        raise InvariantError("submit answered nonsense")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncClient, "submit_noting", submit)
        answer = http.post("/v1/completions", json=TEXT)
    assert answer.status_code == 500
    assert error_of(answer)["type"] == "server_error"
    assert "submit answered nonsense" in caplog.text
    caplog.clear()
    http.post("/v1/completions", json=TEXT | {"max_tokens": -1})
    assert "a request failed" not in caplog.text
