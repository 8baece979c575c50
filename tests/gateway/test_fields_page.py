"""docs/FIELDS.md describes what the endpoints do with every field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from docs_site.fields import (
    ANTHROPIC,
    BEGIN,
    BODIES,
    END,
    HONORED,
    IGNORED,
    JOB,
    MESSAGE,
    PARAMS,
    REFUSED,
    STREAM_OPTIONS,
    TEI,
    TEXTS,
    TOKENS,
    UNKNOWN,
    WITHOUT_EFFECT,
    effects,
    tables,
    values,
)

from penstock.contract.errors import RequestError
from penstock.gateway.apis.anthropic.schemas import MessagesRequest
from penstock.gateway.apis.jobs.schemas import JobRequest
from penstock.gateway.apis.openai.schemas import ChatRequest, CompletionRequest
from penstock.gateway.apis.responses.body import ResponseBody
from penstock.gateway.apis.tasks.schemas import DetokenizeRequest, EmbeddingRequest
from penstock.gateway.request.generation import parse
from penstock.producer.batch.request import request_of
from tests.source_tree import ROOT

EFFECTS = effects()
MODEL = "acme/echo"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": CHAT,
    "/v1/jobs": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [72]},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/pooling": {"input": "hi"},
    "/embed": {"inputs": "hi"},
    "/similarity": {"inputs": {"source_sentence": "hi", "sentences": ["ho"]}},
    "/": {"inputs": "hi"},
}
ROW_PROMPTS = PROMPTS | {"/v1/classify": {"input": "hi"}}
"""Also of the endpoint that needs another model, for rows that are checked and not answered."""
HINTS: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "diagnostics": {"a": 1},
    "output_config": {"effort": "low"},
    "include_obfuscation": True,
    "max_tool_calls": 1,
    "client_metadata": {"a": "b"},
    "prompt_cache_retention": "24h",
    "store": True,
    "verbosity": "low",
}
"""Values of fields without an effect; the others take a text."""
NOT_NEUTRAL = {"x": 1}
WRONG: Any = ((1,),)
"""No field takes it."""
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
RESPONSE_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class Sent:
    """A value that a field accepts, one that it refuses, and what the body needs beside it."""

    accepted: Any
    refused: Any = WRONG
    beside: dict[str, Any] = field(default_factory=dict)


STREAM = {"stream": True}
NO_PROMPT = {"prompt": None}
"""Beside a chat or token ids in a body that may have a text instead."""
ANY_VALUE = ("reasoning", "reasoning_content")
"""Members of a message in which other libraries have objects. Only a text has an effect."""
NO_CALL = {"tool_choice": "none"}
"""The model of these tests has no format of calls."""
SENT: dict[str, Sent] = {
    "add_generation_prompt": Sent(accepted=True),
    "add_special_tokens": Sent(accepted=False),
    "background": Sent(accepted=True),
    "bad_words": Sent(["x"]),
    "beam_width": Sent(2, 17, {"use_beam_search": True}),
    "best_of": Sent(2, 0),
    "cache_salt": Sent("s", ""),
    "channel": Sent("json", "x"),
    "chat_template_kwargs": Sent({"a": 1}),
    "check_output": Sent({"regex": "(?s).*"}, {"regex": "("}),
    "concurrency_key": Sent("user:7", "a b", {"max_concurrency": 9}),
    "content": Sent("hi"),
    "continue_final_message": Sent(accepted=True),
    "continuous_usage_stats": Sent(accepted=True),
    "deadline_s": Sent(30, -1),
    "ttl_s": Sent(30, -1),
    "max_wait_s": Sent(30, -1),
    "reader_grace_s": Sent(30, 0.5),
    "dimensions": Sent(4, 0),
    "documents": Sent(["x", {"text": "y"}], []),
    "durability": Sent("memory", "x"),
    "token_durability": Sent("memory", "x"),
    "early_stopping": Sent("never", "x", {"use_beam_search": True}),
    "echo": Sent(accepted=True),
    "encoding_format": Sent("base64", "x"),
    "frequency_penalty": Sent(-2, 2.1),
    "guided_choice": Sent(["a"]),
    "guided_grammar": Sent('root ::= "a"'),
    "guided_json": Sent({"type": "object"}),
    "guided_regex": Sent("a"),
    "json_schema": Sent({"type": "object"}),
    "regex": Sent("a"),
    "grammar": Sent('root ::= "a"'),
    "ebnf": Sent('root ::= "a"'),
    "idempotency_key": Sent("k", ""),
    "ignore_eos": Sent(accepted=False),
    "include": Sent(["reasoning.encrypted_content"], ["x"]),
    "include_event_ids": Sent(accepted=True),
    "include_stop_str_in_output": Sent(accepted=True),
    "include_usage": Sent(accepted=True),
    "input": Sent(["hi"], []),
    "input_type": Sent("search_query", "x"),
    "inputs": Sent(["hi"], []),
    "instructions": Sent("be short"),
    "kind": Sent("embed", "x"),
    "length_penalty": Sent(2, 11, {"use_beam_search": True}),
    "logit_bias": Sent({"5": 100}, {"5": 101}),
    "max_attempts": Sent(1, 0),
    "max_completion_tokens": Sent(1, 0),
    "max_concurrency": Sent(1, 0, {"concurrency_key": "k1"}),
    "max_per_second": Sent(1000, 0, {"concurrency_key": "k2"}),
    "max_output_tokens": Sent(1, 0),
    "max_tokens": Sent(1, 0),
    "max_tokens_per_doc": Sent(1, 0),
    "max_tokens_per_query": Sent(1, 0),
    "messages": Sent(CHAT["messages"], []),
    "metadata": Sent({"a": "b"}, dict.fromkeys(map(str, range(17)), "b")),
    "min_p": Sent(1, 1.1),
    "min_tokens": Sent(1, -1),
    "model": Sent(MODEL, ""),
    "n": Sent(2, 17),
    "normalize": Sent(accepted=True),
    # The model of these tests has no prompts.
    "prompt_name": Sent(None, ""),
    "name": Sent("ann"),
    "not_before_s": Sent(0, -1),
    "output_config": Sent({"format": {"type": "json_schema", "schema": {}}}, {"effort": "x"}),
    "output_format": Sent({"type": "json_schema", "schema": {}}, {"type": "json_object"}),
    "parallel_tool_calls": Sent(accepted=False),
    "parameters": Sent({"truncate": True}, {"x": 1}),
    "params": Sent({"top_k": 5}, {"x": 1}),
    "pooling": Sent("last", "x"),
    "presence_penalty": Sent(2, -2.1),
    "priority": Sent("batch", "x"),
    "prompt": Sent(["hi"], []),
    "prompt_logprobs": Sent(1, 21),
    "query": Sent("x"),
    "queue_without_node": Sent(accepted=False),
    "raw_scores": Sent(accepted=True),
    "reasoning": Sent({"effort": "low"}, {"effort": "x"}),
    "reasoning_content": Sent("hm"),
    "reasoning_budget": Sent(5, 0),
    "reasoning_budget_tokens": Sent(5, 0),
    "reasoning_effort": Sent("max", "x"),
    "refusal": Sent("no"),
    "repetition_penalty": Sent(10, 0),
    "response_format": Sent({"type": "text"}, {"type": "x"}),
    "retry_backoff_s": Sent(0, -1),
    "retry_on": Sent(["model_error"], ["x"]),
    "return_documents": Sent(accepted=False),
    "return_progress": Sent(accepted=True, beside=STREAM),
    "return_text": Sent(accepted=True),
    "return_token_ids": Sent(accepted=True),
    "return_token_strs": Sent(accepted=True),
    "role": Sent("system", "x"),
    "seed": Sent(-(1 << 63), 1 << 63),
    "service_tier": Sent("flex", "x"),
    "stop": Sent(["x"], ["x"] * 17),
    "stop_sequences": Sent(["x"], ["x"] * 17),
    "stop_token_ids": Sent([5], [-1]),
    "stream": Sent(accepted=True),
    "structured_outputs": Sent({"choice": ["a"]}, {"x": 1}),
    "system": Sent("be short"),
    "temperature": Sent(10, 10.1),
    "text": Sent({"format": {"type": "text"}}, {"format": {"type": "x"}}),
    "text_1": Sent("x", []),
    "text_2": Sent(["x", "y"], []),
    "thinking": Sent({"type": "disabled"}, {"type": "x"}),
    "thinking_budget_tokens": Sent(5, 0),
    "thinking_token_budget": Sent(5, 0),
    "tokens": Sent([72], []),
    "tool_call_id": Sent("c1", beside={"role": "tool"}),
    "tool_choice": Sent("none", "x"),
    "top_k": Sent(-1, -2),
    "use_beam_search": Sent(accepted=True),
    "tags": Sent(["t"], ["a b"]),
    "top_n": Sent(1, -1),
    "top_p": Sent(0, 1.1),
    "truncate_prompt_tokens": Sent(5, 0),
    "truncate": Sent(accepted=True),
    "truncation": Sent("auto", "x"),
    "truncation_direction": Sent("Left", "x"),
    "truncation_side": Sent("right", "x"),
    "use_activation": Sent(accepted=True),
    "webhooks": Sent([], ["hook"]),
}
OF_PAIRS = "max_tokens_per_doc", "max_tokens_per_query"
"""Fields that are honored by a model that scores pairs. The model of these tests compares embeddings."""
OF_ENDPOINT: dict[tuple[str, str], Sent] = {
    ("/v1/jobs", "body"): Sent({"prompt": "hi"}, [], {**NO_PROMPT, "url": "/v1/completions"}),
    ("/v1/jobs", "custom_id"): Sent("row-1", ""),
    ("/v1/jobs", "method"): Sent("POST", "GET"),
    ("/v1/jobs", "url"): Sent("/v1/completions", "/v1/models", {**NO_PROMPT, "body": {"prompt": "hi"}}),
    ("/v1/jobs", "max_wait_s"): Sent(30, -1, {"background": False}),
    ("/v1/responses", "input"): Sent([{"role": "user", "content": "hi"}]),
    ("/v1/embeddings", "input"): Sent(["hi", [1, 2]], []),
    ("/v1/responses", "context_management"): Sent([{"type": "compaction"}], [{"type": "x"}]),
    ("/v1/responses", "reasoning"): Sent({"effort": "x"}),
    ("batch: /v1/responses", "reasoning"): Sent({"effort": "x"}),
    ("/v1/responses", "store"): Sent(accepted=False),
    ("/v1/responses", "stream_options"): Sent({"include_obfuscation": False}, beside=STREAM),
    ("/v1/responses", "tools"): Sent([RESPONSE_TOOL], beside=NO_CALL),
    ("/v1/responses", "top_logprobs"): Sent(20, 21),
    ("/v1/messages", "tool_choice"): Sent({"type": "none"}, {"type": "x"}),
    ("/v1/messages", "tools"): Sent([ANTHROPIC_TOOL], [{"name": "f"}], {"tool_choice": {"type": "none"}}),
    ("/v1/messages/count_tokens", "tool_choice"): Sent({"type": "none"}, {"type": "x"}),
    ("/v1/messages/count_tokens", "tools"): Sent([ANTHROPIC_TOOL], [{"name": "f"}]),
    ("/v1/jobs", "logprobs"): Sent(20, 21),
    ("/v1/jobs", "messages"): Sent(CHAT["messages"], [], NO_PROMPT),
    ("/v1/jobs", "prompt"): Sent("ho"),
    ("/v1/jobs", "return_progress"): Sent(accepted=True),
    ("/v1/jobs", "tokens"): Sent([72], [], NO_PROMPT),
    ("/v1/jobs", "tools"): Sent([CHAT_TOOL], beside={**NO_PROMPT, **CHAT, **NO_CALL}),
    ("/tokenize", "messages"): Sent(CHAT["messages"], [], NO_PROMPT),
    ("/tokenize", "prompt"): Sent("ho"),
    ("/tokenize", "inputs"): Sent(["ho"], [], NO_PROMPT),
    ("/v1/rerank", "texts"): Sent(["ho"], [], {"documents": None}),
    ("/similarity", "inputs"): Sent({"source_sentence": "hi", "sentences": ["ho"]}, []),
    ("/", "texts"): Sent(["ho"], [], {"inputs": None, "query": "hi"}),
    ("/", "query"): Sent("hi", beside={"inputs": None, "texts": ["ho"]}),
    ("/tokenize", "tools"): Sent([CHAT_TOOL], beside={**NO_PROMPT, **CHAT}),
    ("/v1/chat/completions", "logprobs"): Sent(accepted=True),
    ("/v1/chat/completions", "top_logprobs"): Sent(20, 21, {"logprobs": True}),
    ("/v1/chat/completions", "tools"): Sent([CHAT_TOOL], beside=NO_CALL),
    ("/v1/completions", "logprobs"): Sent(20, 21),
    ("/v1/chat/completions", "stream_options"): Sent({"include_usage": True}, beside=STREAM),
    ("/v1/completions", "stream_options"): Sent({"include_usage": True}, beside=STREAM),
}


def kept_response(http: httpx.Client) -> Sent:
    made = http.post("/v1/responses", json={"model": MODEL, **PROMPTS["/v1/responses"]}).json()
    return Sent(made["id"], "r" * 257)


def sent_to(endpoint: str, name: str, effect: str) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the values that a field of this effect accepts, those that it refuses, and what the body needs beside."""
    if effect == UNKNOWN:
        return [], [None, 1, "text"], {}
    if effect == IGNORED:
        return [None, 1, "text"], [], {}
    if effect == WITHOUT_EFFECT:
        return [None, HINTS.get(name, "text")], [WRONG], {}
    if effect == REFUSED:
        return [None], [NOT_NEUTRAL, "text"], {}
    path = endpoint.removeprefix("batch: ")
    if effect.startswith("only"):
        accepted = [json.loads(value.strip("`")) for value in effect.removeprefix("only ").split(" or ")]
        return [None, *accepted], [NOT_NEUTRAL, "text"], {}
    sent = OF_ENDPOINT.get((path, name)) or SENT[name]
    return [sent.accepted], [sent.refused], sent.beside


def answer_to(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    return http.post(path, json={"model": MODEL, **PROMPTS[path], **fields})


def assert_refused(answer: httpx.Response, name: str, effect: str, context: object) -> None:
    assert answer.status_code == 400, (context, answer.text)
    error = answer.json()["error"]
    # Errors of Anthropic's shape have no member for the field; their message begins with it.
    param = error["message"].partition(":")[0] if answer.json().get("type") == "error" else error["param"]
    assert param.split(".")[0].split("[")[0] == name, (context, error)
    if answer.json().get("type") == "error":
        return
    if effect == UNKNOWN:
        assert error["code"] == "unknown_field", (context, error)
    if effect == REFUSED:
        assert error["code"] == "unsupported_value", (context, error)


@pytest.mark.parametrize("title", [BODIES, ANTHROPIC, JOB, TOKENS, TEXTS, TEI])
def test_every_field_of_every_endpoint_accepts_and_refuses_what_the_page_says(http: httpx.Client, title: str) -> None:
    OF_ENDPOINT["/v1/responses", "previous_response_id"] = kept_response(http)
    for (path, name), effect in effects(title).items():
        if path not in PROMPTS:
            continue
        accepted, refused, beside = sent_to(path, name, effect)
        for value in accepted:
            answer = answer_to(http, path, **{**beside, name: value})
            if name in OF_PAIRS and value is not None:
                assert_refused(answer, name, effect, (path, name, value))
                assert "only a model that scores pairs takes this" in answer.text
                continue
            assert answer.status_code in (200, 202), (path, name, answer.text)
            assert "error" not in answer.text.split('"')[:3], (path, name, answer.text)
        for value in refused:
            assert_refused(answer_to(http, path, **{**beside, name: value}), name, effect, (path, name, value))


def test_every_sampling_option_of_a_job_accepts_and_refuses_what_the_page_says(http: httpx.Client) -> None:
    for (path, name), effect in effects(PARAMS).items():
        [accepted], [refused], beside = sent_to(path, name, effect)
        answer = answer_to(http, path, params={**beside, name: accepted})
        assert answer.status_code == 202, (name, answer.text)
        answer = answer_to(http, path, params={**beside, name: refused})
        assert answer.status_code == 400, (name, answer.text)
        assert re.match(rf"params\.{name}(?!\w)", answer.json()["error"]["param"]), (name, answer.text)


def test_every_field_of_a_batch_row_accepts_and_refuses_what_the_page_says() -> None:
    for (endpoint, name), effect in (EFFECTS | effects(TEXTS)).items():
        url = endpoint.removeprefix("batch: ")
        if url == endpoint:
            continue
        accepted, refused, beside = sent_to(endpoint, name, effect)
        for value in accepted:
            request_of(url, {"model": MODEL, **ROW_PROMPTS[url], **beside, name: value})
        for value in refused:
            with pytest.raises(RequestError) as caught:
                request_of(url, {"model": MODEL, **ROW_PROMPTS[url], **beside, name: value})
            assert (caught.value.param or "").split(".")[0].split("[")[0] == name, (endpoint, name, caught.value)


def parts_of_bodies() -> Iterator[tuple[str, str, str, str]]:
    for (column, name), effect in effects(STREAM_OPTIONS).items():
        yield "stream_options", column if column.startswith("/") else "/v1/chat/completions", name, effect
    for (_, name), effect in effects(MESSAGE).items():
        yield "messages", "/v1/chat/completions", name, effect


def test_every_field_of_a_message_and_of_stream_options_accepts_and_refuses_what_the_page_says(
    http: httpx.Client,
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = Sent([call], beside={"role": "assistant"})
    OF_ENDPOINT["/v1/chat/completions", "tool_calls"] = calls
    for part, path, name, effect in parts_of_bodies():
        accepted, refused, beside = sent_to(path, name, effect)
        if part == "messages" and name in ANY_VALUE:
            accepted, refused = [*accepted, *refused], []
        for value, is_accepted in (*((value, True) for value in accepted), *((value, False) for value in refused)):
            inner = {name: value}
            body = {"stream": True, part: inner}
            if part == "messages":
                body = {part: [{"role": "user", "content": "hi", **beside, **inner}, CHAT["messages"][0]]}
            answer = answer_to(http, path, **body)
            context = (part, path, name, value, answer.text)
            assert answer.status_code == (200 if is_accepted else 400), context
            if not is_accepted:
                assert answer.json()["error"]["param"].startswith(part), context


def test_the_accepted_values_of_the_page_are_sent_at_their_limits(http: httpx.Client) -> None:
    everywhere = effects(BODIES) | effects(TEXTS) | effects(JOB)
    for name, said in values().items():
        path = next(path for path in PROMPTS if everywhere.get((path, name)) == HONORED)
        beside = sent_to(path, name, HONORED)[2]
        for value in (json.loads(one.strip("`")) for one in said.split(" or ") if one.startswith("`")):
            of_url = {"body": PROMPTS[value]} if name == "url" else {}
            answer = answer_to(http, path, **{**beside, **of_url, name: value})
            # The values are accepted; the Redis of these tests has no disk and no replica, and their model no labels.
            lacks_it = any(
                code in answer.text
                for code in ('"unsupported_durability"', '"not_replicated"', "cannot classify texts")
            )
            assert answer.status_code in (200, 202, 403) or lacks_it, (name, value, answer.text)
        for limit in said.split(", ") if "`" not in said else ():
            word, number = limit.removeprefix("at ").split(" ")
            edge = number_of(number)
            outside = {"least": edge - 1, "most": edge + 1, "above": edge, "below": edge}[word]
            assert_refused(answer_to(http, path, **beside, **{name: outside}), name, HONORED, (name, limit))


def number_of(text: str) -> float:
    """Read a number of the page, such as 65,536 or -2^63."""
    base, _, power = text.lstrip("-").replace(",", "").partition("^")
    value: float = float(base) if "." in base else int(base) ** int(power or 1)
    return -value if text.startswith("-") else value


def test_the_page_has_the_tables_of_the_code() -> None:
    page = (ROOT / "docs/FIELDS.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == tables().strip(), "run `make fields`"


def test_every_kind_of_effect_occurs() -> None:
    kinds = {HONORED, REFUSED, UNKNOWN, WITHOUT_EFFECT}
    assert kinds < set(EFFECTS.values())
    assert len(EFFECTS) > 200


def test_a_batch_file_restricts_what_a_row_cannot_have() -> None:
    rows = {name: effect for (endpoint, name), effect in EFFECTS.items() if endpoint == "batch: /v1/chat/completions"}
    assert (rows["stream"], rows["tools"], rows["stream_options"]) == ("only `false`", HONORED, REFUSED)
    assert rows["service_tier"] == 'only `"auto"` or `"default"` or `"flex"`'
    assert rows["priority"] == UNKNOWN


ONE_TEXT = {"input": "hi"}


@pytest.mark.parametrize(
    ("schema", "body", "is_accepted"),
    [
        (ChatRequest, {**CHAT, "max_tokens": 16.0, "priority": -1.0}, True),
        (CompletionRequest, {"prompt": "hi", "max_tokens": 16.0, "priority": 1}, True),
        (EmbeddingRequest, {**ONE_TEXT, "dimensions": 4.0, "priority": 0}, True),
        (CompletionRequest, {"prompt": [16.0]}, False),
        (EmbeddingRequest, {"input": [16.0]}, False),
        (ResponseBody, {**ONE_TEXT, "max_output_tokens": 16.0}, False),
        (ResponseBody, {**ONE_TEXT, "priority": 1}, False),
        (MessagesRequest, {**CHAT, "max_tokens": 16.0}, False),
        (MessagesRequest, {**CHAT, "max_tokens": 16, "priority": 1}, False),
        (JobRequest, {"prompt": "hi", "params": {"max_tokens": 16.0}}, False),
        (JobRequest, {"prompt": "hi", "priority": 1}, False),
        (JobRequest, {"tokens": [16.0]}, False),
        (DetokenizeRequest, {"tokens": [16.0]}, False),
    ],
    ids=str,
)
def test_whole_numbers_and_classes_are_written_as_the_page_says(
    schema: type[Any], body: dict[str, Any], is_accepted: bool
) -> None:
    raw = json.dumps({"model": MODEL, **body}).encode()
    if is_accepted:
        parse(schema, raw)
        return
    with pytest.raises(RequestError, match=r"must be an integer|'interactive', |token ids"):
        parse(schema, raw)
