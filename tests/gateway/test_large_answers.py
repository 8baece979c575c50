"""Large bodies and large answers at a gateway process, during the stream of another tenant.

They must not hold the gateway's event loop, increase its memory, or disturb that stream.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fakes.cover import FULL
from fakes.loop_holds import assert_loop_was_free
from fakes.processes.node_process import NodeProcess
from faults.tools.processes import GatewayProcess

from penstock.contract.errors import InvariantError
from penstock.contract.tenant import UNLIMITED
from penstock.gateway.apis.openai.schemas import ChatRequest
from penstock.gateway.request import parser_process
from penstock.gateway.request.encoding import decode_parsed_body
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from penstock.runtime.embedded_redis import EmbeddedRedis

MODEL = "reference"
MAX_BODY_BYTES = 8 << 20
MAX_GROWTH_MIB = 200
PROMPT_TOKENS = 4000
PIECED_TOKENS = 450
"""Of each prompt whose answer is checked whole: its log-probabilities take several pieces."""
TIMEOUT_S = 60.0


def filled(head: str, item: str, tail: str) -> bytes:
    """Return a body of almost the largest size."""
    count = (MAX_BODY_BYTES - len(head) - len(tail) - 1) // (len(item) + 1)
    return (head + ",".join([item] * count) + tail).encode()


CALL = '{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}'
TURN = '{"role":"assistant","tool_calls":[' + ",".join([CALL] * 128) + "]}"
CHAT = f'{{"model":"{MODEL}","max_tokens":2,"messages":['
HI = '{"role":"user","content":"hi"}'
ESCAPED = r"\u00e9"
LONG = MAX_BODY_BYTES - 200
BODIES: dict[str, tuple[str, bytes, str]] = {
    "115,000 tool calls": ("chat/", filled(CHAT, TURN, "]}"), "body_too_complex"),
    "4,097 tool calls": ("chat/", (CHAT + ",".join([TURN] * 33) + "]}").encode(), "invalid_request"),
    "one text": ("chat/", f'{CHAT}{{"role":"user","content":"{"a" * LONG}"}}]}}'.encode(), "context_length_exceeded"),
    "escapes": (
        "chat/",
        f'{CHAT}{{"role":"user","content":"{ESCAPED * (LONG // 6)}"}}]}}'.encode(),
        "context_length_exceeded",
    ),
    "many messages": ("chat/", filled(CHAT, HI, "]}"), "body_too_complex"),
    "4,096 messages": ("chat/", (CHAT + ",".join([HI] * 4096) + "]}").encode(), "context_length_exceeded"),
    "deep lists": ("chat/", (CHAT + HI + '],"metadata":' + "[" * LONG).encode(), "body_too_complex"),
    "many small lists": ("chat/", filled(CHAT + HI + '],"metadata":{"a":[', "[[]]", "]}}"), "body_too_complex"),
    "many tools": (
        "chat/",
        filled(CHAT + HI + '],"tools":[', '{"type":"function","function":{"name":"f"}}', "]}"),
        "body_too_complex",
    ),
    "a tool of many values": (
        "chat/",
        filled(
            CHAT + HI + '],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[', "12345", "]}}}]}"
        ),
        "invalid_request",
    ),
    "token ids": ("", filled(f'{{"model":"{MODEL}","prompt":[', "12345", "]}"), "context_length_exceeded"),
    "many unknown names": ("chat/", filled(CHAT + HI + "],", '"a":1', "}"), "body_too_complex"),
    "no JSON": ("chat/", b"x" * LONG, "invalid_request"),
}
EACH_RUN = ("115,000 tool calls", "4,097 tool calls", "4,096 messages", "deep lists", "token ids", "no JSON")
"""Each answer comes from one of them at least. `make check-full` sends all."""
NUM_AT_ONCE = 12 if FULL else 4


@dataclass
class Neighbor:
    """A well-behaved tenant that streams one answer after the other."""

    url: str
    key: str
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        """Stream until canceled."""
        body = {"model": MODEL, "prompt": "b", "max_tokens": 200, "stream": True}
        with httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=bearer(self.key)) as http:
            while not stop.is_set():
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    self._read(answer, stop)

    def _read(self, answer: httpx.Response, stop: threading.Event) -> None:
        last_s = time.monotonic()
        for line in answer.iter_lines():
            if stop.is_set():
                return
            if '"error"' in line:
                self.errors.append(line)
            if line.startswith("data: {"):
                self.gaps_s.append(time.monotonic() - last_s)
                last_s = time.monotonic()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Front:
    gateway: GatewayProcess
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return self.gateway.url

    def post(self, path: str, content: bytes | dict[str, Any], tenant: str = "rude") -> httpx.Response:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = bearer(self.keys[tenant]) | {"content-type": "application/json"}
        return httpx.post(f"{self.url}/v1/{path}completions", content=raw, headers=headers, timeout=TIMEOUT_S)

    def parsers(self) -> list[int]:
        """Return the process ids of its parser processes."""
        tasks = Path(f"/proc/{self.gateway.pid}/task").iterdir()
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        return [pid for pid in children if b"parser_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    @contextmanager
    def undisturbed(self) -> Iterator[Neighbor]:
        """Fail if the block delays the neighbor's stream, holds the loop or increases the memory."""
        stop, neighbor = threading.Event(), Neighbor(self.url, self.keys["kind"])
        Path(f"/proc/{self.gateway.pid}/clear_refs").write_text("5")  # the peak begins anew
        before_mib = mib(self.gateway.pid, "VmRSS")
        with ThreadPoolExecutor(1) as pool:
            streaming = pool.submit(neighbor.run, stop)
            try:
                yield neighbor
            finally:
                stop.set()
                streaming.result(TIMEOUT_S)
        assert neighbor.gaps_s and not neighbor.errors
        assert mib(self.gateway.pid, "VmHWM") - before_mib < MAX_GROWTH_MIB
        assert_loop_was_free(f"{self.url}/metrics", self.keys["admin"])


def mib(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


async def add_keys(redis_url: str) -> dict[str, str]:
    redis = connect(redis_url)
    store = KeyStore(redis)
    scopes = {"rude": ("infer",), "kind": ("infer",), "admin": ("admin",)}
    keys = {tenant: (await store.add(tenant, scope, UNLIMITED))[0] for tenant, scope in scopes.items()}
    await redis.aclose()
    return keys


@contextmanager
def front_of(redis_url: str, keys: dict[str, str], **settings: object) -> Iterator[Front]:
    with GatewayProcess(redis_url, loop_watch_ms=5, **settings) as gateway:
        yield Front(gateway, keys)


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """A Redis with a node of the reference engine."""
    with EmbeddedRedis() as server, NodeProcess(server.url, step_s=0.005):
        yield server.url


@pytest.fixture(scope="module")
def keys(node: str) -> dict[str, str]:
    return asyncio.run(add_keys(node))


@pytest.fixture(scope="module")
def front(node: str, keys: dict[str, str]) -> Iterator[Front]:
    with front_of(node, keys) as front:
        yield front


def test_large_invalid_bodies_are_refused_outside_the_event_loop(front):
    with front.undisturbed():
        for name in BODIES if FULL else EACH_RUN:
            path, raw, code = BODIES[name]
            answer = front.post(path, raw)
            assert (400 <= answer.status_code < 500, answer.json()["error"]["code"]) == (True, code), name
    (parser,) = front.parsers()
    assert mib(parser, "VmHWM") < 50 + MAX_GROWTH_MIB


def test_large_bodies_are_parsed_one_at_a_time(front):
    path, raw, code = BODIES["115,000 tool calls"]
    with front.undisturbed(), ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        answers = [*pool.map(lambda _: front.post(path, raw), range(NUM_AT_ONCE))]
    assert [answer.json()["error"]["code"] for answer in answers] == [code] * NUM_AT_ONCE


def test_a_large_body_is_the_same_request_as_a_small_one(front):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hé"}], "logit_bias": {"7": 1.5}, "max_tokens": 3}
    headers = bearer(front.keys["kind"]) | {"content-type": "application/json", "idempotency-key": "same"}
    jobs = set()
    for padding in (b"", b" " * (300 << 10)):
        raw = json.dumps(body).encode() + padding
        answer = httpx.post(f"{front.url}/v1/chat/completions", content=raw, headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        jobs.add(answer.headers["x-penstock-job"])
    assert len(jobs) == 1


def test_errors_in_large_bodies_name_the_same_fields(front):
    for wrong in ({"temperature": 99}, {"nope": 1}, {"n": 17}, {"tools": [{"type": "x"}]}):
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **wrong}).encode()
        small, large = front.post("chat/", body), front.post("chat/", body + b" " * (300 << 10))
        assert (small.status_code, small.json()) == (large.status_code, large.json())
        assert small.status_code == 400


HUGE = 10**30
"""An integer that JSON and Python can hold, and msgpack cannot."""
HOSTILE: dict[str, tuple[str, dict[str, object]]] = {
    "token id": ("jobs", {"prompt": "a", "params": {"logit_bias": {"1" * 5000: 1}}}),
    "number": ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": HUGE}),
    "object": ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"a": HUGE}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_ends_the_parser_process(front, name):
    path, body = HOSTILE[name]
    send = partial(httpx.post, f"{front.url}/v1/{path}", timeout=TIMEOUT_S)
    headers = bearer(front.keys["rude"]) | {"content-type": "application/json"}
    front.post("chat/", b"[" * (9 << 10))
    parsers = front.parsers()
    raw = json.dumps({"model": MODEL, **body}).encode()
    small, large = (send(content=raw + padding, headers=headers) for padding in (b"", b" " * (300 << 10)))
    assert (small.status_code, small.json()) == (large.status_code, large.json())
    assert (small.status_code, small.json()["error"]["code"]) == (400, "invalid_request")
    assert front.parsers() == parsers != []


def test_a_bug_in_parsing_is_an_answer_of_the_parser_process(monkeypatch):
    monkeypatch.setattr(parser_process, "parse", lambda *_, **__: int("secret"))
    with pytest.raises(InvariantError, match="ValueError") as caught:
        decode_parsed_body(parser_process.answer_to_body(b"{}", ChatRequest))
    assert "secret" not in str(caught.value)


def test_a_parser_that_is_killed_is_replaced(front):
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode() + b" " * (300 << 10)
    assert front.post("", body).status_code == 200
    (parser,) = front.parsers()
    os.kill(parser, signal.SIGKILL)
    statuses = [front.post("", body).status_code for _ in range(2)]
    assert statuses[1] == 200
    assert front.parsers() != [parser]


def test_more_log_probabilities_than_a_request_may_have_are_refused_before_they_are_queued(front):
    prompts = [[7] * PROMPT_TOKENS] * 4
    answer = front.post("", {"model": MODEL, "prompt": prompts, "prompt_logprobs": 20, "n": 16, "max_tokens": 2})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt_logprobs")
    assert "336000 log-probabilities; a request may ask for at most 262144" in error["message"]
    answer = front.post("", {"model": MODEL, "prompt": ["a"] * 4, "logprobs": 20, "n": 16, "max_tokens": 1000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    answer = front.post("", {"model": MODEL, "prompt": ["a"] * 17, "n": 16})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert "limit of 256 choices per request" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_prompts_come_once_and_in_pieces(node, keys, stream):
    body = {"model": MODEL, "prompt": [[7] * PIECED_TOKENS] * 3, "prompt_logprobs": 20, "n": 16, "max_tokens": 2}
    with front_of(node, keys, max_logprobs=1 << 20) as front:
        front.post("", {"model": MODEL, "prompt": "warm", "max_tokens": 2})
        with front.undisturbed():
            answer = front.post("", {**body, "stream": stream})
    assert answer.status_code == 200
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for one in events for choice in one["choices"]]
    else:
        assert answer.headers["transfer-encoding"] == "chunked"
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [*range(48)]
    told = dict.fromkeys(range(48), 0)
    for choice in choices:
        told[choice["index"]] += len(choice.get("prompt_logprobs") or ())
    assert told == {index: PIECED_TOKENS if index % 16 == 0 else 0 for index in range(48)}


@pytest.mark.slow
def test_memory_is_bounded_while_clients_read_nothing_of_large_answers(node, keys):
    body = {"model": MODEL, "prompt": [7] * PROMPT_TOKENS, "prompt_logprobs": 20, "max_tokens": 2}
    connections = []
    with front_of(node, keys) as front, front.undisturbed():
        for number in range(24):
            raw = json.dumps({**body, "stream": number % 2 == 0}).encode()
            connections.append(ask_and_take_nothing(front, raw))
        # All have their first bytes, so that what follows waits for its readers.
        for connection in connections[:12]:
            connection.recv(1)
        time.sleep(1.0)
        kind = front.post("", {**body, "prompt": [7] * 1000}, tenant="kind")
        assert kind.status_code == 200 and len(kind.json()["choices"][0]["prompt_logprobs"]) == 1000
        for connection in connections:
            connection.close()


def ask_and_take_nothing(front: Front, raw: bytes) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(TIMEOUT_S)
    address = urlsplit(front.url)
    connection.connect((address.hostname, address.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    key = f"Authorization: Bearer {front.keys['rude']}\r\n"
    connection.sendall(f"{head}{key}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection
