"""Rows of embeddings and of responses have the answers of their endpoints."""

from __future__ import annotations

import base64
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncClient
from penstock.contract.errors import RequestError
from penstock.gateway.apis.responses.body import ResponseBody
from penstock.producer.batch.endpoints import (
    CHAT_URL,
    CLASSIFY_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    ENDPOINTS,
    RERANK_URL,
    RESPONSES_URL,
    SCORE_URL,
)
from penstock.producer.batch.records import Batch
from penstock.producer.batch.request import request_of
from penstock.producer.batch.runner import run_batch
from penstock.queue.files.batch import MESSAGES_ENDPOINT
from tests.producer.batch.conftest import Row, chat_row, rows_in, write_rows

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def row_of(custom_id: str, url: str, **body: Any) -> Row:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


async def test_all_kinds_of_rows_in_one_file(served_url: str, tmp_path: Path) -> None:
    rows = [
        row_of("one", EMBEDDINGS_URL, input="a text"),
        row_of("many", EMBEDDINGS_URL, input=["a text", [1, 2, 3], "another"], encoding_format="base64", dimensions=4),
        row_of("short", RESPONSES_URL, input="hello", max_output_tokens=5, store=False, metadata={"a": "b"}),
        row_of("wrong", EMBEDDINGS_URL, input="x", dimensions=0),
        chat_row("chat"),
    ]
    batch = Batch(str(write_rows(tmp_path / "in.jsonl", rows)), str(tmp_path / "out.jsonl"))
    done = await run_batch(served_url, batch)
    assert (done.num_answered, done.num_failed) == (4, 1)
    assert done.completion_tokens == 5 + 8
    answers = {row["custom_id"]: row["response"] and row["response"]["body"] for row in rows_in(tmp_path / "out.jsonl")}
    assert answers["wrong"] is None

    async with AsyncClient(served_url) as client:
        (wanted,) = await client.embed(["a text"])
    (vector,) = answers["one"]["data"]
    assert vector["embedding"] == pytest.approx(wanted.values, abs=1e-7)
    assert answers["one"]["usage"] == {"prompt_tokens": wanted.num_tokens, "total_tokens": wanted.num_tokens}
    assert [one["index"] for one in answers["many"]["data"]] == [0, 1, 2]
    assert len(array("f", base64.b64decode(answers["many"]["data"][0]["embedding"]))) == 4

    response = answers["short"]
    assert (response["object"], response["status"], response["store"]) == ("response", "incomplete", False)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert len(response["output"][0]["content"][0]["text"]) == 5
    assert response["usage"]["output_tokens"] == 5


@pytest.mark.parametrize(
    "options",
    [
        {"input": "hello"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}], "temperature": 0.5},
        {"input": "hello", "instructions": "be brief", "top_p": 0.5, "reasoning": {"effort": "low"}},
        {"input": "hello", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {"input": "hello", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 9},
    ],
)
def test_a_response_means_the_same_in_a_file_and_over_http(options: dict[str, Any]) -> None:
    body = {"model": "m", "store": False, **options}
    request, over_http = request_of(RESPONSES_URL, body), ResponseBody.model_validate_json(json.dumps(body))
    assert request.params == over_http.params()
    assert request.template_kwargs == over_http.template_kwargs
    echo = json.loads(over_http.options()["echo"])
    assert json.loads(request.options["echo"]) == echo | {"service_tier": "flex"}


TEXT_URLS = EMBEDDINGS_URL, RERANK_URL, SCORE_URL, CLASSIFY_URL
"""Endpoints whose answers have no text that a channel could carry."""


@pytest.mark.parametrize("url", ENDPOINTS)
def test_a_row_says_of_the_queue_what_its_body_over_http_says(url: str) -> None:
    """A new option of the queue is open to rows at once, unless it is declared otherwise."""
    said: dict[str, Any] = {"deadline_s": 9.5, "ttl_s": 8, "not_before_s": 1, "tags": ["a"], "metadata": {"b": "c"}}
    channel = {} if ENDPOINTS[url].texts_field else {"channel": "json"}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    prompt = {CHAT_URL: chat, MESSAGES_ENDPOINT: chat, COMPLETIONS_URL: {"prompt": "x"}}
    prompt |= {RERANK_URL: {"query": "x", "documents": ["y"]}, SCORE_URL: {"text_1": "x", "text_2": "y"}}
    body = {**prompt.get(url, {"input": "x"}), **said, **channel}
    assert request_of(url, body).submit_options().items() >= (said | channel).items()


def test_instructions_are_the_first_message() -> None:
    asked = request_of(RESPONSES_URL, {"input": "hello", "instructions": "be brief"})
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert asked.prompts == request_of(CHAT_URL, {"messages": messages}).prompts


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (RESPONSES_URL, {"input": "x", "store": True}, "store"),
        (RESPONSES_URL, {"input": "x", "stream": True}, "stream"),
        (RESPONSES_URL, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES_URL, {"input": "x", "temperature": -1}, "temperature"),
        (RESPONSES_URL, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES_URL, {"input": "x", "tools": [{"type": "function"}]}, "tools[0]"),
        (RESPONSES_URL, {"messages": []}, "messages"),
        (EMBEDDINGS_URL, {"input": []}, "input"),
        (EMBEDDINGS_URL, {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        (EMBEDDINGS_URL, {"input": "x", "ttl_s": -1}, "ttl_s"),
        (RESPONSES_URL, {"input": "x", "deadline_s": 0}, "deadline_s"),
        (RESPONSES_URL, {"input": "x", "not_before_s": -1}, "not_before_s"),
        (CHAT_URL, {"messages": [{"role": "user", "content": "x"}], "deadline_s": 40_000_000}, "deadline_s"),
        (CHAT_URL, {"messages": [{"role": "user", "content": "x"}], "tags": ["a", "two words"]}, "tags[1]"),
        (CHAT_URL, {"messages": [{"role": "user", "content": "x"}], "metadata": {"a": "b" * 513}}, "metadata.a"),
        (CHAT_URL, {"messages": [{"role": "user", "content": "x"}], "max_wait_s": 1}, "max_wait_s"),
    ],
)
def test_what_is_not_honored_is_refused_by_name(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_of(url, body)
    assert caught.value.param == param
