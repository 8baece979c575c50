"""Sending of messages over one WebSocket, and the pace at which its messages are handled."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.types import Send

CLOSE_TIMEOUT_S = 1.0
"""Seconds for sending the close frame."""
BROKEN_MESSAGE = 1011
"""Close code (RFC 6455, 7.4.1)."""


class SocketChannel:
    """Sends messages, one after another. A message waits until the client has read enough of those before it.

    A large message is sent in parts, as several frames, so that memory never holds the whole message.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # The buffer of the connection can then exceed its limit only by one message or part.
        self._turn = asyncio.Lock()
        self._is_open = True

    async def write(self, message: bytes) -> None:
        """Send a whole message in ASCII. After the end of the connection it does nothing."""
        async with self._turn:
            await self._pass_on({"type": "websocket.send", "text": message.decode()})

    async def begin_message(self) -> None:
        """Wait until all other messages are sent. The parts of one message may follow."""
        await self._turn.acquire()

    async def write_part(self, part: bytes, *, is_last: bool) -> None:
        """Send the next part, in ASCII, of a message that has begun."""
        await self._pass_on({"type": "websocket.send", "part": part, "is_last": is_last})
        if is_last:
            self._turn.release()

    async def break_off(self) -> None:
        """Close the WebSocket because a message that has begun cannot be completed."""
        await self.close(BROKEN_MESSAGE, "a message could not be completed")
        self._turn.release()

    async def close(self, code: int, reason: str) -> None:
        """Close the WebSocket. A client that reads nothing gets no reason."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._pass_on({"type": "websocket.close", "code": code, "reason": reason})
        self._is_open = False

    async def _pass_on(self, event: dict[str, object]) -> None:
        if self._is_open:
            try:
                await self._send(event)
            except OSError:
                self._is_open = False


class Pace:
    """A limit on how many messages of one WebSocket are handled per second. Further ones wait unread."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._interval_s = 1 / per_s
        self._burst_s = burst / per_s
        self._due_s = 0.0

    async def wait(self) -> None:
        """Wait until the next message may be handled. Other tasks run in any case."""
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - self._burst_s) + self._interval_s
        await asyncio.sleep(max(0.0, self._due_s - now_s))
