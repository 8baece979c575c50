"""Counting and shortening of conversations: `/v1/responses/input_tokens` and `/v1/responses/compact`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import redis
from docs_site.fields import HONORED, REFUSED, UNKNOWN, WITHOUT_EFFECT, effects

from penstock.contract.tool_formats import FORMATS
from penstock.producer.responses.compaction import (
    BYTES_PER_SUMMARY_TOKEN,
    MIN_SUMMARY_LIMIT,
    MIN_SUMMARY_TOKENS,
    asking,
)
from penstock.queue import keys
from tests.gateway.conftest import ByteTokenizer, EchoEngine, Stack

MODEL, OTHER = "acme/author", "acme/other"
SUMMARY = "The user wants rivers. The Oder is 840 km long – noted in rivers.txt."
MAX_MODEL_LEN = 1 << 13
READ_FILE = {
    "type": "function",
    "name": "read_file",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
TURNS = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "Name a river – any.", "id": "msg_mine"},
    {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "Oder"},
    {"role": "assistant", "content": "The Oder."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How long is it?"}]},
]


class AuthorTokenizer(ByteTokenizer):  # type: ignore[misc]  # a conftest module has no types
    """One token per byte. A chat is encoded as all its messages, which a real prompt contains too, or as the summary.

    The engine echoes its prompt. So the answer to a chat that asks for a summary is the summary.
    """

    tool_format, reasoning_parser = FORMATS["hermes"], "think"

    def __init__(self) -> None:
        super().__init__()
        self.summary = SUMMARY

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: str | None = None, *rest: Any, **options: Any
    ) -> list[int]:
        super().encode_chat(messages, tools, *rest, **options)
        if "summary of the conversation up to here" in messages[-1]["content"]:
            return list(self.summary.encode())
        return list((json.dumps([*messages], ensure_ascii=False) + (tools or "")).encode())


class AuthorEngine(EchoEngine):  # type: ignore[misc]
    """Its context holds a conversation."""

    max_prompt_tokens = MAX_MODEL_LEN

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = AuthorTokenizer()
        self.max_model_len = MAX_MODEL_LEN


@pytest.fixture(scope="module")
def author_engine(stack: Stack) -> AuthorEngine:
    engine = AuthorEngine()
    stack.start_node(engine, model=MODEL, pool="author", aliases=["writer"])
    stack.start_node(AuthorEngine(), model=OTHER, pool="other-author")
    return engine


@pytest.fixture
def author(url: str, author_engine: AuthorEngine) -> Iterator[openai.OpenAI]:
    author_engine.tokenizer.summary = SUMMARY
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(url: str, author_engine: AuthorEngine) -> Iterator[httpx.Client]:
    author_engine.tokenizer.summary = SUMMARY
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def messages_of(engine: AuthorEngine) -> list[dict[str, Any]]:
    assert engine.tokenizer.last_chat is not None
    return list(engine.tokenizer.last_chat[0])


def plain(item: Any) -> dict[str, Any]:
    """Return an item as a client sends it back. The client's types know no message of the user in an output."""
    return dict(item.model_dump(exclude_none=True, warnings=False))


def compacted(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses/compact", json={"model": MODEL, "input": TURNS, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


# Counting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"instructions": "Answer in English."},
        {"tools": [READ_FILE]},
        {"tools": [READ_FILE], "tool_choice": "none"},
        {"tools": [READ_FILE], "tool_choice": {"type": "function", "name": "read_file"}},
        {"text": {"format": {"type": "json_object"}}},
        {"reasoning": {"effort": "low"}, "max_output_tokens": 16, "metadata": {"a": "b"}},
        {"input": "Wie heißt er?"},
    ],
)
def test_the_count_is_the_input_of_the_response(author: openai.OpenAI, more: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"input": TURNS, **more}
    generated = {name: asked.pop(name) for name in ("max_output_tokens", "metadata") if name in asked}
    counted = author.responses.input_tokens.count(model=MODEL, **asked, extra_body=generated)
    answered = author.responses.create(model=MODEL, **asked, extra_body={"max_output_tokens": 16, **generated})
    assert counted.object == "response.input_tokens"
    assert answered.usage is not None and counted.input_tokens == answered.usage.input_tokens > 10


def test_the_count_has_the_earlier_responses(author: openai.OpenAI, author_engine: AuthorEngine) -> None:
    first = author.responses.create(model=MODEL, input="Name a river.", max_output_tokens=4)
    asked: dict[str, Any] = {"model": MODEL, "input": "And another?", "previous_response_id": first.id}
    counted = author.responses.input_tokens.count(**asked)
    assert [message["role"] for message in messages_of(author_engine)] == ["user", "assistant", "user"]
    answered = author.responses.create(**asked, max_output_tokens=4)
    assert answered.usage is not None and counted.input_tokens == answered.usage.input_tokens


def test_a_count_generates_nothing_and_leaves_the_idempotency_key_to_the_response(
    http: httpx.Client, author_engine: AuthorEngine
) -> None:
    before = author_engine.last_params
    body, headers = {"model": MODEL, "input": "hi"}, {"Idempotency-Key": "counted first"}
    assert http.post("/v1/responses/input_tokens", json=body, headers=headers).status_code == 200
    assert author_engine.last_params is before
    assert http.post("/v1/responses", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/responses/compact"])
@pytest.mark.parametrize(
    ("fields", "status", "code", "text"),
    [
        ({"inputs": []}, 400, "unknown_field", "inputs: unknown field"),
        ({"input": None}, 400, "invalid_request", "input"),
        ({"input": [{"type": "compaction_trigger"}]}, 400, "unsupported_value", "/v1/responses/compact"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "unsupported_value", "input_image"),
        ({"model": "nobody"}, 404, "model_not_found", "'nobody' is not served"),
        ({"previous_response_id": "resp_none"}, 400, "previous_response_not_found", "resp_none"),
    ],
)
def test_both_refuse_what_a_response_refuses(
    http: httpx.Client, path: str, fields: dict[str, Any], status: int, code: str, text: str
) -> None:
    refused = refusal_of(http.post(path, json={"model": MODEL, "input": "hi", **fields}))
    assert refused[:2] == (status, code) and text in refused[2]


# Shortening -------------------------------------------------------------------------------------


def test_a_compaction_is_the_users_messages_and_a_summary(author: openai.OpenAI, author_engine: AuthorEngine) -> None:
    asked: Any = TURNS
    answer = author.responses.compact(model=MODEL, input=asked, instructions="You are a geographer.")
    assert (answer.object, answer.id[:5]) == ("response.compaction", "resp_")
    mine, second, summary = (plain(item) for item in answer.output)
    text = {"type": "input_text", "text": "Name a river – any."}
    assert mine == {"id": "msg_mine", "type": "message", "role": "user", "status": "completed", "content": [text]}
    assert second["content"][0]["text"] == "How long is it?"
    assert (summary["type"], summary["id"][:4]) == ("compaction", "cmp_")
    assert answer.usage.output_tokens == len(SUMMARY.encode()) == answer.usage.total_tokens - answer.usage.input_tokens
    system, *conversation, last = messages_of(author_engine)
    assert system == {"role": "system", "content": "You are a geographer."}
    assert [message["role"] for message in conversation] == ["developer", "user", "assistant", "tool", "assistant"]
    assert last["role"] == "user" and last["content"].startswith("How long is it?\n\nWrite a summary")
    assert author_engine.tokenizer.last_chat is not None and author_engine.tokenizer.last_chat[1] is None
    assert json.loads(author_engine.tokenizer.last_template_kwargs or "")["enable_thinking"] is False


def test_the_next_response_goes_on_from_the_summary(author: openai.OpenAI, author_engine: AuthorEngine) -> None:
    asked: Any = TURNS
    answer = author.responses.compact(model=MODEL, input=asked)
    output = [plain(item) for item in answer.output]
    more: Any = [*output, {"role": "user", "content": "Go on."}]
    response = author.responses.create(model="writer", input=more, max_output_tokens=4)
    (message,) = messages_of(author_engine)
    first, second, *rest = message["content"].split("\n\n")
    assert (first, second, rest[-1]) == ("Name a river – any.", "How long is it?", "Go on.")
    assert f"<summary>\n{SUMMARY}\n</summary>" in rest[0]
    kept = [item.type for item in author.responses.input_items.list(response.id, order="asc")]
    assert kept == ["message", "message", "compaction", "message"]


def test_a_compaction_of_a_stored_conversation_has_all_messages_of_the_user(author: openai.OpenAI) -> None:
    first = author.responses.create(model=MODEL, input="Name a river.", max_output_tokens=4)
    second = author.responses.create(model=MODEL, input="Another.", previous_response_id=first.id, max_output_tokens=4)
    asked: tuple[dict[str, Any], ...] = ({}, {"input": "And a lake."})
    for more in asked:
        answer = author.responses.compact(model=MODEL, previous_response_id=second.id, **more)
        *kept, summary = (plain(item) for item in answer.output)
        texts = [item["content"][0]["text"] for item in kept]
        assert texts == ["Name a river.", "Another.", *more.values()]
        assert len({item["id"] for item in (*kept, summary)}) == len(kept) + 1


def test_a_second_compaction_reads_the_first_summary_and_replaces_it(
    http: httpx.Client, author_engine: AuthorEngine
) -> None:
    first = compacted(http)["output"]
    first[-1]["type"] = "compaction_summary"
    author_engine.tokenizer.summary = "a newer summary"
    second = compacted(http, input=[*first, {"role": "user", "content": "Go on."}])["output"]
    assert SUMMARY in messages_of(author_engine)[-1]["content"]
    assert [item["type"] for item in second] == ["message", "message", "message", "compaction"]
    assert second[-1]["encrypted_content"] != first[-1]["encrypted_content"]


def test_fields_that_codex_sends_have_no_effect(http: httpx.Client, author_engine: AuthorEngine) -> None:
    tools = [READ_FILE, {"type": "custom", "name": "apply_patch"}, {"type": "of_tomorrow"}]
    codex = {"tools": tools, "parallel_tool_calls": True, "reasoning": {"effort": "xhigh", "context": "all"}}
    codex |= {"text": {"verbosity": "low"}, "service_tier": "flex", "prompt_cache_key": "k"}
    assert compacted(http, **codex)["output"][-1]["type"] == "compaction"
    assert author_engine.tokenizer.last_chat is not None and author_engine.tokenizer.last_chat[1] is None


VALUES: dict[str, Any] = {
    "input": "hi",
    "instructions": "Be short.",
    "model": MODEL,
    "priority": "batch",
    "service_tier": "flex",
    "cache_salt": "s",
    "deadline_s": 30,
    "ttl_s": 30,
    "tools": [{}],
    "parallel_tool_calls": True,
    "reasoning": {},
    "text": {},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}
"""Values that the fields accept. Of the others, one accepts the id of a response, and the rest only null."""


def test_every_field_does_what_the_page_says(http: httpx.Client) -> None:
    stored = http.post("/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 1}).json()["id"]
    honored = set()
    for (path, name), effect in effects().items():
        if path != "/v1/responses/compact":
            continue
        accepted = {**VALUES, "previous_response_id": stored}.get(name)
        wrong = {**({"input": "hi"} if name != "input" else {}), "model": MODEL, name: [1]}
        assert http.post(path, json=wrong).status_code == 400 or (name, effect) == ("tools", WITHOUT_EFFECT)
        if effect == UNKNOWN:
            continue
        assert (accepted is None) == (effect == REFUSED), (name, effect)
        assert compacted(http, **{"input": "hi", name: accepted})["output"][0]["type"] == "message"
        honored |= {name} if effect == HONORED else set()
    assert {"input", "previous_response_id", "cache_salt"} < honored


def test_reasoning_is_no_part_of_the_summary(http: httpx.Client, author_engine: AuthorEngine) -> None:
    author_engine.tokenizer.summary = f"<think>What matters?</think>\n\n{SUMMARY}"
    answer = compacted(http)
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    http.post("/v1/responses/input_tokens", json={"model": MODEL, "input": answer["output"]})
    (message,) = messages_of(author_engine)
    assert SUMMARY in message["content"] and "What matters?" not in message["content"]


@pytest.mark.parametrize(
    ("summary", "status", "code"),
    [
        ("<think>What matters?</think>", 500, "no_summary"),
        ("s" * (MAX_MODEL_LEN - MIN_SUMMARY_TOKENS + 1), 400, "context_length_exceeded"),
    ],
)
def test_a_conversation_without_a_summary_is_an_error(
    http: httpx.Client, author_engine: AuthorEngine, summary: str, status: int, code: str
) -> None:
    author_engine.tokenizer.summary = summary
    answer = http.post("/v1/responses/compact", json={"model": MODEL, "input": TURNS})
    assert refusal_of(answer)[:2] == (status, code), answer.text


@pytest.mark.parametrize("num_chars", [10, 8000])
def test_a_summary_that_finds_no_end_is_cut_by_the_length_of_its_conversation(
    http: httpx.Client, author_engine: AuthorEngine, num_chars: int
) -> None:
    author_engine.tokenizer.summary = "s" * 3000
    answer = compacted(http, input="a" * num_chars)
    assert answer["output"][-1]["type"] == "compaction"
    num_bytes = num_chars + len(asking([])[0]["content"])
    limit = max(MIN_SUMMARY_LIMIT, num_bytes // BYTES_PER_SUMMARY_TOKEN)
    assert limit <= answer["usage"]["output_tokens"] <= limit + 8


def test_a_repeated_key_gives_the_same_summary(http: httpx.Client) -> None:
    body, headers = {"model": MODEL, "input": "Name a river."}, {"Idempotency-Key": "twice"}
    first, second = (http.post("/v1/responses/compact", json=body, headers=headers).json() for _ in range(2))
    assert first["output"] == second["output"] and first["id"] == second["id"]


# Seals ------------------------------------------------------------------------------------------


def changed(content: str) -> str:
    """Return a sealed summary with another last letter, whose seal is the same."""
    raw = base64.urlsafe_b64decode(content)
    return base64.urlsafe_b64encode(raw[:-1] + b"!").decode()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"])
def test_a_summary_that_was_changed_or_is_of_another_model_is_refused(http: httpx.Client, path: str) -> None:
    *kept, item = compacted(http)["output"]

    def answer_with(content: str, model: str = MODEL) -> tuple[int, str, str]:
        sent = {"model": model, "input": [*kept, {**item, "encrypted_content": content}]}
        return refusal_of(http.post(path, json=sent))

    content = item["encrypted_content"]
    for refused in (answer_with(changed(content)), answer_with(content, OTHER)):
        assert refused[:2] == (400, "foreign_compaction") and "item 2: " in refused[2]
    for no_summary in (
        "",
        "no base64",
        content[:30],
        "gAAAAABo" + content,
        base64.urlsafe_b64encode(b"x" * 99).decode(),
    ):
        refused = answer_with(no_summary)
        assert refused[:2] == (400, "invalid_request") and "item 2: encrypted_content: not a summary" in refused[2]


def test_a_new_secret_ends_all_seals(http: httpx.Client, stack: Stack) -> None:
    item = compacted(http)["output"][-1]
    with redis.Redis.from_url(stack.redis_url) as queue:
        queue.delete(keys.SEAL_KEY)
    refused = refusal_of(http.post("/v1/responses", json={"model": MODEL, "input": [item]}))
    assert refused[:2] == (400, "foreign_compaction")
    assert http.post("/v1/responses", json={"model": MODEL, "input": compacted(http)["output"]}).status_code == 200


def test_every_gateway_opens_a_summary_of_its_tenant(http: httpx.Client, stack: Stack) -> None:
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as other:
        body = {"model": MODEL, "input": compacted(http)["output"], "max_output_tokens": 4}
        assert other.post("/v1/responses", json=body).status_code == 200
