"""Conversations beyond a threshold or the context: `context_management` and `truncation`. The node echoes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.apis.responses.test_compaction import MAX_MODEL_LEN, SUMMARY, AuthorEngine, messages_of
from tests.gateway.conftest import Stack

MODEL = "acme/elder"
LONG = [
    {"role": "user", "content": f"Rivers {'a' * 600}"},
    {"role": "assistant", "content": "b" * 600},
    {"role": "user", "content": "How long?"},
]
SHORTEN = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}


@pytest.fixture(scope="module")
def engine(stack: Stack) -> AuthorEngine:
    engine = AuthorEngine()
    stack.start_node(engine, model=MODEL, pool="elder")
    return engine


@pytest.fixture
def http(url: str, engine: AuthorEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def response(http: httpx.Client, given: Any, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": given, "max_output_tokens": 20, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_summary_takes_the_place_of_answers_beyond_the_threshold(http: httpx.Client, engine: AuthorEngine) -> None:
    first = response(http, LONG, **SHORTEN, instructions="Be short.")
    assert [item["type"] for item in first["output"]] == ["compaction", "message"]
    system, user = messages_of(engine)
    assert (system["content"], user["role"]) == ("Be short.", "user")
    places = [user["content"].index(text) for text in ("Rivers", SUMMARY, "How long?")]
    assert places == sorted(places) and "b" * 600 not in user["content"]
    assert http.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
    # The client sends everything again, or names the response: the model gets the summary in both cases.
    response(http, [*LONG, *first["output"], {"role": "user", "content": "And?"}])
    again = messages_of(engine)
    assert [one["role"] for one in again] == ["user", "assistant", "user"] and "b" * 600 not in str(again)
    response(http, "And?", previous_response_id=first["id"])
    named = messages_of(engine)
    assert [one["role"] for one in named] == ["user", "assistant", "user"]
    assert named[0]["content"] == user["content"] and named[1:] == again[1:]


def test_stream_begins_with_the_summary(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": LONG, "max_output_tokens": 20, "stream": True, "store": False, **SHORTEN}
    lines = http.post("/v1/responses", json=body).text.split("\n\n")
    events = [json.loads(line.partition("data: ")[2]) for line in lines if line.startswith("event: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["compaction", "message"]
    assert events[-1]["response"]["output"] == done
    named = {event["type"] for event in events if event.get("output_index") == 0}
    assert named == {"response.output_item.added", "response.output_item.done"}


@pytest.mark.parametrize("given", [LONG[-1:], [{"role": "user", "content": "a" * 2000}]], ids=["short", "one turn"])
def test_conversation_without_anything_to_sum_up_stays(
    http: httpx.Client, engine: AuthorEngine, given: list[dict[str, Any]]
) -> None:
    output = response(http, given, **SHORTEN)["output"]
    assert [item["type"] for item in output] == ["message"]
    assert [one["content"] for one in messages_of(engine)] == [given[0]["content"]]


def test_oldest_turns_are_left_out_of_what_exceeds_the_context(http: httpx.Client, engine: AuthorEngine) -> None:
    turns = [{"role": role, "content": f"{n} " + "x" * 700} for n in range(10) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "Which?"})
    body = {"model": MODEL, "input": turns, "instructions": "Be short.", "max_output_tokens": 20}
    refused = http.post("/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = response(http, turns, instructions="Be short.", truncation="auto")
    assert answer["truncation"] == "auto" and answer["usage"]["input_tokens"] <= MAX_MODEL_LEN - 20
    system, *kept = messages_of(engine)
    assert system["content"] == "Be short." and kept[0]["role"] == "user" and kept[-1]["content"] == "Which?"
    assert [one["content"] for one in kept] == [one["content"] for one in turns[-len(kept) :]]
    assert answer["usage"]["input_tokens"] > MAX_MODEL_LEN // 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"context_management": [{"type": "compaction", "compact_threshold": 999}]}, "context_management"),
        ({"context_management": [{"type": "clearing"}]}, "context_management"),
        ({"context_management": [{"type": "compaction"}] * 2}, "context_management"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
def test_wrong_options_are_refused_by_name(http: httpx.Client, fields: dict[str, Any], said: str) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "x", **fields})
    assert answer.status_code == 400 and str(answer.json()["error"]["param"]).startswith(said)
