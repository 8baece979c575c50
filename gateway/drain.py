"""The end of a planned stop: answers that are open when the drain is over end with an error that says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.contract.errors import UnavailableError
from penstock.gateway.openai.errors import error_body, error_response
from penstock.gateway.stream.sse import event

logger = logging.getLogger(__name__)

SAY_TIMEOUT_S = 1.0
"""A reader that takes nothing is not told why its answer ends."""
END_GRACE_S = 5
"""Time for the cut answers to leave their jobs, before the server ends whatever is left."""


class Drain:
    """ASGI middleware: turns the cancellation of an answer into its end.

    An answer that has not begun becomes a 503 with Retry-After, a stream ends with an error event. A caller with the
    event ids of a stream goes on at another gateway.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
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
            if not is_complete:
                await _say_why(started, scope, receive, send)


async def _say_why(started: Headers | None, scope: Scope, receive: Receive, send: Send) -> None:
    error = UnavailableError("this gateway was stopped before the answer was complete", code="gateway_stopped")
    try:
        async with asyncio.timeout(SAY_TIMEOUT_S):
            if started is None:
                await error_response(error)(scope, receive, send)
            elif started.get("content-type", "").startswith("text/event-stream"):
                await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": False})
    except TimeoutError:
        logger.info("a reader was not told of the stop", extra={"path": scope["path"]})


async def cut_off_after(drain_s: float, answers: Iterable[asyncio.Task[None]]) -> None:
    """Cancels the answers that are still open after the drain."""
    await asyncio.sleep(drain_s)
    left = [task for task in answers if not task.done()]
    if left:
        facts = {"num_answers": len(left), "drain_s": drain_s}
        logger.warning("answers were cut off at the end of the drain", extra=facts)
    for task in left:
        task.cancel()
