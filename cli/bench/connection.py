"""HTTP/1.1 connections of the load generator, and what it notes of the answers that arrive over them.

httptools parses, and times are taken when bytes arrive.

A general HTTP client would cost more than many a server. Per event of a stream, httpx takes 81 µs of CPU time, aiohttp
39 µs and this module 13 µs (a Zen 5 core, uvloop). So one process reads about 75,000 events a second.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.cli.bench.prompts import RequestRecord
from penstock.contract.errors import RequestError

MAX_WHOLE_BYTES = 16 << 20
"""Bytes that are read of an answer that is no event stream, such as an error, or of a line of a stream."""
_MAX_DETAIL = 300
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "text", "function_call")
"""Members of a choice or of its delta that hold generated tokens."""


class AnswerRecorder:
    """Fills a request's record from its answer: status, server-sent events, and the times of tokens.

    It accepts the framing of real servers. Lines may end with CRLF, and comments may come between them. An event may
    have several data lines, and the last one no empty line after it. `[DONE]`, and even all events, may be absent.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.is_complete = False
        """Whether `[DONE]` came."""
        self._status = 0
        self._is_stream = False
        self._rest = bytearray()
        self._data: list[bytes] = []

    def begin(self, status: int, content_type: str) -> None:
        """Note the head of the answer."""
        self._status = status
        self._is_stream = status == 200 and "event-stream" in content_type

    def feed(self, data: bytes, now_s: float) -> None:
        """Read the next bytes of the body. Errors are noted in the record."""
        if not self._is_stream:
            if len(self._rest) < MAX_WHOLE_BYTES:
                self._rest += data
            return
        head, end, rest = data.rpartition(b"\n")
        if end:
            for line in (bytes(self._rest) + head).split(b"\n"):
                self._read_line(line.rstrip(b"\r"), now_s)
            self._rest = bytearray()
        self._rest += rest
        if len(self._rest) > MAX_WHOLE_BYTES:
            self.fail("a line is too long", f"more than {MAX_WHOLE_BYTES} bytes came without the end of a line")
            self._rest.clear()

    def end(self, now_s: float) -> None:
        """Note the end of the body. A missing end or token is an error in the record."""
        record = self.record
        if self._status != 200:
            self.fail(f"HTTP {self._status}", _message_of(bytes(self._rest)))
        elif not self._is_stream:
            self._read_event(bytes(self._rest), now_s)
        else:
            self._read_line(bytes(self._rest), now_s)
            self._read_line(b"", now_s)
        if not record.error and not self.is_complete and not record.finish_reason:
            self.fail("stream ended early", "neither a finish_reason nor [DONE] came")
        elif not record.error and not record.token_events_s:
            # Tokens without text, such as an end of the sequence at once, are an answer too if the server counts them.
            if not record.usage_tokens:
                self.fail("no token in the answer")
            else:
                record.token_events_s.append(record.end_s or now_s)

    def fail(self, error: str, detail: str = "") -> None:
        """Note a failure, unless there was one before."""
        if not self.record.error:
            self.record.error, self.record.detail = error, detail[:_MAX_DETAIL]

    def _read_line(self, line: bytes, now_s: float) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:])
        elif not line and self._data:
            event, self._data = b"\n".join(self._data), []
            self._read_event(event, now_s)

    def _read_event(self, event: bytes, now_s: float) -> None:
        if event.strip() == b"[DONE]":
            self.is_complete = True
            return
        try:
            fields = json.loads(event)
        except ValueError:
            self.fail("event is not JSON", event[:_MAX_DETAIL].decode(errors="replace"))
            return
        if not isinstance(fields, dict):
            self.fail("event is not a JSON object", event[:_MAX_DETAIL].decode(errors="replace"))
            return
        if fields.get("error"):
            self.fail(*_error_of(fields["error"]))
            return
        if isinstance(usage := fields.get("usage"), dict):
            # Servers that report usage in every event send growing counts, so the last one counts.
            for name, field in (("prompt_tokens", "prompt_tokens"), ("completion_tokens", "usage_tokens")):
                if isinstance(count := usage.get(name), int):
                    setattr(self.record, field, count)
        choices = fields.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._read_choice(choice, now_s)

    def _read_choice(self, choice: dict[str, Any], now_s: float) -> None:
        record, record.end_s = self.record, now_s
        part = choice.get("delta") or choice.get("message") or choice
        if isinstance(part, dict) and any(part.get(name) for name in _TEXTS):
            record.token_events_s.append(now_s)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason


def _error_of(error: Any) -> tuple[str, str]:
    """Return the kind and the message of an error that came as an event."""
    if isinstance(error, dict):
        kind = error.get("code") or error.get("type") or "unknown"
        return f"error event: {kind}", str(error.get("message", ""))
    return "error event", str(error)


def _message_of(body: bytes) -> str:
    """Return the message of an error answer: `error.message`, `message` or `detail`, else the body itself."""
    text = body[: 4 * _MAX_DETAIL].decode(errors="replace")
    try:
        fields = json.loads(body)
    except ValueError:
        return text
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or text)
    return str(error)


_MAX_IDLE_S = 2.0
"""An idle connection is used again within this time. Servers close them after 5 s or more."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address on which a server listens, and the path before `/v1`."""

    host: str
    port: int
    is_tls: bool
    path: str

    @classmethod
    def of(cls, base_url: str) -> Address:
        """Return the address of a base URL with or without `/v1`. Raises RequestError."""
        try:
            parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            port = parts.port
        except ValueError as error:
            raise RequestError(f"base_url: {error}", param="base_url") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"base_url: {base_url!r} is not an http or https URL", param="base_url")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, path)

    @property
    def host_header(self) -> str:
        """Value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


class Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time. The methods `on_…` are httptools' callbacks."""

    def __init__(self) -> None:
        self.is_reusable = False
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer: AnswerRecorder | None = None
        self._done: asyncio.Future[None] | None = None
        self._start_s = 0.0
        self._now_s = 0.0
        # Of one user, or of our own code and files.
        self._headers: dict[bytes, bytes] = {}
        self._has_head = False

    async def exchange(self, request: bytes, answer: AnswerRecorder, start_s: float) -> None:
        """Send a request and feed its answer to the reader, with times in seconds after `start_s`."""
        import httptools

        self._answer, self._start_s = answer, start_s
        self._headers, self._has_head, self.is_reusable = {}, False, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            answer.fail("connection lost before the answer")
            return
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    @property
    def is_open(self) -> bool:
        """Whether the connection is open: the server has not closed it."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        import httptools

        if self._done is None:
            self.close()
            return
        self._now_s = time.perf_counter() - self._start_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end("answer is not HTTP/1.1", str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: as complete if the answer's end is that of the connection, else as failed."""
        self._transport = None
        if self._done is None or self._done.done():
            return
        self._now_s = time.perf_counter() - self._start_s
        if not self._has_head:
            self._end("connection lost before the answer", str(exc or ""))
        elif self._headers.keys() & {b"content-length", b"transfer-encoding"} and not (
            self._answer is not None and self._answer.is_complete
        ):
            self._end("connection lost in the answer", str(exc or ""))
        else:
            self.on_message_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header of the answer."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Tell the reader the status."""
        status = self._parser.get_status_code()
        self._has_head = status >= 200
        if self._has_head and self._answer is not None:
            self._answer.begin(status, self._headers.get(b"content-type", b"").decode("latin-1"))

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        if self._answer is not None:
            self._answer.feed(body, self._now_s)

    def on_message_complete(self) -> None:
        """End the exchange."""
        if self._has_head:
            self.is_reusable = self._transport is not None and self._parser.should_keep_alive()
            self._end()

    def _end(self, error: str = "", detail: str = "") -> None:
        if self._answer is not None and self._done is not None and not self._done.done():
            if error:
                self._answer.fail(error, detail)
            else:
                self._answer.end(self._now_s)
            self._done.set_result(None)


class Connections:
    """The connections to one server. An idle one is used again; otherwise a request opens a new one."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: deque[Connection] = deque()
        self._tls = ssl.create_default_context() if address.is_tls else None

    async def exchange(self, request: bytes, answer: AnswerRecorder, start_s: float, timeout_s: float) -> None:
        """Send a request over some connection. A failure is in the reader's record."""
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._take_idle() or await self._open()
                await connection.exchange(request, answer, start_s)
        except TimeoutError:
            answer.fail("timeout", f"no end after {timeout_s:g} s")
        except OSError as error:
            answer.fail("cannot connect", error.strerror or str(error))
        finally:
            if connection is not None:
                self._give_back(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _open(self) -> Connection:
        address = self.address
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, address.host, address.port, ssl=self._tls
        )
        return connection

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.perf_counter() - connection.idle_since_s < _MAX_IDLE_S:
                return connection
            connection.close()
        return None

    def _give_back(self, connection: Connection) -> None:
        if connection.is_reusable and connection.is_open:
            connection.idle_since_s = time.perf_counter()
            self._idle.append(connection)
        else:
            connection.close()


def request_bytes(address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return an HTTP/1.1 request. Raises RequestError for a header that HTTP does not permit."""
    lines = [f"{method} {address.path}{path} HTTP/1.1", f"Host: {address.host_header}"]
    for name, value in headers.items():
        if not name or not name.isascii() or any(letter in name + value for letter in "\r\n\0") or ":" in name:
            raise RequestError(f"header: {name!r} is not a valid header", param="header")
        lines.append(f"{name}: {value}")
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", errors="replace") + body
