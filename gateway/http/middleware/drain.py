"""The end of a planned shutdown: answers still open after the drain end with an error that gives the reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.contract.errors import UnavailableError
from penstock.gateway.errors import ErrorShapes
from penstock.gateway.kept.answer import AnswerKeep, keep_of
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.stream.writer import error_event, framing_of, has_broken_event

logger = logging.getLogger("penstock.gateway")

SAY_TIMEOUT_S = 1.0
"""Seconds for sending the error to one client. A client that reads nothing does not get it."""
END_GRACE_S = 5
"""Seconds for the canceled answers to release their jobs before the server closes every connection."""


class Drain:
    """ASGI middleware that ends a canceled answer with an error.

    An answer that has not begun becomes a 503 with Retry-After; a stream ends with an error event. The caller can
    continue the stream at another gateway with its last event id.
    """

    def __init__(self, app: ASGIApp, *, errors: ErrorShapes, metrics: GatewayMetrics) -> None:
        self._app = app
        self._errors = errors
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and send an error if its answer is canceled."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (keep := keep_of(scope)) is not None and keep.record is not None and keep.is_poisoned:
            await self._end_poisoned(keep, keep.record, scope, receive, send)
            return
        started: Headers | None = None
        is_complete = False

        def noting(message: Message) -> Awaitable[None]:
            nonlocal started, is_complete
            if message["type"] == "http.response.start":
                started = Headers(raw=message["headers"])
            else:
                is_complete = not message.get("more_body", False)
            return send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if is_complete:
                return
            error = UnavailableError("this gateway was stopped before the answer was complete", code="gateway_stopped")
            if started is None:
                self._metrics.refused(error)
            else:
                self._metrics.failed(error)
            # Within an event nothing valid can follow, so the server closes the connection.
            if not has_broken_event(scope):
                await self._send_error(error, started, scope, receive, send)

    async def _end_poisoned(
        self, keep: AnswerKeep, record: Mapping[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """End an answer that has killed the gateways that took it over."""
        error = UnavailableError("the gateways that took this answer over have ended", code="gateway_stopped")
        if not keep.has_head:
            self._metrics.refused(error)
            await self._send_error(error, None, scope, receive, send)
            return
        self._metrics.failed(error)
        if not record["is_stream"] or keep.was_within_event:
            # Nothing valid can follow, so the server closes the connection.
            return
        headers = Headers({"content-type": framing_of(scope).content_type})
        await send({"type": "http.response.start", "status": 200, "headers": headers.raw})
        await self._send_error(error, headers, scope, receive, send)

    async def _send_error(
        self, error: UnavailableError, started: Headers | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            async with asyncio.timeout(SAY_TIMEOUT_S):
                if started is None:
                    await self._errors.response(error, scope)(scope, receive, send)
                elif started.get("content-type", "").startswith((framing := framing_of(scope)).media_type):
                    event = error_event(error, self._errors.shape_of(scope))
                    body = framing.error(error, event)
                    await send({"type": "http.response.body", "body": body, "more_body": False})
        except TimeoutError:
            logger.info("a client did not receive the shutdown error", extra={"path": scope["path"]})


async def cut_off_after(drain_s: float, answers: Iterable[asyncio.Task[None]]) -> None:
    """Cancel the answers that are still open after `drain_s` seconds."""
    await asyncio.sleep(drain_s)
    left = [task for task in answers if not task.done()]
    if left:
        facts = {"num_answers": len(left), "drain_s": drain_s}
        logger.warning("answers were cut off at the end of the drain", extra=facts)
    for task in left:
        task.cancel()
