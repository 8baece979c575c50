"""Memory of stored responses that readers and requests naming them use."""

from __future__ import annotations

import json
import socket
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fakes.waiting import wait_until

from penstock.contract.tool_formats import FORMATS
from penstock.gateway.apis.responses.record import (
    LARGE_RECORD_BYTES,
    PackedMessages,
    StoredResponse,
    decode_stored_response,
    decoding_bytes_to_claim,
)
from penstock.producer.parsing.parsed_text import AnswerFormat
from penstock.queue.wire import pack

MODEL = "acme/echo"
RECORD_BYTES = 600 << 10
MAX_WAIT_S = 0.3
THOUGHTS = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t" * RECORD_BYTES}]}
ECHOED = {"user": "u" * RECORD_BYTES}


@pytest.fixture(scope="module")
def narrow(stack: Any, shared_engine: Any) -> str:
    """A gateway with enough memory for one large record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.gateway.app.MAX_RESULT_BYTES_HELD_OF_TENANT", 3 * RECORD_BYTES)
        patch.setattr("penstock.gateway.app.MAX_RESULT_WAIT_S", MAX_WAIT_S)
        return str(stack.start_gateway())


def held_bytes(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("penstock_gateway_result_bytes "))


def slow_reader(url: str, path: str, body: dict[str, Any] | None = None) -> socket.socket:
    """Request an answer, and read nothing of it."""
    address, raw = urlsplit(url), b"" if body is None else json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


def created(url: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "hi", **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


@pytest.mark.parametrize(
    ("form", "least"),
    [("/{}/input_items", RECORD_BYTES), ("/{}", RECORD_BYTES), ("/{}?stream=true", RECORD_BYTES), ("", RECORD_BYTES)],
)
def test_slow_reader_of_a_large_record_holds_memory_of_the_budget(narrow: str, form: str, least: int) -> None:
    stored = created(narrow, input=[THOUGHTS, {"role": "user", "content": "hi"}], **ECHOED)
    path = f"/v1/responses{form.format(stored['id'])}"
    body = None if form else {"model": MODEL, "input": "hi", "stream": True, "store": False, **ECHOED}
    with slow_reader(narrow, path, body), slow_reader(narrow, path, body), slow_reader(narrow, path, body):
        held = wait_until(lambda: held_bytes(narrow), lambda held: held >= least)
        assert held <= 3 * RECORD_BYTES
    wait_until(lambda: not held_bytes(narrow))


def test_record_without_memory_for_it_is_refused_with_a_time_to_retry(narrow: str) -> None:
    stored = created(narrow, input=[THOUGHTS, {"role": "user", "content": "hi"}], **ECHOED)
    small = created(narrow)
    path = f"/v1/responses/{stored['id']}"
    with slow_reader(narrow, path), slow_reader(narrow, path), slow_reader(narrow, path):
        refused = wait_until(
            lambda: httpx.get(narrow + path + "/input_items", timeout=60), lambda one: one.status_code == 503
        )
        # Small records need no memory of the budget.
        assert httpx.get(f"{narrow}/v1/responses/{small['id']}", timeout=60).json() == small
    assert refused.json()["error"]["code"] == "answer_memory_full"
    assert int(refused.headers["retry-after"]) > 0
    answer = wait_until(lambda: httpx.get(narrow + path, timeout=60), lambda answer: answer.status_code != 503)
    assert answer.json() == stored


def test_answers_that_hold_large_records_do_not_wait_for_each_other(
    stack: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two records take the tenant's share but for some bytes. Results are not kept, so each one claims its memory, too.
    monkeypatch.setattr("penstock.gateway.app.MAX_RESULT_BYTES_HELD_OF_TENANT", 2 * RECORD_BYTES + 1500)
    monkeypatch.setattr("penstock.gateway.app.MAX_RESULT_WAIT_S", 3.0)
    monkeypatch.setattr("penstock.gateway.stream.event_stream.MAX_KEPT_BYTES", 0)
    url = stack.start_gateway()
    engine.step_s = 0.0005
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda _: created(url, input="x" * 200, **ECHOED), range(2)))
    assert [answer["output"][0]["content"][0]["text"] for answer in answers] == ["x" * 200] * 2
    assert held_bytes(url) == 0


def test_record_just_below_the_threshold_claims_nothing(narrow: str) -> None:
    stored = created(narrow, user="u" * (LARGE_RECORD_BYTES // 2))
    with slow_reader(narrow, f"/v1/responses/{stored['id']}"):
        time.sleep(0.1)
        assert held_bytes(narrow) == 0


def test_decoded_record_takes_no_more_memory_than_is_claimed() -> None:
    text = ("a" * 60 + "\N{GRINNING FACE}") * 4096
    packed = pack({"role": "user", "content": text})
    record = StoredResponse(
        1,
        False,
        AnswerFormat(FORMATS["hermes"]),
        b"{}",
        [("id", text.encode())],
        PackedMessages(packed, 1, 0, len(packed), 0),
        "r",
    )
    data = record.encode()

    def bytes_to_decode() -> int:
        tracemalloc.start()
        decoded = decode_stored_response(data)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert decoded == record
        return most_bytes

    # The least of some turns: other tests' servers live in threads of this process, and each read of a socket allocates
    # 256 KiB for a moment.
    assert len(data) + min(bytes_to_decode() for _ in range(5)) < decoding_bytes_to_claim(len(data)) * 1.01


def test_items_may_be_named_often_and_share_one_reading(
    api: openai.OpenAI, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (api.responses.create(model=MODEL, input=text).output[0].id for text in ("one", "two"))
    items: list[Any] = []
    for _ in range(3):
        items += [{"type": "item_reference", "id": one} for one in (first, second)]
        items.append({"role": "user", "content": "end"})
    # Both records and results fit once.
    monkeypatch.setattr("penstock.gateway.apis.responses.create.MAX_STORED_BYTES", 3000)
    api.responses.create(model=MODEL, input=items)
    assert [message["content"] for message in engine.tokenizer.last_chat[0]] == ["one", "two", "end"] * 3


def test_items_that_are_named_often_are_limited_before_they_are_copied(
    stack: Any, shared_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = stack.start_gateway(max_body_bytes=32 << 10)
    named = created(url, input="t" * 200)["output"][0]["id"]
    references = [{"type": "item_reference", "id": named}] * 250
    monkeypatch.setattr("penstock.gateway.apis.responses.create._packed_message", None)
    answer = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": references}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "conversation_too_large")


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_idempotency_key_belongs_to_one_value_of_store(http: httpx.Client, stores: bool, stream: bool) -> None:
    headers = {"Idempotency-Key": f"key-{time.time_ns()}"}
    body = {"model": MODEL, "input": "hi", "stream": stream}
    answers = [
        http.post("/v1/responses", json=body | {"store": store}, headers=headers) for store in (stores, not stores)
    ]
    assert [answer.status_code for answer in answers] == [200, 409]
    error = answers[1].json()["error"]
    assert (error["code"], error["param"]) == ("idempotency_conflict", "idempotency_key")
    again = http.post("/v1/responses", json=body | {"store": stores}, headers=headers)
    assert (again.status_code, again.headers["x-penstock-job"]) == (200, answers[0].headers["x-penstock-job"])
