"""Bodies that arrive slowly, during other requests of the same tenant."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from fakes.waiting import Deadline, wait_until

from penstock.gateway.request.reading import BODY_STEP_BYTES, MAX_SMALL_BYTES_HELD_OF_TENANT
from tests.gateway.conftest import MODEL, EchoEngine

BODY = json.dumps({"model": MODEL, "prompt": "hello"}).encode()
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NUM_SLOW = 5


def in_chunks() -> Iterator[bytes]:
    yield BODY


def held_bytes(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("penstock_gateway_body_bytes "))


@pytest.mark.parametrize("length", ["Transfer-Encoding: chunked", f"Content-Length: {8 << 20}"])
def test_slow_bodies_hold_what_has_arrived_and_delay_no_other(url: str, engine: EchoEngine, length: str) -> None:
    address, part = urlsplit(url), b" " * (BODY_STEP_BYTES + 1)
    framed = b"%x\r\n%b\r\n" % (len(part), part) if "chunked" in length else part
    with ExitStack() as connections:
        for _ in range(NUM_SLOW):
            slow = connections.enter_context(socket.create_connection((address.hostname, address.port)))
            slow.sendall(f"{HEAD}{length}\r\n\r\n".encode() + framed)
        wait_until(lambda: held_bytes(url) >= NUM_SLOW * 2 * BODY_STEP_BYTES)
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{url}/v1/completions", content=in_chunks(), headers=headers, timeout=60)
        assert answer.json()["choices"][0]["text"] == "hello"
        assert held_bytes(url) == NUM_SLOW * 2 * BODY_STEP_BYTES
    wait_until(lambda: not held_bytes(url))


def test_many_small_bodies_of_one_tenant_take_bounded_memory_and_further_ones_are_refused(url: str) -> None:
    address, num_bytes = urlsplit(url), 200 << 10
    most = MAX_SMALL_BYTES_HELD_OF_TENANT // num_bytes
    begun = f"{HEAD}Content-Length: {num_bytes}\r\n\r\n".encode() + b" " * (num_bytes - 1)
    with ExitStack() as connections:
        slow = [
            connections.enter_context(socket.create_connection((address.hostname, address.port)))
            for _ in range(2 * most + 1)
        ]
        for one in slow:
            one.setblocking(False)
        left, refused, deadline = dict.fromkeys(slow, begun), b"", Deadline()
        # All but the last byte of each body, and one connection gets an answer.
        while b"body_memory_full" not in refused:
            deadline.check()
            for one in slow:
                with suppress(BlockingIOError, ConnectionError):
                    refused += b"" if b"body_memory_full" in refused else one.recv(1000)
                with suppress(BlockingIOError, ConnectionError):
                    left[one] = left[one][one.send(left[one]) :] if left[one] else b""
        assert refused.startswith(b"HTTP/1.1 503 ") and b'"body_memory_full"' in refused
        assert held_bytes(url) == most * num_bytes
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{url}/v1/completions", content=BODY, headers=headers, timeout=60)
        assert answer.json()["choices"][0]["text"] == "hello"
    wait_until(lambda: not held_bytes(url))
