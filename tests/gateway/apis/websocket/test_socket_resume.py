"""Streams that survive their WebSocket: resumed after any event or after a gateway's death, and slow readers."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until
from websockets.exceptions import ConnectionClosed

from penstock.gateway.http import socket_protocol
from tests.gateway.apis.websocket.raw_socket import TEXT, RawSocket
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.gateway.socket_client import Message, SocketClient, data_of, is_end, socket_to, text_of
from tests.gateway.test_process import gateway_process

PROMPT = "gates open by pressure"
LARGE = {"messages": [{"role": "user", "content": "x" * 250}], "n": 8, "logprobs": True, "top_logprobs": 20}
"""Its stream is larger than the buffers of a connection that is not read."""


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/completions", "/v1/chat/completions"])
def test_stream_resumes_after_any_event_at_another_gateway(
    stack: Stack, url: str, engine: EchoEngine, path: str
) -> None:
    engine.step_s = 0.01
    with socket_to(url) as socket:
        socket.submit("a", PROMPT, path=path)
        whole = [message for message in socket.end_of("a") if message["type"] == "event"]
    assert len(whole) > 2  # a busy machine sends several tokens in one event
    job = httpx.get(f"{url}/v1/jobs?limit=1", timeout=60).json()["data"][0]["id"]
    with socket_to(stack.start_gateway()) as other:
        for at, message in enumerate(whole):
            if path == "/v1/jobs":
                other.send("attach", "r", job=job, after=message["event_id"])
            else:
                other.submit("r", PROMPT, path=path, after=message["event_id"])
            rest = other.end_of("r")
            assert rest[0].get("jobs") == [job] and rest[-1]["type"] == "end", rest
            assert _said(rest) == _said(whole[at + 1 :])


def _said(messages: list[Message]) -> list[Any]:
    """Return the events without the creation time, which differs in a resumed stream."""
    return [{**data, "created": None} for data in data_of(messages)]


def test_attach_reads_the_chunks_of_any_job_from_its_beginning_or_after_a_number(
    url: str, http: httpx.Client, engine: EchoEngine
) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]})
    with socket_to(url) as socket:
        socket.send("attach", "a", job=answer.headers["x-penstock-job"])
        whole = socket.end_of("a")
        assert text_of(whole) == PROMPT
        last = data_of(whole)[-1]["index"]
        socket.send("attach", "b", job=answer.headers["x-penstock-job"], after=0)
        assert data_of(socket.end_of("b")) == data_of(whole)[1:]
        socket.send("attach", "c", job=answer.headers["x-penstock-job"], after=last)
        assert [message["type"] for message in socket.end_of("c")] == ["accepted", "end"]


def test_streams_of_a_killed_gateway_continue_at_another_with_one_outcome_each(
    redis_url: str, stack: Stack, shared_engine: EchoEngine
) -> None:
    engine = EchoEngine()
    engine.step_s = 0.03
    stack.start_node(engine, model="acme/lasting", pool="lasting", reattach_grace_ms=60_000)
    prompts = {f"s{number}": f"number {number} " * 8 for number in range(6)}
    paths = dict.fromkeys(prompts, "/v1/completions") | {"s0": "/v1/jobs", "s1": "/v1/jobs"}
    said: dict[str, list[Message]] = {tag: [] for tag in prompts}
    with gateway_process(redis_url) as (process, url), socket_to(url) as socket:
        for tag, prompt in prompts.items():
            socket.submit(tag, prompt, path=paths[tag], body={"model": "acme/lasting"})
        while min(map(len, said.values())) < 4:
            message = socket.receive()
            said[message["id"]].append(message)
        process.kill()
        with pytest.raises(ConnectionClosed):
            while True:
                message = socket.receive()
                said[message["id"]].append(message)
    assert not any(is_end(messages[-1]) for messages in said.values())
    with socket_to(stack.start_gateway()) as socket:
        for tag, messages in said.items():
            after = messages[-1]["event_id"]
            if paths[tag] == "/v1/jobs":
                socket.send("attach", tag, job=messages[0]["jobs"][0], after=after)
            else:
                body = {"model": "acme/lasting"}
                socket.submit(tag, prompts[tag], path=paths[tag], body=body, after=after)
        rest = socket.until_end_of(*prompts)
    for tag, messages in rest.items():
        assert messages[-1]["type"] == "end"
        assert text_of([*said[tag], *messages]) == prompts[tag]
    outcomes = [data for tag in ("s0", "s1") for data in data_of(rest[tag]) if "outcome" in data]
    assert [data["outcome"]["state"] for data in outcomes] == ["succeeded", "succeeded"]


# The end of a gateway. ---------------------------------------------------------------------------


def test_stopping_gateway_lets_streams_end_refuses_new_ones_and_closes_idle_websockets(
    redis_url: str, engine: EchoEngine
) -> None:
    engine.step_s = 0.02
    with gateway_process(redis_url) as (process, url), socket_to(url) as busy, socket_to(url) as idle:
        busy.submit("a", "a" * 60)
        busy.until(lambda message: message["type"] == "event")
        process.send_signal(signal.SIGTERM)
        assert close_code_of(idle) == 1012
        busy.submit("b", "late")
        found = busy.until_end_of("a", "b")
        assert text_of(found["a"]) in "a" * 60 and found["a"][-1]["type"] == "end"
        (refused,) = found["b"]
        assert (refused["type"], refused["status"], refused["error"]["code"]) == ("refused", 503, "gateway_stopped")
        assert close_code_of(busy) == 1012
        _, log = process.communicate(timeout=60)
    assert "Traceback" not in log
    sockets = [json.loads(line) for line in log.splitlines() if '"socket"' in line]
    assert sorted(line["num_streams"] for line in sockets) == [0, 1]


def test_stop_past_its_drain_ends_each_stream_with_an_error(redis_url: str, engine: EchoEngine) -> None:
    engine.step_s = 0.2
    with gateway_process(redis_url, PENSTOCK_GATEWAY_DRAIN_S="1") as (process, url), socket_to(url) as socket:
        socket.submit("a", "a" * 250)
        socket.submit("b", "b" * 250, path="/v1/jobs")
        socket.until(lambda message: message["type"] == "event")
        stopped_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        found = socket.until_end_of("a", "b")
        assert close_code_of(socket) == 1012
        _, log = process.communicate(timeout=60)
        assert 1 <= time.monotonic() - stopped_s < 40  # The streams would last for fifty.
    assert {messages[-1]["error"]["code"] for messages in found.values()} == {"gateway_stopped"}
    assert "Traceback" not in log and '"ERROR"' not in log


def close_code_of(socket: SocketClient) -> int:
    with pytest.raises(ConnectionClosed) as caught:
        while True:
            socket.receive()
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code


# Slow readers. -----------------------------------------------------------------------------------


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The connections whose send buffer was full."""
    found: set[Any] = set()
    pause = socket_protocol.BoundedSocket.pause_writing

    def noting(protocol: Any) -> None:
        found.add(protocol)
        pause(protocol)

    monkeypatch.setattr(socket_protocol.BoundedSocket, "pause_writing", noting)
    return found


def submit_large(connection: RawSocket, *tags: str) -> None:
    for tag in tags:
        connection.send_message(
            type="submit", id=tag, path="/v1/chat/completions", body={"model": MODEL, **LARGE, "max_tokens": 250}
        )


def test_slow_reader_holds_little_memory_stops_no_other_and_gets_all_in_order(
    url: str, engine: EchoEngine, protocols: set[Any]
) -> None:
    with RawSocket(url, received_bytes=4096) as slow, socket_to(url) as quick:
        submit_large(slow, "a", "b", "c")
        time.sleep(1)
        for number in range(10):
            quick.submit(str(number), "hello")
            assert text_of(quick.end_of(str(number))) == "hello"
        (protocol,) = protocols
        assert protocol.transport.get_write_buffer_size() < 512 << 10
        texts: dict[str, list[str]] = {tag: [""] * 8 for tag in "abc"}
        ended: list[str] = []
        while len(ended) < 3:
            received = slow.receive()
            assert received.opcode == TEXT
            message = json.loads(received.data)
            if message["type"] == "event":
                for choice in message["data"]["choices"]:
                    texts[message["id"]][choice["index"]] += choice["delta"].get("content") or ""
            elif message["type"] == "end":
                ended.append(message["id"])
            else:
                assert message["type"] == "accepted"
    assert texts == {tag: ["x" * 250] * 8 for tag in "abc"}


def test_streams_of_a_reader_that_takes_nothing_end_with_a_named_error(
    stack: Stack, shared_engine: EchoEngine, protocols: set[Any]
) -> None:
    url = stack.start_gateway(send_timeout_s=0.3, keep_alive_s=0.1, first_chunk_wait_s=0.1)
    with RawSocket(url, received_bytes=4096) as stuck, httpx.Client(base_url=url, timeout=60) as http:
        submit_large(stuck, "a", "b")
        wait_until(lambda: protocols)
        time.sleep(1.5)
        ends: dict[str, Message] = {}
        while len(ends) < 2:
            message = json.loads(stuck.receive().data)
            if is_end(message):
                assert message["id"] not in ends
                ends[message["id"]] = message
        assert "slow_reader" in {message.get("error", {}).get("code") for message in ends.values()}
        assert http.get("/health").status_code == 200


def test_concurrent_websockets_do_not_mix(url: str, engine: EchoEngine) -> None:
    failures: list[str] = []

    def talk(number: int) -> None:
        with socket_to(url) as socket:
            prompts = {f"{number}.{at}": f"socket {number} stream {at} " * 4 for at in range(8)}
            for tag, prompt in prompts.items():
                socket.submit(tag, prompt)
            found = {tag: text_of(messages) for tag, messages in socket.until_end_of(*prompts).items()}
            if found != prompts:
                failures.append(str(number))

    with ExitStack() as threads:
        for number in range(16):
            thread = threading.Thread(target=talk, args=(number,))
            thread.start()
            threads.callback(thread.join)
    assert failures == []


@pytest.fixture(autouse=True)
def _full_pace(shared_engine: EchoEngine) -> Iterator[None]:
    yield
    shared_engine.step_s = 0.0
