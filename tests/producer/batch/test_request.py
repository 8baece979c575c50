"""The fields of a line in a batch file have the same meaning as over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Choice, Outcome, Result, Usage
from penstock.gateway.apis.openai.schemas import ChatRequest, CompletionRequest
from penstock.producer.batch.endpoints import CHAT_URL, COMPLETIONS_URL, ENDPOINTS, AnsweredRow
from penstock.producer.batch.lines import MAX_LINE_BYTES, check_file
from penstock.producer.batch.request import request_of, request_of_line
from penstock.producer.openai.render import ChatRenderer, CompletionRenderer

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": 3, "n": 2, "seed": 7},
        {"stop": "end"},
        {"stop": ["a", "b"], "stop_token_ids": [1, 2], "ignore_eos": True, "min_tokens": 1, "max_tokens": 2},
        {"repetition_penalty": 1.1, "max_tokens": None},
        {"user": "me", "metadata": {"a": "1"}, "stream": False, "stream_options": None, "stop": None},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0, "logit_bias": {}},
        {"frequency_penalty": -2, "presence_penalty": 0.5, "min_p": 0.1},
        {"frequency_penalty": None, "presence_penalty": None, "min_p": None},
    ],
)
def test_a_body_means_the_same_in_a_file_and_over_http(options: dict[str, Any]) -> None:
    chat = {"model": "m", "messages": MESSAGES, **options}
    text = {"model": "m", "prompt": "hello", **options}

    assert request_of(CHAT_URL, chat).params == ChatRequest.model_validate_json(json.dumps(chat)).params()
    assert request_of(CHAT_URL, chat).prompts == ChatRequest.model_validate_json(json.dumps(chat)).prompts()
    assert request_of(COMPLETIONS_URL, text).params == CompletionRequest.model_validate_json(json.dumps(text)).params()
    assert (
        request_of(COMPLETIONS_URL, text).prompts == CompletionRequest.model_validate_json(json.dumps(text)).prompts()
    )


def test_text_parts_are_joined_as_over_http() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert request_of(CHAT_URL, {"messages": [{"role": "user", "content": parts}]}).prompts == [MESSAGES]


def test_max_completion_tokens_is_max_tokens() -> None:
    assert request_of(CHAT_URL, {"messages": MESSAGES, "max_completion_tokens": 9}).params.max_tokens == 9
    with pytest.raises(RequestError, match="conflicts with max_tokens") as caught:
        request_of(CHAT_URL, {"messages": MESSAGES, "max_completion_tokens": 9, "max_tokens": 8})
    assert caught.value.param == "max_completion_tokens"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_looks_the_same_in_a_file_and_over_http(reason: Any) -> None:
    choices = (Choice(0, "one", (1,), reason), Choice(1, "two", (2, 3), reason))
    result = Result("ref.id", Outcome("succeeded"), choices, Usage(3, 4, 1), submitted_ms=1_700_000_000_123)
    head = {"job_id": "ref.id", "model": "m", "created_s": 1_700_000_000, "include_usage": False}
    chat = request_of(CHAT_URL, {"messages": MESSAGES, "n": 2})
    text = request_of(COMPLETIONS_URL, {"prompt": "hello", "n": 2})

    for dialect, asked in ((ChatRenderer, chat), (CompletionRenderer, text)):
        renderer: Any = dialect(**head, params=asked.params)  # type: ignore[arg-type]
        answer_of = ENDPOINTS[asked.options["url"]].answer_of
        assert answer_of(AnsweredRow(asked, "m", [result], None)) == renderer.whole([result])


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT_URL, {"messages": MESSAGES, "stream": True}, "stream"),
        (CHAT_URL, {"messages": MESSAGES, "prompt": "x"}, "prompt"),
        (CHAT_URL, {"messages": []}, "messages"),
        (CHAT_URL, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT_URL, {"messages": "hello"}, "messages"),
        (CHAT_URL, {"messages": [1, 2]}, "messages[0]"),
        (CHAT_URL, {"messages": MESSAGES, "priority": "batch"}, "priority"),
        (CHAT_URL, {"messages": MESSAGES, "frequency_penalty": 2.5}, "frequency_penalty"),
        (CHAT_URL, {"messages": MESSAGES, "presence_penalty": "0.5"}, "presence_penalty"),
        (COMPLETIONS_URL, {"prompt": "x", "min_p": -0.1}, "min_p"),
        (CHAT_URL, {"messages": MESSAGES, "logit_bias": {"5": 101}}, "logit_bias.5"),
        (CHAT_URL, {"messages": MESSAGES, "temperature": float("nan")}, "temperature"),
        (CHAT_URL, {}, "messages"),
        (CHAT_URL, {"messages": MESSAGES, "model": 5}, "model"),
        (CHAT_URL, {"messages": MESSAGES, "max_tokens": "5"}, "max_tokens"),
        (CHAT_URL, {"messages": MESSAGES, "max_tokens": True}, "max_tokens"),
        (CHAT_URL, {"messages": MESSAGES, "temperature": -1}, "temperature"),
        (CHAT_URL, {"messages": MESSAGES, "n": 99}, "n"),
        (COMPLETIONS_URL, {"prompt": [1, True]}, "prompt"),
        (COMPLETIONS_URL, {"prompt": []}, "prompt"),
        (COMPLETIONS_URL, {"prompt": "x", "max_completion_tokens": 3}, "max_completion_tokens"),
        (COMPLETIONS_URL, {"prompt": "x", "best_of": 0}, "best_of"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_of(url, body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"url": "/v1/audio/speech", "body": {}}, "url"),
        ({"url": "/v1/embeddings", "body": {}}, "input"),
        ({"url": "/v1/responses", "body": {}}, "input"),
        ({"url": ["x"], "body": {}}, "url"),
        ({"body": {}}, "url"),
        ({"url": CHAT_URL, "body": []}, "body"),
        ({"url": CHAT_URL, "body": {"messages": MESSAGES}, "method": "GET"}, "method"),
        ({"url": CHAT_URL, "body": {"messages": MESSAGES}, "priority": 1}, "priority"),
    ],
)
def test_a_line_of_another_form_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_of_line({"custom_id": "a", **fields})
    assert caught.value.param == param


def test_sampling_params_are_all_there() -> None:
    """A new sampling parameter is open to batches at once."""
    defaults = SamplingParams(max_tokens=1).model_dump(mode="json")
    given = {name: value for name, value in defaults.items() if value is not None}
    assert request_of(CHAT_URL, {"messages": MESSAGES, **given}).params == SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"custom_id": "a"}\n{"custom_id": "b"}\n{"custom_id": "a"}\n', r"line 3.*'a' is already used in line 1"),
        ('{"custom_id": "a"}\n\n{"custom_id": "b"\n', r"line 3: not JSON"),
        ('{"custom_id": "a"}\n{"custom_id": ""}\n', r"line 2: custom_id"),
        ('{"custom_id": 7}\n', r"line 1: custom_id"),
        ('{"custom_id": "\\ud800"}\n', r"line 1: custom_id: must be valid Unicode"),
        ('{"custom_id": "a", "body": {"temperature": NaN}}\n', r"line 1: not JSON"),
        ("[" * 100_000 + "\n", r"line 1: not JSON"),
        ("[1]\n", r"line 1: must be a JSON object"),
        ("\n \n", r"no request"),
    ],
)
def test_a_file_with_a_line_that_cannot_be_answered_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match=problem):
        check_file(path)


def test_an_endless_line_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.truncate(MAX_LINE_BYTES * 4)
    with pytest.raises(RequestError, match="longer than"):
        check_file(path)


def test_blank_lines_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('\n{"custom_id": "a"}\r\n\n{"custom_id": "b"}')
    assert check_file(path).num_rows == 2
