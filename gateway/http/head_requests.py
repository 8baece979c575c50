"""HEAD on every route that has GET: the same status and headers, without the body (RFC 9110, 9.3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware that answers HEAD as GET and drops the body.

    The answer ends with its first piece of body, so a stream is not read to its end. A route without GET answers 405.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, as GET if it is HEAD."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        is_complete = False

        async def send_head(message: Message) -> None:
            nonlocal is_complete
            if is_complete:
                return
            if message["type"] == "http.response.body":
                is_complete = True
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        # The server must still see HEAD, and outer middleware the route.
        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send_head)
        finally:
            scope.update({**as_get, "method": "HEAD"})
