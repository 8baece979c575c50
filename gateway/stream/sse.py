"""Server-sent events: framing, and a writer that does not wait for a stuck reader for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from penstock.gateway.stream.caller import CallerGoneError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n"
"""No blank line behind it: after an `id` some readers, OpenAI's among them, take a blank line for an empty event."""

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold tokens back
}


def event(payload: Mapping[str, Any], event_id: str = "") -> bytes:
    """One event. ASCII only, since many readers also break lines at U+2028 and the like."""
    data = b"data: " + to_json(payload, ensure_ascii=True) + b"\n\n"
    return b"id: " + event_id.encode() + b"\n" + data if event_id else data


class EventWriter:
    """The body of one 200 response; the status goes out with the first bytes."""

    def __init__(self, send: Send, *, send_timeout_s: float) -> None:
        self.started = False
        self.headers = MutableHeaders(headers=_HEADERS)
        self._send = send
        self._send_timeout_s = send_timeout_s

    async def write(self, data: bytes) -> None:
        """Sends one or more whole events."""
        if not self.started:
            self.started = True
            await self._put({"type": "http.response.start", "status": 200, "headers": self.headers.raw})
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Completes the response."""
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send(message)
        except (OSError, TimeoutError) as error:
            raise CallerGoneError from error
