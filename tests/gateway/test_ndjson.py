"""Streams as NDJSON: one JSON object per line, for callers that accept it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.gateway.stream.writer import NDJSON, events_in, framing_of
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.gateway.socket_client import data_of, socket_to

ACCEPT = {"Accept": "application/x-ndjson"}
IDS = {**ACCEPT, "X-Penstock-Event-Ids": "true"}
DONE = {"done": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16},
    "/v1/responses": {"input": "hello"},
}


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The object of each line. An empty line is none."""
    assert answer.headers["content-type"] == NDJSON
    assert answer.content.endswith(b"\n")
    return [json.loads(line) for line in answer.text.removesuffix("\n").split("\n")]


@pytest.mark.parametrize("path", BODIES)
def test_lines_are_the_data_of_the_events_and_then_the_end(http: httpx.Client, path: str) -> None:
    body = {"model": MODEL, "stream": True, **BODIES[path]}
    *lines, last = lines_of(http.post(path, json=body, headers=ACCEPT))
    events = [json.loads(data) for _, data in events_in(http.post(path, json=body).content)]
    assert last == DONE
    for line, event in ((lines[0], events[0]), (lines[-1], events[-1])):
        assert (line.keys(), line.get("type")) == (event.keys(), event.get("type"))


def test_text_of_the_lines_is_whole(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "line\nbreaks\n\nand \u2028 more", "stream": True, "max_tokens": 100}
    *lines, _ = lines_of(http.post("/v1/completions", json=body, headers=ACCEPT))
    assert "".join(line["choices"][0]["text"] for line in lines) == body["prompt"]


FORMAT = {"type": "json_schema", "name": "f", "schema": {"description": "d" * (200 << 10)}}
LARGE = {"model": MODEL, "input": "hello", "text": {"format": FORMAT}, "store": False}
"""Its response is part of several events, each of which leaves the encoder in several parts."""


def check_large_events(events: list[dict[str, Any]]) -> None:
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    repeats = [event["response"] for event in events if "response" in event]
    assert [response["text"]["format"]["schema"] for response in repeats] == [FORMAT["schema"]] * 3
    assert repeats[-1]["output"][0]["content"][0]["text"] == "hello"


def test_line_of_an_event_that_leaves_the_encoder_in_parts_is_whole(http: httpx.Client) -> None:
    *lines, last = lines_of(http.post("/v1/responses", json={**LARGE, "stream": True}, headers=ACCEPT))
    check_large_events(lines)
    assert last == DONE


def test_message_of_an_event_that_leaves_the_encoder_in_parts_is_whole(url: str, engine: EchoEngine) -> None:
    with socket_to(url) as socket:
        socket.send("submit", "a", path="/v1/responses", body=LARGE)
        messages = socket.end_of("a")
    check_large_events(data_of(messages))
    assert messages[-1]["type"] == "end"


def test_event_ids_are_members_and_a_cut_stream_continues_after_one(http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.03
    body = {"model": MODEL, "prompt": "abcdefgh", "stream": True}
    *lines, _ = lines_of(http.post("/v1/completions", json=body, headers=IDS))
    assert len(lines) > 4
    for at, line in enumerate(lines):
        headers = {**ACCEPT, "Last-Event-ID": line["event_id"]}
        *rest, last = lines_of(http.post("/v1/completions", json=body, headers=headers))
        assert [one["event_id"] for one in rest] == [one["event_id"] for one in lines[at + 1 :]]
        assert last == DONE


def test_job_streams_as_lines(http: httpx.Client) -> None:
    job = http.post("/v1/jobs", json={"model": MODEL, "prompt": "hello"}).json()
    *lines, last = lines_of(http.get(job["links"]["stream"], headers=ACCEPT))
    assert "".join(line.get("text", "") for line in lines) == "hello"
    assert lines[-1]["outcome"]["state"] == "succeeded" and last == DONE
    assert [line["event_id"].split(":")[0] for line in lines] == [str(line["index"]) for line in lines]


def test_failed_stream_ends_with_its_error_and_without_the_end(
    stack: Stack, http: httpx.Client, engine: EchoEngine
) -> None:
    engine.step_s = 0.02
    body = {"model": MODEL, "prompt": "a" * 250, "stream": True, "max_tokens": 250}
    with http.stream("POST", "/v1/completions", json=body, headers=ACCEPT) as answer:
        lines = answer.iter_lines()
        next(lines)
        http.delete(f"/v1/jobs/{answer.headers['x-penstock-job']}")
        *_, last = [json.loads(line) for line in lines]
    assert last["error"]["code"] == "cancelled"


def test_refusal_before_the_stream_is_a_status(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a" * 300, "stream": True}
    answer = http.post("/v1/completions", json=body, headers=ACCEPT)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")


def test_whole_answer_stays_json(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"}, headers=ACCEPT)
    assert answer.headers["content-type"] == "application/json"


def test_silence_is_white_space_before_the_next_line(stack: Stack, shared_engine: EchoEngine) -> None:
    url = stack.start_gateway(first_chunk_wait_s=0.1, keep_alive_s=0.1)
    shared_engine.step_s = 0.5
    try:
        body = {"model": MODEL, "prompt": "abc", "stream": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=ACCEPT, timeout=60)
    finally:
        shared_engine.step_s = 0.0
    assert answer.text.startswith(" ")
    assert "".join(line["choices"][0]["text"] for line in lines_of(answer)[:-1]) == "abc"


@pytest.fixture
def accepts() -> Iterator[Any]:
    def media_type(accept: str | None) -> str:
        headers = [] if accept is None else [(b"accept", accept.encode())]
        return framing_of({"type": "http", "headers": headers}).media_type

    yield media_type


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        (None, "text/event-stream"),
        ("*/*", "text/event-stream"),
        ("application/json", "text/event-stream"),
        ("text/event-stream", "text/event-stream"),
        ("application/x-ndjson", NDJSON),
        ("Application/X-NDJSON; q=0.5, */*", NDJSON),
        ("text/event-stream, application/x-ndjson", NDJSON),
        ("text/event-stream, application/x-ndjson;q=0.9", "text/event-stream"),
        ("text/event-stream;q=0.2, application/x-ndjson;q=0.9", NDJSON),
        ("application/x-ndjson;q=0", "text/event-stream"),
        ("application/x-ndjson;q=nan", "text/event-stream"),
        ("a," * 40_000 + "application/x-ndjson", "text/event-stream"),
    ],
)
def test_accept_header_chooses_the_framing(accepts: Any, accept: str | None, media_type: str) -> None:
    assert accepts(accept) == media_type
