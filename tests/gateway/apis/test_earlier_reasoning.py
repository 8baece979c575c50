"""Earlier reasoning that clients send back reaches the chat template, if its seal is genuine. The node echoes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import EchoEngine, Stack

MODEL = "acme/ponderer"
SAID = "<think>So</think>Fine"
IGNORED = "X-Penstock-Ignored-Fields"


@pytest.fixture(scope="module")
def engine(shared_engine: EchoEngine) -> EchoEngine:
    engine = type(shared_engine)()
    engine.tokenizer.reasoning_parser = "think"
    return engine


@pytest.fixture(scope="module")
def url(stack: Stack, engine: EchoEngine, shared_engine: EchoEngine) -> str:
    stack.start_node(engine, model=MODEL, pool="ponderer")
    stack.start_node(type(shared_engine)(), model="acme/parrot", pool="parrot")
    other = type(shared_engine)()
    other.tokenizer.reasoning_parser = "think"
    stack.start_node(other, model="acme/muser", pool="muser")
    url: str = stack.start_gateway()
    return url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def reasoning_in(engine: EchoEngine) -> list[str | None]:
    """Return the reasoning of the assistant's messages that the template got."""
    assert engine.tokenizer.last_chat is not None
    return [one.get("reasoning") for one in engine.tokenizer.last_chat[0] if one["role"] == "assistant"]


def message(http: httpx.Client, turns: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 64, "thinking": {"type": "enabled", "budget_tokens": 1024}, **fields}
    answer = http.post("/v1/messages", json={**body, "messages": turns})
    assert answer.status_code == 200, answer.text
    return answer


def test_thinking_comes_back_with_its_signature(http: httpx.Client, engine: EchoEngine) -> None:
    asked = [{"role": "user", "content": SAID}]
    answer = message(http, asked)
    content, usage = answer.json()["content"], answer.json()["usage"]
    assert content[0]["thinking"] == "So" and len(content[0]["signature"]) == 44
    assert usage["output_tokens_details"] == {"thinking_tokens": len("<think>So</think>")}
    events = message(http, asked, stream=True).text.split("\n\n")
    deltas = [json.loads(one.partition("data: ")[2])["delta"] for one in events if "signature_delta" in one]
    assert deltas == [{"type": "signature_delta", "signature": content[0]["signature"]}]
    follow = [*asked, {"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]
    again = message(http, follow)
    assert reasoning_in(engine) == ["So"] and IGNORED not in again.headers


@pytest.mark.parametrize(
    "change",
    [{"thinking": "Sо"}, {"signature": "EqQBCgIYAhIM"}, {"signature": ""}, {"type": "redacted_thinking"}],
    ids=str,
)
def test_thinking_that_was_changed_or_is_of_another_server_is_left_out_and_named(
    http: httpx.Client, engine: EchoEngine, change: dict[str, Any]
) -> None:
    asked = [{"role": "user", "content": SAID}]
    content = message(http, asked).json()["content"]
    later = message(http, [{"role": "user", "content": "<think>Hm</think>Now"}]).json()["content"]
    turns = [*asked, {"role": "assistant", "content": [content[0] | change, *content[1:]]}, *asked]
    turns += [{"role": "assistant", "content": later}, *asked]
    answer = message(http, turns)
    assert reasoning_in(engine) == [None, "Hm"]
    assert answer.headers[IGNORED] == f"messages.{change.get('type', 'thinking')}"


def test_thinking_of_another_model_is_left_out(http: httpx.Client, engine: EchoEngine) -> None:
    asked = [{"role": "user", "content": SAID}]
    content = message(http, asked, model="acme/muser").json()["content"]
    answer = message(http, [*asked, {"role": "assistant", "content": content}, *asked])
    assert reasoning_in(engine) == [None] and answer.headers[IGNORED] == "messages.thinking"


def response(http: httpx.Client, given: Any, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": given, "include": ["reasoning.encrypted_content"], **fields}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_sealed_reasoning_of_responses_comes_back(http: httpx.Client, engine: EchoEngine) -> None:
    user = {"role": "user", "content": SAID}
    output = response(http, [user], store=False).json()["output"]
    assert output[0]["encrypted_content"] and output[0]["content"][0]["text"] == "So"
    text = response(http, [user], store=False, stream=True).text
    assert text.count(f'"encrypted_content":"{output[0]["encrypted_content"]}"') == 2
    hidden = {name: value for name, value in output[0].items() if name != "content"}
    for item, want, ignored in (
        (output[0], "So", None),
        (hidden, "So", None),
        (output[0] | {"encrypted_content": None}, "So", None),
        (hidden | {"encrypted_content": "gAAAAABo"}, None, "input.reasoning"),
        (hidden | {"encrypted_content": hidden["encrypted_content"].swapcase()}, None, "input.reasoning"),
    ):
        answer = response(http, [user, item, output[1], user], store=False)
        assert (reasoning_in(engine), answer.headers.get(IGNORED)) == ([want], ignored)
    elsewhere = response(http, [user], model="acme/muser", store=False).json()["output"]
    answer = response(http, [user, *elsewhere, user], store=False)
    assert (reasoning_in(engine), answer.headers[IGNORED]) == ([None], "input.reasoning")


def test_reasoning_of_a_stored_response_is_known(http: httpx.Client, engine: EchoEngine) -> None:
    first = response(http, SAID).json()
    usage = first["usage"]["output_tokens_details"]
    assert usage == {"reasoning_tokens": len("<think>So</think>")}
    stored = http.get(f"/v1/responses/{first['id']}").json()["output"]
    assert stored == first["output"]
    response(http, "And?", previous_response_id=first["id"])
    assert reasoning_in(engine) == ["So"]


def test_reasoning_content_of_chats_reaches_the_template(http: httpx.Client, engine: EchoEngine) -> None:
    user = {"role": "user", "content": SAID}
    body: dict[str, Any] = {"model": MODEL, "messages": [user]}
    first = http.post("/v1/chat/completions", json=body).json()
    assert first["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>So</think>")}
    turn = first["choices"][0]["message"]
    for said in (turn, {"role": "assistant", "content": "Fine", "reasoning": "So"}):
        http.post("/v1/chat/completions", json={**body, "messages": [user, said, user]}).raise_for_status()
        assert reasoning_in(engine) == ["So"]


def test_job_tells_how_many_tokens_were_reasoning(http: httpx.Client) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": SAID}]}
    answer = http.post("/v1/chat/completions", json=chat)
    job = http.get(f"/v1/jobs/{answer.headers['X-Penstock-Job']}").json()
    assert job["ledger"]["usage"]["reasoning_tokens"] == len("<think>So</think>")


def test_budget_of_a_model_that_does_not_reason_is_ignored_and_named(http: httpx.Client) -> None:
    chat = {"model": "acme/parrot", "messages": [{"role": "user", "content": "x"}]}
    answer = http.post("/v1/chat/completions", json=chat | {"thinking_budget_tokens": 5})
    assert (answer.status_code, answer.headers[IGNORED]) == (200, "thinking_budget_tokens")
    answer = message(http, [{"role": "user", "content": "x"}], model="acme/parrot")
    assert answer.headers[IGNORED] == "thinking.budget_tokens"
