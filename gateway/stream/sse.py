"""Server-sent events, and a writer of streams that keeps silent ones alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import MutableHeaders
from starlette.types import Send

from penstock.contract.errors import InvariantError, PenstockError
from penstock.gateway.http.direct_body import DirectBody
from penstock.gateway.stream.framing import END_OF_EVENT, SSE, Framing
from penstock.runtime import crash_points

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, with the blank line that readers expect which take one block for one event."""
KEEP_ALIVE_BETWEEN_IDS = b": waiting\n"
"""A comment without a blank line: after an `id`, some readers, such as OpenAI's, parse that as an empty event."""

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold tokens back
}


def event(payload: Mapping[str, Any], event_id: str = "") -> bytes:
    """Encode one event. It is ASCII only, because many readers also split lines at characters such as U+2028."""
    data = b"data: " + to_json(payload, ensure_ascii=True) + b"\n\n"
    return b"id: " + event_id.encode() + b"\n" + data if event_id else data


class EventWriter:
    """Sends one response of events. Status 200 goes out with the first bytes."""

    def __init__(
        self,
        send: Send,
        framing: Framing = SSE,
        *,
        keep_alive: bytes = KEEP_ALIVE,
        body: DirectBody | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`watch` sends `keep_alive`. `clock` and `sleep`, both in seconds, are its time source.

        Events take the short way `body`, if given, while the client keeps up.
        """
        self.started = False
        self.is_within_event = False
        """Whether a part of an event was sent, and not its end. Then no other event may follow."""
        self.headers = MutableHeaders(headers={"content-type": framing.content_type, **_HEADERS})
        self.keep_alive_source: Callable[[], Awaitable[bytes]] | None = None
        """Makes each keep-alive in place of the constant one."""
        self._send = send
        self._framing = framing
        self._keep_alive = framing.keep_alive(keep_alive)
        self._has_failed = False
        self._body = body
        self._silent = True
        self._sending_since_s: float | None = None
        self._clock = clock
        self._sleep = sleep

    @property
    def is_ready(self) -> bool:
        """Whether `write_now` may be called: the response has begun, and the client keeps up."""
        return self.started and self._body is not None and self._body.is_ready

    def write_now(self, events: bytes) -> None:
        """Send events without waiting. Only while `is_ready`."""
        if self._body is None:
            raise InvariantError("this response has no direct body")
        self._silent = False
        # An empty part would end a chunked body. Some framings have no bytes for some events.
        if data := self._framing.events(events):
            self._body.write(data)
        crash_points.point("after", "event")

    async def write(self, events: bytes) -> None:
        """Send events, or a part of them. Waits while the client reads too slowly."""
        is_within = not events.endswith(END_OF_EVENT) if events else self.is_within_event
        self.is_within_event |= is_within
        if self.is_ready:
            self.write_now(events)
        else:
            await self._write(self._framing.events(events))
        # Cleared only after the write, because a failed one may have sent a part.
        self.is_within_event = is_within

    async def fail(self, error: PenstockError, event: bytes) -> None:
        """Send the end of a stream that fails. `event` is the error in the API's shape."""
        self._has_failed = True
        await self._write(self._framing.error(error, event))

    async def end(self) -> None:
        """Complete the response."""
        await self._write(b"" if self._has_failed else self._framing.end(), more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        self._silent = False
        self._sending_since_s = self._clock()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self.headers.raw})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        crash_points.point("after", "event")
        self._sending_since_s = None

    async def watch(self, *, first_wait_s: float, interval_s: float, send_timeout_s: float) -> None:
        """Send `keep_alive` after each silent interval, and return when the client has stopped reading.

        The first one comes after `first_wait_s` and starts the response if it has not begun. The client counts as
        stuck after `send_timeout_s` in one send. One timer watches the whole stream, because a timeout around each
        event would cost as much as the event.
        """
        await self._sleep(first_wait_s)
        while self._sending_since_s is None or self._clock() - self._sending_since_s < send_timeout_s:
            keep_alive = self._keep_alive
            if self._silent and self.keep_alive_source is not None:
                keep_alive = self._framing.keep_alive(await self.keep_alive_source())
            if self._silent and not self.is_within_event:
                async with asyncio.timeout(send_timeout_s):
                    await self._write(keep_alive)
            self._silent = self._sending_since_s is None
            slept_since_s = self._clock()
            await self._sleep(interval_s)
            if self._sending_since_s is not None:
                # Do not count the time during which this process itself was too busy to send.
                self._sending_since_s += max(0.0, self._clock() - slept_since_s - interval_s)
