"""Bodies that clients send: those that repeat our own answers, in another encoding, and with other APIs' fields."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes.served_model import TOOL_TEMPLATE, served
from fakes.waiting import wait_until
from fixtures.tiny_model import make_tiny_model

USER = {"role": "user", "content": "hi"}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TIME = {"name": "time", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS = [{"type": "function", "function": one} for one in (WEATHER, TIME)]
MESSAGE_TOOLS = [{"name": one["name"], "input_schema": one["parameters"]} for one in (WEATHER, TIME)]
RESPONSE_TOOLS = [{"type": "function", **one} for one in (WEATHER, TIME)]
ONE_TURN_EACH = """{%- for message in messages -%}
{%- if message.role == "assistant" and not loop.first and messages[loop.index0 - 1].role == "assistant" -%}
{{- raise_exception("two turns of the assistant in a row") -}}
{%- endif -%}{%- endfor -%}"""
"""What some chat templates check."""
IDLE_S = 2
ENCODINGS = ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": [USER], "max_output_tokens": 2},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/v1/jobs": {"messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "hi"},
}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the tiny model with a chat template that takes tools."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "chat_template.jinja").write_text(ONE_TURN_EACH + TOOL_TEMPLATE)
    limits = httpx.Limits(keepalive_expiry=IDLE_S / 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_GATEWAY_IDLE_CONNECTION_S", str(IDLE_S))
        with (
            served(folder, tool_parser="hermes", dtype="bfloat16") as url,
            httpx.Client(base_url=url, timeout=60, limits=limits) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def model(door: httpx.Client) -> str:
    return str(door.get("/v1/models").json()["data"][0]["id"])


def post(door: httpx.Client, path: str, content: bytes) -> httpx.Response:
    return door.post(path, content=content, headers={"Content-Type": "application/json"})


def answer(door: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answered = door.post(path, json=body)
    assert answered.status_code in (200, 202), (path, answered.text)
    found: dict[str, Any] = answered.json()
    return found


# Our own output is accepted in the next turn.

LIMITS = [1, 12, 24, 36, 48, 80]
"""Before, in and behind the name of a call and its arguments."""


@pytest.mark.parametrize("limit", LIMITS)
def test_a_call_that_the_limit_cut_is_accepted_in_the_next_turn_of_a_chat(
    door: httpx.Client, model: str, limit: int
) -> None:
    body = {"model": model, "messages": [USER], "tools": CHAT_TOOLS, "tool_choice": "required", "temperature": 0}
    said = answer(door, "/v1/chat/completions", body | {"max_tokens": limit})["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in said.get("tool_calls") or ()]
    answer(door, "/v1/chat/completions", body | {"messages": [USER, said, *results, USER], "max_tokens": 2})
    answer(door, "/v1/jobs", {"model": model, "messages": [USER, said, *results, USER], "max_tokens": 2})


@pytest.mark.parametrize("limit", LIMITS)
def test_a_call_that_the_limit_cut_is_accepted_in_the_next_response(door: httpx.Client, model: str, limit: int) -> None:
    body = {"model": model, "input": [USER], "tools": RESPONSE_TOOLS, "tool_choice": "required", "temperature": 0}
    first = answer(door, "/v1/responses", body | {"max_output_tokens": limit})
    calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": ""} for call in calls]
    again = body | {"max_output_tokens": 2}
    answer(door, "/v1/responses", again | {"input": [USER, *first["output"], *results, USER]})
    answer(door, "/v1/responses", again | {"input": [*results, USER], "previous_response_id": first["id"]})


@pytest.mark.parametrize("limit", LIMITS)
def test_a_call_that_the_limit_cut_is_accepted_in_the_next_message(door: httpx.Client, model: str, limit: int) -> None:
    body = {"model": model, "messages": [USER], "tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}}
    said = answer(door, "/v1/messages", body | {"max_tokens": limit, "temperature": 0})["content"]
    results = [{"type": "tool_result", "tool_use_id": one["id"]} for one in said if one["type"] == "tool_use"]
    turns = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": [*results, text("go on")]}]
    answer(door, "/v1/messages", body | {"messages": turns, "max_tokens": 2})


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    "arguments", ['{"city": "Par', "{", '{"a', '{"a":', '{"a": tr', '{"a": [1, {"b"', "", " ", "null"]
)
def test_arguments_that_are_no_whole_object_are_accepted(door: httpx.Client, model: str, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [text("sun")], "name": "weather"}
    answer(door, "/v1/chat/completions", {"model": model, "messages": [USER, turn, result], "max_tokens": 1})
    item = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "sun"}]}
    answer(door, "/v1/responses", {"model": model, "input": [USER, item, output], "max_output_tokens": 1})


@pytest.mark.parametrize("missing", [{}, {"id": None}, {"id": ""}])
def test_calls_without_ids_are_answered_in_their_order(door: httpx.Client, model: str, missing: dict[str, Any]) -> None:
    calls = [{**missing, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    results = [{"role": "tool", "content": text, **({"tool_call_id": None} if missing else {})} for text in ("x", "y")]
    messages = [USER, {"role": "assistant", "tool_calls": calls}, *results]
    answer(door, "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1})
    answer(door, "/v1/jobs", {"model": model, "messages": messages, "max_tokens": 1})
    answer(door, "/tokenize", {"model": model, "messages": messages})
    one_more = {"model": model, "messages": [*messages, results[0]], "max_tokens": 1}
    refused = door.post("/v1/chat/completions", json=one_more)
    assert refused.status_code == 400 and "messages[4]" in refused.json()["error"]["message"]


def test_parts_without_a_type_and_texts_as_parts_are_texts(door: httpx.Client, model: str) -> None:
    parts = [{"text": "a"}, "b", text("c")]
    ask = {"model": model, "messages": [{"role": "user", "content": parts}]}
    said = {"model": model, "messages": [{"role": "user", "content": "abc"}]}
    assert answer(door, "/tokenize", ask)["tokens"] == answer(door, "/tokenize", said)["tokens"]


TURNS: list[Any] = [
    "",
    None,
    [],
    [text("")],
    [{"type": "refusal", "refusal": "no"}],
    [{"type": "thinking", "thinking": "hm", "signature": ""}, text("yes")],
]


@pytest.mark.parametrize("content", TURNS)
def test_an_assistant_message_of_any_content_is_accepted(door: httpx.Client, model: str, content: Any) -> None:
    turn = {"role": "assistant", "content": content, "reasoning_content": "hm", "name": None, "audio": None}
    answer(door, "/v1/chat/completions", {"model": model, "messages": [USER, turn, USER], "max_tokens": 1})


# Two APIs have one rule.


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_accepted_where_tools_are(door: httpx.Client, model: str, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "time"}]}
    body = {"model": model, "messages": [USER], "tools": CHAT_TOOLS, "max_tokens": 80, "temperature": 0}
    found = answer(door, "/v1/chat/completions", body | {"tool_choice": choice})["choices"][0]["message"]
    names = {call["function"]["name"] for call in found.get("tool_calls") or ()}
    assert names == {"time"} if mode == "required" else names <= {"time"}
    answer(door, "/v1/jobs", body | {"tool_choice": choice})
    given = {"model": model, "input": [USER], "tools": RESPONSE_TOOLS, "max_output_tokens": 80, "temperature": 0}
    for one in (choice, flat):
        answer(door, "/v1/responses", given | {"tool_choice": one})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/jobs"])
def test_allowed_tools_that_are_not_offered_are_refused_by_name(door: httpx.Client, model: str, path: str) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "name": name} for name in ("time", "other")]}
    tools = RESPONSE_TOOLS if path == "/v1/responses" else CHAT_TOOLS
    body = {"model": model, **BODIES[path], "tools": tools, "tool_choice": {"type": "allowed_tools", **allowed}}
    refused = door.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tool_choice"
    assert "'other'" in refused.text


def test_two_turns_of_the_assistant_become_one_where_a_template_takes_no_two(door: httpx.Client, model: str) -> None:
    turns = [{"role": "assistant", "content": one} for one in ("first", "second")]
    answer(door, "/v1/messages", {"model": model, "messages": [USER, *turns, USER], "max_tokens": 1})
    call = {"type": "tool_use", "id": "c1", "name": "time", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]}
    calling = [turns[0], {"role": "assistant", "content": [call]}]
    answer(door, "/v1/messages", {"model": model, "messages": [USER, *calling, result], "max_tokens": 1})
    answer(door, "/v1/responses", {"model": model, "input": [USER, *turns, USER], "max_output_tokens": 1})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("without", [{}, {"model": None}])
def test_a_body_without_a_model_uses_the_only_one(
    door: httpx.Client, model: str, path: str, without: dict[str, Any]
) -> None:
    found = answer(door, path, BODIES[path] | without)
    assert found.get("model", model) == model


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_without_a_model_names_the_only_one(door: httpx.Client, model: str, path: str) -> None:
    streamed = door.post(path, json=BODIES[path] | {"stream": True})
    assert f'"model":"{model}"' in streamed.text.replace('": "', '":"')


def test_a_stored_response_names_the_model_that_its_body_did_not(door: httpx.Client, model: str) -> None:
    made = answer(door, "/v1/responses", {"input": "hi", "max_output_tokens": 2})
    assert door.get(f"/v1/responses/{made['id']}").json()["model"] == model
    again = {"input": "go on", "previous_response_id": made["id"], "max_output_tokens": 2}
    assert answer(door, "/v1/responses", again)["model"] == model


# The last turn of the assistant is continued where the API says so.

COUNT: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 12, "temperature": 0}
BEGUN = {"role": "assistant", "content": "One, two,"}


def test_a_message_continues_the_last_turn_as_a_chat_does(door: httpx.Client) -> None:
    turns = COUNT | {"messages": [*COUNT["messages"], BEGUN]}
    chat = answer(door, "/v1/chat/completions", turns | {"continue_final_message": True})
    wanted = chat["choices"][0]["message"]["content"]
    assert answer(door, "/v1/messages", turns)["content"][0]["text"] == wanted
    configured = {"role": "system", "output_config": {"effort": "low"}}
    split = {"messages": [*COUNT["messages"], {**BEGUN, "content": [text("One,"), text(" two,")]}, configured]}
    assert answer(door, "/v1/messages", COUNT | split)["content"][0]["text"] == wanted
    counted = answer(door, "/v1/messages/count_tokens", {"messages": turns["messages"]})["input_tokens"]
    assert counted == chat["usage"]["prompt_tokens"]


def test_a_last_turn_with_calls_cannot_be_continued(door: httpx.Client) -> None:
    use = {"type": "tool_use", "id": "c1", "name": "time", "input": {}}
    turns = [USER, {"role": "assistant", "content": [text("I look."), use]}]
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    chat = [USER, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    for path, body in (
        ("/v1/messages", {"messages": turns, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": chat, "continue_final_message": True, "max_tokens": 2}),
    ):
        refused = door.post(path, json=body)
        assert refused.status_code == 400
        assert "send their results after it" in refused.text


# Rows take what the bodies take.


def rows_of(door: httpx.Client, url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers, or the errors, of the rows of a batch, in order."""
    if url == "/v1/messages":
        requests = [{"custom_id": str(number), "params": body} for number, body in enumerate(bodies)]
        made = answer(door, "/v1/messages/batches", {"requests": requests})
        wait_until(lambda: door.get(f"/v1/messages/batches/{made['id']}").json()["processing_status"] == "ended")
        lines = door.get(f"/v1/messages/batches/{made['id']}/results").text.split("\n")
        results = {row["custom_id"]: row["result"] for row in map(json.loads, filter(None, lines))}
        return [results[str(number)]["message"] for number in range(len(bodies))]
    rows = [{"custom_id": str(at), "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies)]
    file = {"file": ("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())}
    sent = door.post("/v1/files", files=file, data={"purpose": "batch"}).json()
    made = answer(door, "/v1/batches", {"input_file_id": sent["id"], "endpoint": url, "completion_window": "24h"})
    found = wait_until(
        lambda: door.get(f"/v1/batches/{made['id']}").json(), lambda one: one["status"] in ("completed", "failed")
    )
    files = [found[name] for name in ("output_file_id", "error_file_id") if found.get(name)]
    lines = [line for one in files for line in door.get(f"/v1/files/{one}/content").text.split("\n") if line]
    by_id = {row["custom_id"]: row for row in map(json.loads, lines)}
    answers = [by_id[str(number)] for number in range(len(bodies))]
    return [row["error"] or row["response"]["body"] for row in answers]


OF_ONE_JOB = ("id", "call_id", "created", "created_at", "completed_at", "usage", "store", "service_tier")


def shared(value: Any) -> Any:
    """Return an answer without what each job has of its own."""
    if isinstance(value, list):
        return [*map(shared, value)]
    if isinstance(value, dict):
        return {name: shared(one) for name, one in value.items() if name not in OF_ONE_JOB}
    return value


CALLING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tools": CHAT_TOOLS, "tool_choice": "required", "max_tokens": 80},
    "/v1/responses": {"tools": RESPONSE_TOOLS, "tool_choice": "required", "max_output_tokens": 80},
    "/v1/messages": {"tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 80},
}


@pytest.mark.parametrize("url", CALLING)
def test_a_row_takes_tools_and_answers_as_the_body_does(door: httpx.Client, model: str, url: str) -> None:
    body = {**BODIES[url], **CALLING[url], "temperature": 0}
    (row,) = rows_of(door, url, [body])
    wanted = answer(door, url, body)
    assert shared(row) == {name: one for name, one in shared(wanted).items() if name in row}
    assert row["model"] == model


def test_rows_of_responses_take_items_and_choices_of_tools(door: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "time", "arguments": ""}
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]}
    said = [{"role": "assistant", "content": "I look."}, {"type": "reasoning", "summary": []}]
    common = {"temperature": 0, "max_output_tokens": 80, "tools": RESPONSE_TOOLS, "seed": 3, "top_k": 5}
    function = {"type": "function", "name": "time"}
    bodies: list[dict[str, Any]] = [
        common | {"input": [USER, *said, call, result, USER]},
        common | {"input": "hi", "tool_choice": function},
        common | {"input": "hi", "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [function]}},
    ]
    for row, body in zip(rows_of(door, "/v1/responses", bodies), bodies, strict=True):
        assert shared(row["output"]) == shared(answer(door, "/v1/responses", body)["output"])


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/responses"])
def test_a_row_is_refused_as_the_body_is(door: httpx.Client, url: str) -> None:
    tools, other = CALLING[url]["tools"], {"type": "function", "name": "other"}
    wrong: list[dict[str, Any]] = [
        {"tools": tools, "tool_choice": other},
        {"tools": tools, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [other]}},
        {"tool_choice": "required"},
        {"tools": [{"type": "function"}]},
        {"tools": tools, "tool_choice": "any"},
        {"max_completion_tokens" if url == "/v1/chat/completions" else "max_output_tokens": 0},
    ]
    bodies = [BODIES[url] | one for one in wrong]
    for error, body in zip(rows_of(door, url, bodies), bodies, strict=True):
        refused = door.post(url, json=body)
        assert refused.status_code == 400
        assert error["param"].split(".")[0] == refused.json()["error"]["param"].split(".")[0], error


# OpenAI's older way to score a text.


@pytest.mark.parametrize("prompt", ["Rome is", [28, 216, 339], ["Rome", "Paris is big"]])
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"logprobs": 0, "n": 2, "return_token_ids": True}])
def test_an_echo_without_tokens_is_the_prompt_alone(door: httpx.Client, prompt: Any, more: dict[str, Any]) -> None:
    body = {"prompt": prompt, "echo": True, "temperature": 0, **more}
    alone = answer(door, "/v1/completions", body | {"max_tokens": 0})
    longer = answer(door, "/v1/completions", body | {"max_tokens": 1})
    for short, long in zip(alone["choices"], longer["choices"], strict=True):
        assert short["finish_reason"] == "length"
        assert long["text"].startswith(short["text"]) and len(short["text"]) < len(long["text"])
        if "logprobs" in more and short["logprobs"] is not None:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert short["logprobs"][name] == long["logprobs"][name][:-1]
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["prompt_tokens"] == longer["usage"]["prompt_tokens"]
    lines = door.post("/v1/completions", json=body | {"max_tokens": 0, "stream": True}).text.split("\n")
    texts = dict.fromkeys(range(len(alone["choices"])), "")
    for line in lines:
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            texts[choice["index"]] += choice["text"]
    assert [*texts.values()] == [choice["text"] for choice in alone["choices"]]


def test_no_tokens_without_an_echo_are_refused(door: httpx.Client) -> None:
    for more in ({}, {"echo": False}):
        refused = door.post("/v1/completions", json={"prompt": "hi", "max_tokens": 0, **more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_a_row_echoes_the_prompt_alone_as_the_body_does(door: httpx.Client) -> None:
    body = {"prompt": "Rome is", "max_tokens": 0, "echo": True, "logprobs": 1}
    (row,) = rows_of(door, "/v1/completions", [body])
    assert row["choices"] == answer(door, "/v1/completions", body)["choices"]


# Connections.


def test_a_connection_stays_open_as_long_as_the_gateway_is_told(door: httpx.Client) -> None:
    with socket.create_connection((door.base_url.host, door.base_url.port or 80), timeout=30) as line:
        line.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")
        began_s = time.monotonic()
        while line.recv(1 << 16):
            pass
        assert IDLE_S / 2 < time.monotonic() - began_s < 20


# Encodings.


@pytest.mark.parametrize("path", BODIES)
def test_a_byte_order_mark_is_accepted_and_other_encodings_are_named(door: httpx.Client, model: str, path: str) -> None:
    said = json.dumps({"model": model, **BODIES[path]})
    assert post(door, path, said.encode("utf-8-sig")).status_code in (200, 202)
    for encoding in ENCODINGS[1:]:
        refused = post(door, path, said.encode(encoding))
        assert refused.status_code == 400
        assert encoding[:6].upper() in refused.text


@pytest.mark.parametrize("half", [b"\\ud83d", b"\\uDE00", b"\xed\xa0\xbd"])
@pytest.mark.parametrize("path", BODIES)
def test_a_lone_surrogate_is_reported_with_its_field(door: httpx.Client, model: str, path: str, half: bytes) -> None:
    raw = json.dumps({"model": model, **BODIES[path]}).encode().replace(b'"hi"', b'"h%bi"' % half)
    refused = post(door, path, raw)
    assert refused.status_code == 400
    field = next(name for name in ("messages", "prompt", "input") if name in BODIES[path])
    assert f"{field}[0].content: must be valid Unicode" in refused.text or f"{field}: must be valid" in refused.text


# Bodies that a program sends without saying that they are JSON.


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"])
@pytest.mark.parametrize("path", BODIES)
def test_curls_body_needs_no_header(door: httpx.Client, model: str, path: str, kind: str | None) -> None:
    """`curl -d` calls each body a form."""
    content = json.dumps({"model": model, **BODIES[path]})
    answered = door.post(path, content=content, headers={"Content-Type": kind} if kind else {})
    assert answered.status_code in (200, 202), answered.text


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/v1/nothing", 404, "Not Found: POST /v1/nothing"),
        ("/v1/responses/resp_none/cancel", 404, "resp_none"),
        ("/v1/webhook_endpoints/we_none", 404, "we_none"),
        ("/v1/jobs/m.none/retry", 404, "m.none"),
        ("/v1/messages/batches", 400, "requests"),
        ("/v1/batches", 400, "input_file_id"),
    ],
)
def test_a_path_that_does_not_exist_is_told_before_a_header(
    door: httpx.Client, path: str, status: int, said: str
) -> None:
    answered = door.post(path, content=b"{}")
    assert (answered.status_code, said in answered.text) == (status, True), answered.text


def test_a_form_of_a_page_stays_refused(door: httpx.Client, model: str) -> None:
    content = json.dumps({"model": model, **BODIES["/v1/completions"]})
    for header in ({"Origin": str(door.base_url).rstrip("/")}, {"Sec-Fetch-Site": "same-origin"}):
        answered = door.post("/v1/completions", content=content, headers={"Content-Type": "text/plain", **header})
        assert answered.json()["error"]["code"] == "unsupported_media_type"
    upload = door.post("/v1/completions", content=content, headers={"Content-Type": "multipart/form-data; boundary=x"})
    assert upload.json()["error"]["code"] == "unsupported_media_type"


# Everything that is wrong in a body is said at once.

WRONG_TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": ({"messages": [USER], "temperature": -1, "top_p": 7}, {"n": "x", "fooo": 1, "bar": 2}),
    "/v1/completions": ({"prompt": "x", "temperature": -1, "top_p": 7}, {"max_tokens": "x", "fooo": 1}),
    "/v1/responses": ({"input": "x", "temperature": -1, "top_p": 7}, {"max_output_tokens": "x", "fooo": 1}),
    "/v1/messages": ({"messages": [USER], "max_tokens": 2, "temperature": -1, "top_k": -7}, {"stream": 3, "fooo": 1}),
    "/v1/jobs": ({"prompt": "x", "temperature": -1, "top_p": 7}, {"priority": "zz", "fooo": 1}),
    "/v1/embeddings": ({"input": "x"}, {"encoding_format": "x", "dimensions": "y", "fooo": 1}),
    "/tokenize": ({}, {"prompt": 5, "add_special_tokens": 3, "fooo": 1}),
    "/v1/rerank": ({}, {"query": 5, "documents": 3, "fooo": 1}),
    "/v1/batches": ({}, {"input_file_id": 5, "completion_window": 3, "fooo": 1}),
    "/v1/webhook_endpoints": ({}, {"url": 5, "event_types": 3, "fooo": 1}),
    "/v1/jobs/bulk": ({}, {"action": 5, "selector": 3, "fooo": 1}),
}


@pytest.mark.parametrize("path", WRONG_TOGETHER)
def test_a_body_is_told_all_that_is_wrong_at_once(door: httpx.Client, path: str) -> None:
    of_range, of_type = WRONG_TOGETHER[path]
    answered = door.post(path, json=of_range | of_type)
    assert answered.status_code == 400
    message = answered.json()["error"]["message"]
    ranges = {name for name in of_range if isinstance(of_range[name], int) and name != "max_tokens"}
    missing = [name for name in {*of_type, *ranges} if f"{name}: " not in message]
    assert missing == [], message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/jobs"])
def test_all_numbers_out_of_range_are_told_at_once(door: httpx.Client, path: str) -> None:
    answered = door.post(path, json=BODIES[path] | {"temperature": -1, "top_p": 7, "top_k": -9})
    message = answered.json()["error"]["message"]
    assert [name for name in ("temperature", "top_p", "top_k") if f"{name}: must be " not in message] == [], message
