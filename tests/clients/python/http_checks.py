"""Plain HTTP as load tools with their own parsers and old clients send it. It needs only Python."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from typing import Any

from clients.python.checks import MODEL, QUESTION, TOO_LONG, URL, check, main, user

ADDRESS = urllib.parse.urlsplit(URL)
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": MODEL, "messages": user(QUESTION), "temperature": 0, "max_tokens": 8}
NUM_PROPERTIES = 500


def ask(body: dict[str, Any], *, method: str = "POST", path: str = CHAT, **headers: str) -> tuple[Any, bytes]:
    """Return the head and the body of an answer."""
    connection = http.client.HTTPConnection(ADDRESS.hostname or "", ADDRESS.port, timeout=60)
    connection.request(method, path, json.dumps(body), {"content-type": "application/json", **headers})
    answer = connection.getresponse()
    return answer, answer.read()


def answer_of(**changes: Any) -> Any:
    head, body = ask(ASKED | changes)
    assert head.status == 200, body
    return json.loads(body)


def error_of(**changes: Any) -> Any:
    head, body = ask(ASKED | changes)
    assert head.status == 400, body
    return json.loads(body)["error"]


def record_of(schema: dict[str, Any]) -> Any:
    answer = answer_of(
        max_tokens=8000, response_format={"type": "json_schema", "json_schema": {"name": "record", "schema": schema}}
    )
    return json.loads(answer["choices"][0]["message"]["content"])


@check
def each_event_of_a_stream_is_one_line() -> None:
    _, body = ask(ASKED | {"stream": True})
    events = body.decode().removesuffix("\n\n").split("\n\n")
    assert len(events) > 2
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events


@check
def events_have_ids_on_request() -> None:
    head, body = ask(ASKED | {"stream": True}, **{"X-Penstock-Event-Ids": "true"})
    assert body.startswith(f"id: {head.getheader('X-Penstock-Job')}".encode())


@check
def stream_ends_the_connection_of_http_1_0() -> None:
    with socket.create_connection((ADDRESS.hostname or "", ADDRESS.port or 80), timeout=60) as connection:
        body = json.dumps(ASKED | {"stream": True}).encode()
        head = (
            f"POST {CHAT} HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head_bytes, events = answer.split(b"\r\n\r\n", 1)
    assert b"chunked" not in head_bytes
    assert events.startswith(b"data: ")
    assert events.rstrip().endswith(b"[DONE]")


@check
def head_is_answered_like_get_without_a_body() -> None:
    head, body = ask({}, method="HEAD", path="/v1/models")
    assert (head.status, body) == (200, b"")


@check
def request_id_of_the_caller_comes_back() -> None:
    head, _ = ask(ASKED, **{"X-Request-Id": "mine-1"})
    assert head.getheader("X-Request-Id") == "mine-1"


@check
def large_header_is_refused() -> None:
    head, _ = ask(ASKED, **{"X-Large": "x" * 70_000})
    assert head.status == 431


@check
def whole_number_may_have_a_fraction_of_zero() -> None:
    assert answer_of(max_tokens=3.0)["usage"]["completion_tokens"] == 3


@check
def unknown_field_is_refused_with_the_nearest_known_one() -> None:
    assert "max_tokens" in error_of(max_token=3)["message"]


@check
def long_prompt_is_refused_in_the_words_that_clients_look_for() -> None:
    assert "maximum context length" in error_of(messages=user(TOO_LONG))["message"]


@check
def schema_of_pydantic_is_followed() -> None:
    colors = {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2, "uniqueItems": False}
    flags = {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "boolean"}, "maxProperties": 2}
    named = {"type": "object", **flags}
    described = {"enum": ["x"], "type": "string", "format": "color"}
    properties = {"colors": colors, "named": named, "described": described}
    closed = {"additionalProperties": False, "required": [*properties]}
    record = record_of({"type": "object", "properties": properties, **closed})
    assert set(record) == set(properties)


@check
def many_optional_properties_are_compiled() -> None:
    properties = {f"p{n}": {"type": "boolean"} for n in range(NUM_PROPERTIES)}
    record = record_of({"type": "object", "properties": properties, "additionalProperties": False})
    assert set(record) <= set(properties)


@check
def foreign_keyword_and_wrong_grammar_are_refused_with_a_reason() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    form = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema}}
    assert "x-guidance" in error_of(response_format=form)["message"]
    assert error_of(structured_outputs={"grammar": "start: missing"})["message"]


if __name__ == "__main__":
    main()
