"""Reads a streamed completion at little cost: the reader shares the cores with the server that it measures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

USAGE = b'"usage":'
MAX_READ_BYTES = 1 << 16


class AnswerError(Exception):
    """A server answered with an error, or with no usage."""


class _Events:
    """Takes a body as it comes; calls back once an event that carries choices."""

    def __init__(self, on_event: Callable[[], None]) -> None:
        self._on_event = on_event
        self._rest = b""
        self.completion_tokens = 0
        self.error = ""

    def on_body(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            if b'"error"' in line:
                # Raised by the caller: the parser would hide it.
                self.error = line.decode()
            if b'"choices":[{' in line.replace(b" ", b""):
                self._on_event()
            if USAGE in line and (usage := json.loads(line[6:])["usage"]):
                self.completion_tokens = usage["completion_tokens"]


async def stream(host: str, port: int, body: dict[str, Any], on_event: Callable[[], None]) -> int:
    """Posts a completion, calls `on_event` at each chunk, answers how many tokens there were."""
    import httptools

    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    events = _Events(on_event)
    parser = httptools.HttpResponseParser(events)
    try:
        writer.write(head.encode() + content)
        while data := await reader.read(MAX_READ_BYTES):
            parser.feed_data(data)
            if parser.get_status_code() != 200:
                raise AnswerError(f"{parser.get_status_code()}: {data.decode(errors='replace')[-500:]}")
    finally:
        writer.close()
    if events.error:
        raise AnswerError(events.error)
    if not events.completion_tokens:
        raise AnswerError("the stream ended without its usage")
    return events.completion_tokens
