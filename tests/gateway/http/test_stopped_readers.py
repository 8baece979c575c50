"""Clients that stop reading their streams, during the stream of another client."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fakes.waiting import Deadline, wait_until

from penstock.gateway.http.protocol import MAX_UNSENT_BYTES
from tests.gateway.conftest import EchoEngine, Stack

TCP_TABLE = Path("/proc/net/tcp")
NUM_STOPPED = 2
NUM_CHOICES, TEXT = 16, "x" * 250
LARGE = {"messages": [{"role": "user", "content": TEXT}], "n": NUM_CHOICES, "logprobs": True, "top_logprobs": 20}
"""Its answer has several megabytes."""
BODY = {"model": "acme/echo", "stream": True, **LARGE}
RECEIVE_BYTES = 4096
PAUSE_S = 0.02
"""Between two looks at the metrics, each of which takes milliseconds of CPU time."""


def stopped_reader(url: str, **options: object) -> socket.socket:
    """Ask for an answer, by default a stream, and read nothing of it."""
    body, address = json.dumps(BODY | options).encode(), urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    connection.connect((address.hostname, address.port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def num_kernel_bytes(connection: socket.socket) -> int:
    """Return the bytes that the kernel keeps on the gateway's side of a connection, by proc_net_tcp(5)."""
    port = connection.getsockname()[1]
    rows = [line.split() for line in TCP_TABLE.read_text().splitlines()[1:]]
    return next((int(row[4].split(":")[0], 16) for row in rows if int(row[2].split(":")[1], 16) == port), 0)


def num_open_streams(url: str) -> float:
    lines = httpx.get(url + "/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("penstock_http_open_streams "))


@pytest.mark.skipif(not TCP_TABLE.exists(), reason="needs /proc/net/tcp")
def test_readers_that_stop_are_cut_off_with_bounded_memory_while_another_reads_on(
    stack: Stack, shared_engine: EchoEngine
) -> None:
    url = stack.start_gateway(send_timeout_s=1.0)
    with contextlib.ExitStack() as open_connections:
        stopped = [open_connections.enter_context(stopped_reader(url)) for _ in range(NUM_STOPPED)]
        reading = open_connections.enter_context(ThreadPoolExecutor()).submit(
            httpx.post, url + "/v1/chat/completions", json=BODY, timeout=60
        )
        most_bytes, deadline = 0, Deadline()
        while (not reading.done() or num_open_streams(url)) and deadline.left_s():
            most_bytes = max(most_bytes, *map(num_kernel_bytes, stopped))
            time.sleep(0.1)
        answer = reading.result()
        assert answer.text.endswith("data: [DONE]\n\n")
        assert num_open_streams(url) == 0, "a reader that stopped is kept"
        assert MAX_UNSENT_BYTES / 2 < most_bytes < 4 * MAX_UNSENT_BYTES


def test_a_reader_that_pauses_gets_every_token_once(stack: Stack, shared_engine: EchoEngine) -> None:
    url, answer = stack.start_gateway(), b""
    with stopped_reader(url) as connection:
        connection.settimeout(30)
        # Meanwhile the buffers fill, and the stream goes on from the job's log.
        time.sleep(1)
        while not answer.endswith(b"0\r\n\r\n"):
            part = connection.recv(1 << 16)
            assert part, "the gateway hung up"
            answer += part
    body = b"".join(answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]).decode()
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    texts = [""] * NUM_CHOICES
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [TEXT] * NUM_CHOICES


def result_bytes(url: str) -> float:
    lines = httpx.get(url + "/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("penstock_gateway_result_bytes "))


def test_slow_reader_of_a_whole_answer_returns_the_memory_of_its_result(
    stack: Stack, shared_engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.stream.event_stream.MAX_KEPT_BYTES", 0)
    monkeypatch.setattr("penstock.gateway.stream.writer.MIN_BYTES_PER_S", 1 << 20)
    # For so long the result is kept, and must be seen.
    url = stack.start_gateway(send_timeout_s=1.0)
    with stopped_reader(url, stream=False, n=2) as connection:
        wait_until(lambda: result_bytes(url))
        deadline = Deadline()
        while result_bytes(url):
            deadline.check("the result is kept for the slow reader")
            connection.recv(100)
            time.sleep(PAUSE_S)
