"""Sending of a response body in pieces. Memory holds at most two pieces, whatever the size of the body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.datastructures import MutableHeaders
from starlette.types import Send

from penstock.gateway.stream.caller import CallerGoneError
from penstock.runtime.cooperative import LoopYielder

PIECE_BYTES = 64 << 10
"""Size from which a piece is sent, in bytes."""
MAX_WORK_S = 0.004
"""Seconds of rendering after which other tasks may run, whether a piece is complete or not."""

MIN_BYTES_PER_S = 4 << 10
"""Least rate at which a client must read a body. The memory of its result is not free until the end."""


class BodyWriter:
    """Sends a JSON body while it is rendered. The status goes out with the first piece.

    Each piece waits until the client has read enough of the previous ones. A body of one piece has a `Content-Length`;
    a longer body uses chunked encoding.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], yielder: LoopYielder, *, timeout_s: float) -> None:
        """timeout_s: how long the client may delay the body in all, besides the time it takes at MIN_BYTES_PER_S."""
        self.started = False
        self._patience_s = timeout_s
        self._yielder = yielder
        self._send = send
        self._headers = {"content-type": "application/json", **headers}

    async def send_all(self, parts: AsyncGenerator[bytes, None]) -> None:
        """Send all parts as one body and complete the response. Raises CallerGoneError if the client is too slow."""
        piece, size, worked_since_s = list[bytes](), 0, time.monotonic()
        async with aclosing(parts):
            async for part in parts:
                piece.append(part)
                size += len(part)
                if size >= PIECE_BYTES:
                    await self._write(b"".join(piece), more=True)
                    piece, size = [], 0
                if time.monotonic() - worked_since_s >= MAX_WORK_S:
                    await self._yielder.wait()
                    worked_since_s = time.monotonic()
        await self._write(b"".join(piece), more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            headers = MutableHeaders(headers=self._headers)
            if not more:
                headers["content-length"] = str(len(body))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers.raw})
        since_s = time.monotonic()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise CallerGoneError from None
        self._patience_s += len(body) / MIN_BYTES_PER_S - (time.monotonic() - since_s)
