"""Server-sent events: framing, and a writer that keeps its line open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import MutableHeaders
from starlette.types import Send

from penstock.runtime import crash_points

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

    def __init__(
        self,
        send: Send,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`clock` and `sleep`, in seconds, are the time that `watch` goes by."""
        self.started = False
        self.headers = MutableHeaders(headers=_HEADERS)
        self._send = send
        self._silent = True
        self._sending_since_s: float | None = None
        self._clock = clock
        self._sleep = sleep

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends one or more whole events; waits while the reader takes nothing."""
        self._silent = False
        self._sending_since_s = self._clock()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self.headers.raw})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        crash_points.point("after", "event")
        self._sending_since_s = None

    async def end(self) -> None:
        """Completes the response."""
        await self.write(b"", more=False)

    async def watch(self, *, first_wait_s: float, interval_s: float, send_timeout_s: float) -> None:
        """Sends a comment into each silence, which also starts a response that waits; ends when the reader is stuck.

        One clock for a whole stream, because a time-out around each event would cost as much as the event.
        """
        await self._sleep(first_wait_s)
        while self._sending_since_s is None or self._clock() - self._sending_since_s < send_timeout_s:
            if self._silent:
                async with asyncio.timeout(send_timeout_s):
                    await self.write(KEEP_ALIVE)
            self._silent = self._sending_since_s is None
            slept_since_s = self._clock()
            await self._sleep(interval_s)
            if self._sending_since_s is not None:
                # While this process was busy itself, its reader had nothing to take.
                self._sending_since_s += max(0.0, self._clock() - slept_since_s - interval_s)
