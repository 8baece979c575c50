"""Frames that violate the WebSocket protocol or flood it: close codes, and the effect on other callers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until

from penstock.gateway.http import protocol, socket_protocol
from penstock.gateway.request.reading import BODY_STEP_BYTES, MAX_BODY_BYTES_HELD_OF_TENANT
from tests.gateway.apis.websocket.raw_socket import (
    BINARY,
    CLOSE,
    CONT,
    HANDSHAKE,
    PING,
    PONG,
    TEXT,
    RawSocket,
    ServerFrame,
    frame,
)
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.gateway.socket_client import text_of

MAX_HOLD_S = 0.03
"""CPU seconds of one round of the event loop. A round parses for 2 ms; the rest is for a slow machine."""
LOOK_S = 0.002
"""Looking at each round would take a whole core."""
SUBMIT = json.dumps(
    {"type": "submit", "id": "a", "path": "/v1/completions", "body": {"model": MODEL, "prompt": "hello"}}
).encode()


@pytest.fixture
def raw(url: str, engine: EchoEngine) -> Iterator[RawSocket]:
    with RawSocket(url) as connection:
        yield connection


@contextmanager
def longest_round(stack: Stack) -> Iterator[list[float]]:
    """Measure the CPU seconds of the longest round of the gateway's event loop within the block, LOOK_S included."""
    longest, is_over = [0.0], threading.Event()

    async def watch() -> None:
        while not is_over.is_set():
            before_s = time.thread_time()
            await asyncio.sleep(LOOK_S)
            longest[0] = max(longest[0], time.thread_time() - before_s)

    # A collection of all objects of the test process takes longer than a round; a gateway freezes its own at the start.
    gc.collect()
    gc.disable()
    watching = asyncio.run_coroutine_threadsafe(watch(), stack.loop)
    try:
        yield longest
    finally:
        gc.enable()
        is_over.set()
        watching.result(30)


def assert_no_long_round(stack: Stack, load: Callable[[], None]) -> None:
    """Assert that no load holds the loop each time. Other work on the machine may lengthen any single round."""
    found_s = []
    for _ in range(3):
        with longest_round(stack) as longest:
            load()
        if longest[0] < MAX_HOLD_S:
            return
        found_s.append(longest[0])
    pytest.fail(f"rounds of {found_s} s")


# The protocol. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64])
def test_fragments_make_one_message_with_pings_between_them(raw: RawSocket, size: int) -> None:
    parts = [SUBMIT[at : at + size] for at in range(0, len(SUBMIT), size)]
    frames = [frame(TEXT if at == 0 else CONT, part, fin=at == len(parts) - 1) for at, part in enumerate(parts)]
    raw.send(b"".join(one + frame(PING, b"%d" % at) for at, one in enumerate(frames[:-1])), frames[-1])
    pongs = [raw.receive() for _ in frames[:-1]]
    assert pongs == [ServerFrame(PONG, b"%d" % at) for at in range(len(frames) - 1)]
    assert text_of(raw.messages()) == "hello"


def test_message_in_bytes_that_arrive_one_by_one_is_handled(raw: RawSocket) -> None:
    for byte in frame(TEXT, SUBMIT):
        raw.send(bytes([byte]))
    assert text_of(raw.messages()) == "hello"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(TEXT, SUBMIT, masked=False), 1002),
        (frame(TEXT, SUBMIT, reserved=4), 1002),
        (frame(TEXT, SUBMIT, reserved=1), 1002),
        (frame(3), 1002),
        (frame(11), 1002),
        (frame(CONT, SUBMIT), 1002),
        (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
        (frame(PING, b"a", fin=False), 1002),
        (frame(PING, b"a" * 126), 1002),
        (frame(TEXT, b'{"id": "\xff"}'), 1007),
        (frame(TEXT, b'{"id": "\xed\xa0\x80"}'), 1007),
        (frame(TEXT, b"\xe2", fin=False) + frame(CONT, b"\x82", fin=False) + frame(CONT, b"("), 1007),
        (frame(BINARY, SUBMIT), 1003),
        (frame(TEXT)[:1] + b"\xff" * 9, 1009),
        (frame(TEXT, b"a" * (9 << 20))[:20], 1009),
        (frame(TEXT, b"a" * (6 << 20), fin=False) + frame(CONT, b"a" * (3 << 20)), 1009),
        (frame(CLOSE, b"\x03\xe8"), 1000),
        (frame(TEXT, b"{", fin=False) + frame(CLOSE, b"\x03\xe8"), 1000),
        (frame(CLOSE, b"\x0b\xb8so"), 3000),
        (frame(CLOSE), 1005),
        (frame(CLOSE, b"\x03"), 1002),
        (frame(CLOSE, b"\x03\xec"), 1002),
        (frame(CLOSE, b"\x03\xed"), 1002),
        (frame(CLOSE, b"\x03\xe7"), 1002),
        (frame(CLOSE, b"\x03\xe8\xff"), 1007),
    ],
)
def test_server_closes_with_the_code_of_the_violation(raw: RawSocket, sent: bytes, code: int) -> None:
    raw.send(sent)
    assert raw.close_code() == code


def test_messages_before_a_violation_are_answered_or_dropped_but_the_close_comes(raw: RawSocket) -> None:
    raw.send(frame(PING, b"first"), frame(TEXT, SUBMIT, masked=False))
    assert raw.receive() == ServerFrame(PONG, b"first")
    assert raw.close_code() == 1002


def test_unfinished_message_of_a_lost_connection_affects_no_other(url: str, http: httpx.Client) -> None:
    with RawSocket(url) as connection:
        connection.send(frame(TEXT, SUBMIT)[:-1])
    assert http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}).status_code == 200


def test_silent_client_gets_pings_and_is_closed_without_pongs(
    stack: Stack, shared_engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.app.PING_INTERVAL_S", 0.2)
    monkeypatch.setattr("penstock.gateway.app.PING_TIMEOUT_S", 0.3)
    with RawSocket(stack.start_gateway()) as connection:
        assert connection.receive().opcode == PING
        second = connection.receive()
        assert (second.opcode, second.close_code) == (CLOSE, 1011)


# The handshake. ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-WebSocket-Key": ""}, 400),
        ({"Sec-WebSocket-Key": "short"}, 400),
        ({"Sec-WebSocket-Version": "12"}, 400),
        ({"Connection": "keep-alive"}, 426),
        ({"Upgrade": "h2c"}, 426),
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://gateway"}, 101),
        ({"X-Long": "x" * 9000}, 431),
        ({"X-Long": "x" * 70_000}, 431),
        ({f"X-{number}": "1" for number in range(200)}, 431),
        ({"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"}, 101),
    ],
)
def test_handshake_is_answered(url: str, engine: EchoEngine, headers: dict[str, str], status: int) -> None:
    with RawSocket(url, opens=False) as connection:
        answered, head = connection.ask(headers)
        assert answered == status, head
        assert b"permessage-deflate" not in head


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /v1/stream?x=1 HTTP/1.1", 101),
        ("POST /v1/stream HTTP/1.1", 405),
        ("GET /v1/models HTTP/1.1", 200),
        ("GET /v1/streams HTTP/1.1", 404),
    ],
)
def test_only_the_path_of_websockets_upgrades(url: str, engine: EchoEngine, line: str, status: int) -> None:
    with RawSocket(url, opens=False) as connection:
        assert connection.ask({}, line=line)[0] == status


def test_allowed_pages_may_open_a_websocket(stack: Stack, shared_engine: EchoEngine) -> None:
    url = stack.start_gateway(cors_origins=("https://page.example",))
    with RawSocket(url, Origin="https://page.example"), RawSocket(url, opens=False) as other:
        assert other.ask({"Origin": "https://other.example"})[0] == 403


@pytest.mark.parametrize("origin", ["http://[", "null", "https://", "//"])
def test_origin_that_is_no_page_of_this_gateway_may_not(url: str, engine: EchoEngine, origin: str) -> None:
    with RawSocket(url, opens=False) as connection:
        assert connection.ask({"Origin": origin})[0] == 403


def test_frames_right_after_the_handshake_are_handled(url: str, engine: EchoEngine) -> None:
    with RawSocket(url, opens=False) as connection:
        head = "\r\n".join(f"{name}: {value}" for name, value in HANDSHAKE.items())
        early = f"GET /v1/stream HTTP/1.1\r\n{head}\r\n\r\n".encode() + frame(PING, b"early") + frame(TEXT, SUBMIT)
        connection.socket.sendall(early)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += connection.socket.recv(1)
        assert answer.startswith(b"HTTP/1.1 101")
        assert connection.receive() == ServerFrame(PONG, b"early")
        assert text_of(connection.messages()) == "hello"


# Floods. -----------------------------------------------------------------------------------------

FLOODS = {
    "pings": frame(PING) * 20_000,
    "empty messages": frame(TEXT) * 400 + frame(PING) * 16_000,
    "empty fragments": frame(TEXT, b" ", fin=False) + frame(CONT, b"", fin=False) * 20_000 + frame(CONT, SUBMIT),
    "tiny fragments": frame(TEXT, b" ", fin=False) + frame(CONT, b" ", fin=False) * 20_000 + frame(CONT, SUBMIT),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_flood_of_tiny_frames_does_not_hold_the_event_loop(
    stack: Stack, url: str, engine: EchoEngine, kind: str
) -> None:
    def flood() -> None:
        with RawSocket(url) as raw:
            reader = threading.Thread(target=_read_until_closed, args=(raw,), daemon=True)
            reader.start()
            raw.send(FLOODS[kind], frame(CLOSE, b"\x03\xe8"))
            reader.join(60)
            assert not reader.is_alive()

    assert_no_long_round(stack, flood)


def _read_until_closed(raw: RawSocket) -> None:
    assert raw.close_code() == 1000


def test_large_message_does_not_hold_the_event_loop(stack: Stack, raw: RawSocket) -> None:
    body = {"model": MODEL, "prompt": "x", "logit_bias": {}, "user": "u" * (7 << 20)}
    message = json.dumps({"type": "submit", "id": "a", "path": "/v1/completions", "body": body}).encode()

    def send() -> None:
        raw.send(frame(TEXT, message))
        assert text_of(raw.messages()) == "x"

    assert_no_long_round(stack, send)


def test_pinging_client_that_reads_nothing_costs_little_memory_and_is_disconnected(
    stack: Stack, url: str, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "TAKE_TIMEOUT_S", 0.5)
    sockets: list[Any] = []
    monkeypatch.setattr(
        socket_protocol.BoundedSocket, "pause_writing", _noting(socket_protocol.BoundedSocket.pause_writing, sockets)
    )
    with RawSocket(url, received_bytes=4096) as connection:
        flood = frame(PING, b"p" * 125) * 1000
        try:
            for _ in range(200):
                connection.send(flood)
        except OSError:
            pass
        else:
            pytest.fail("a client that reads nothing was read for ever")
    (connected,) = set(sockets)
    assert connected.transport.get_write_buffer_size() < 256 << 10


def _noting(pause: Any, found: list[Any]) -> Any:
    def noting(protocol: Any) -> None:
        found.append(protocol)
        pause(protocol)

    return noting


def test_flood_of_messages_is_slowed_down_and_all_are_answered(stack: Stack, raw: RawSocket) -> None:
    num_messages = 400

    def flood() -> None:
        started_s = time.monotonic()
        raw.send(frame(TEXT, b"[]") * num_messages)
        for _ in range(num_messages):
            assert json.loads(raw.receive().data)["type"] == "refused"
        assert time.monotonic() - started_s > 1.5

    assert_no_long_round(stack, flood)


# Memory of large messages. -----------------------------------------------------------------------


def large_message() -> bytes:
    body = {"model": MODEL, "prompt": "hello", "user": "u" * (3 << 20)}
    message: bytes = frame(
        TEXT, json.dumps({"type": "submit", "id": "a", "path": "/v1/completions", "body": body}).encode()
    )
    return message


def test_slow_large_messages_delay_no_other(stack: Stack, shared_engine: EchoEngine) -> None:
    url = stack.start_gateway(body_timeout_s=120)
    with contextlib.ExitStack() as sockets:
        *slow_ones, one, other = (sockets.enter_context(RawSocket(url)) for _ in range(5))
        for slow in slow_ones:
            slow.send(large_message()[: 1 << 20])
        time.sleep(0.1)
        for quick in (one, other):
            quick.send(large_message())
        assert [text_of(quick.messages()) for quick in (one, other)] == ["hello"] * 2


def held_bytes(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("penstock_gateway_body_bytes "))


def wait_for_held(url: str, num_bytes: int) -> None:
    wait_until(lambda: held_bytes(url), lambda held: held == num_bytes)


def test_a_slow_message_counts_as_held_memory_unless_it_is_short(url: str, shared_engine: EchoEngine) -> None:
    with RawSocket(url) as short, RawSocket(url) as long:
        short.send(large_message()[: socket_protocol.MAX_SMALL_BYTES])
        long.send(large_message()[: 3 * socket_protocol.MAX_SMALL_BYTES])
        wait_for_held(url, BODY_STEP_BYTES)
    wait_for_held(url, 0)


def test_a_message_that_waits_for_memory_stays_with_its_sender(stack: Stack, shared_engine: EchoEngine) -> None:
    url, message = stack.start_gateway(body_timeout_s=120), large_message()
    # Beside one message of the largest size, one tenant's slow messages have so many steps.
    num_steps = (MAX_BODY_BYTES_HELD_OF_TENANT - (8 << 20)) // BODY_STEP_BYTES
    with contextlib.ExitStack() as exits:
        for _ in range(num_steps + 1):
            exits.enter_context(RawSocket(url)).send(message[: 2 * socket_protocol.MAX_SMALL_BYTES])
        wait_for_held(url, (num_steps + 1) * BODY_STEP_BYTES)
        waiting = exits.enter_context(RawSocket(url))
        waiting.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        waiting.socket.settimeout(1.0)
        num_sent = 0
        with pytest.raises(TimeoutError):
            for at in range(0, len(message), 4096):
                waiting.send(message[at : at + 4096])
                num_sent += 4096
    assert num_sent < 400_000


def test_slow_large_message_is_closed(stack: Stack, shared_engine: EchoEngine) -> None:
    with RawSocket(stack.start_gateway(body_timeout_s=0.3)) as slow:
        slow.send(large_message()[: 1 << 20])
        assert slow.close_code() == 1008
