"""Requests of each kind for gateways that are killed, readers of their answers, and their comparison."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.conftest import MODEL

TEXT = "A keeper holds the connection while its gateway is away; the answer goes on where it was. " * 2
PATIENCE_S = 300.0
_ID = re.compile(rb"(echo\.)?[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIME = re.compile(rb'"(created|created_at|completed_at)":\d+')
_WAITING = re.compile(rb": waiting[^\n]*\n\n?|event: ping\ndata: [^\n]*\n\n")


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request."""

    name: str
    path: str
    body: Mapping[str, Any]
    accept: str = ""
    num_jobs: int = 1


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], **fields}


CASES = (
    Case("chat", "/v1/chat/completions", _chat(stream=True, stream_options={"include_usage": True})),
    Case("chat as NDJSON", "/v1/chat/completions", _chat(stream=True), accept="application/x-ndjson"),
    Case("whole chat", "/v1/chat/completions", _chat()),
    Case(
        "completion",
        "/v1/completions",
        {"model": MODEL, "prompt": TEXT, "max_tokens": 150, "stream": True, "logprobs": 1},
    ),
    Case(
        "completions",
        "/v1/completions",
        {"model": MODEL, "prompt": [TEXT, TEXT[9:]], "max_tokens": 150, "stream": True},
        num_jobs=2,
    ),
    Case(
        "whole completions",
        "/v1/completions",
        {"model": MODEL, "prompt": [TEXT, TEXT[9:]], "max_tokens": 150, "n": 2},
        num_jobs=2,
    ),
    Case("message", "/v1/messages", _chat(stream=True, max_tokens=250)),
    Case("whole message", "/v1/messages", _chat(max_tokens=250)),
    Case("response", "/v1/responses", {"model": MODEL, "input": TEXT, "stream": True}),
    Case("whole response", "/v1/responses", {"model": MODEL, "input": TEXT, "store": False}),
)


def raw_request(case: Case, port: int, *, closes: bool) -> bytes:
    """Return the bytes of a request."""
    body = json.dumps(case.body).encode()
    lines = [f"POST {case.path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *([f"Accept: {case.accept}"] if case.accept else [])]
    lines += ["Connection: close"] if closes else []
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(slots=True)
class Answer:
    """What a client got."""

    head: bytes = b""
    body: bytes = b""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Silences of half a second and more: when they ended, and how long they were."""


class BrokenAnswerError(Exception):
    """An answer is not what HTTP allows."""


class Reader:
    """Reads one answer after another from one connection, and checks each byte of the framing."""

    def __init__(self, port: int, *, at_once: int, pause_s: float = 0.0) -> None:
        self._port, self._at_once, self._pause_s = port, at_once, pause_s
        self._connection = socket.socket()
        if at_once == 1:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self._connection.settimeout(PATIENCE_S)
        self._connection.connect(("127.0.0.1", port))
        self._buffer = b""
        self.answer = Answer()
        self._last_s = time.monotonic()

    @property
    def has_bytes(self) -> bool:
        """Whether a part of an answer has arrived."""
        return bool(self._buffer)

    def close(self) -> None:
        self._connection.close()

    def ask(self, case: Case, *, closes: bool) -> Answer:
        self.answer, self._last_s = Answer(), time.monotonic()
        self._connection.sendall(raw_request(case, self._port, closes=closes))
        self.answer.head = self._until(b"\r\n\r\n")
        head = self.answer.head.lower()
        if b"transfer-encoding: chunked" in head:
            while size := int(self._until(b"\r\n"), 16):
                self.answer.body += self._take(size)
                self._expect(b"\r\n")
            self._expect(b"\r\n")
        else:
            found = re.search(rb"content-length: (\d+)", head)
            if found is None:
                raise BrokenAnswerError(f"no length: {head!r}")
            self.answer.body = self._take(int(found[1]))
        if closes and (self._buffer or self._receive()):
            raise BrokenAnswerError(f"bytes behind the answer: {self._buffer[:100]!r}")
        return self.answer

    def _receive(self) -> bytes:
        part = self._connection.recv(self._at_once)
        now_s = time.monotonic()
        if now_s - self._last_s > 0.5:
            self.answer.gaps.append((now_s, now_s - self._last_s))
        self._last_s = now_s
        if self._pause_s:
            time.sleep(self._pause_s)
            self._last_s = time.monotonic()
        return part

    def _more(self) -> None:
        part = self._receive()
        if not part:
            raise BrokenAnswerError(
                f"ended after {len(self.answer.body)} bytes: {self.answer.body[-100:]!r} {self._buffer!r}"
            )
        self._buffer += part

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def _expect(self, mark: bytes) -> None:
        if (found := self._take(len(mark))) != mark:
            raise BrokenAnswerError(f"{found!r} instead of {mark!r}")


def comparable(body: bytes) -> Any:
    """Return an answer without what differs between two runs: ids, times, and where tokens were put into events."""
    for pattern, new in ((_ID, b"ID"), (_TIME, b'"\\1":0'), (_WAITING, b"")):
        body = pattern.sub(new, body)
    events = [*_events_of(body)]
    if not events:
        return json.loads(body)
    texts: dict[Any, str] = {}
    others: list[Any] = []
    numbers = [event.pop("sequence_number") for event in events if "sequence_number" in event]
    if numbers != [*range(len(numbers))]:
        raise BrokenAnswerError(f"sequence numbers {numbers}")
    for event in events:
        _split(event, texts, others)
    return texts, sorted(map(json.dumps, others))


def _events_of(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of server-sent events or lines. Every line must be one that a client can read."""
    if body.startswith(b'{"id"') and body.count(b"\n") < 2:
        return
    is_sse = b"data: " in body
    for line in body.splitlines():
        if line.startswith(b"data: [DONE]"):
            yield {"done": True}
        elif not is_sse or line.startswith(b"data: "):
            if line.strip():
                yield json.loads(line.removeprefix(b"data: "))
        elif line and not line.startswith((b"event: ", b"id: ")):
            raise BrokenAnswerError(f"a line that is no event: {line!r}")


def _split(event: dict[str, Any], texts: dict[Any, str], others: list[Any]) -> None:
    """Add the text of an event to those of its choice, and what else it has to the others."""
    rest = []
    for choice in event.get("choices", ()):
        text = choice.get("text", "") + choice.get("delta", {}).get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        for at, token in enumerate((choice.get("logprobs") or {}).get("tokens", ())):
            key = choice["index"], "tokens"
            texts[key] = texts.get(key, "") + f"{token} {choice['logprobs']['token_logprobs'][at]} "
        rest.append((choice["index"], choice["finish_reason"], "role" in choice.get("delta", {})))
    if "choices" in event:
        others += [part for part in rest if part[1:] != (None, False)]
        others += [event["usage"]] if event.get("usage") else []
    elif isinstance(event.get("delta"), str):
        texts["delta"] = texts.get("delta", "") + event["delta"]
    elif "text" in event.get("delta", {}):
        texts["delta"] = texts.get("delta", "") + event["delta"]["text"]
    else:
        others.append(event)


def same(case: Case, one: bytes, other: bytes) -> bool:
    """Return whether two answers are equal but for ids and times."""
    return bool(comparable(one) == comparable(other))
