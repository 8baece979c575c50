"""Other forms of requests, passed on in the one that routes know: more slashes, HEAD, a key among subprotocols."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY_PREFIX = "pk-"
_HEAD = "penstock.head"
"""ASGI extension: the request that is passed on as GET is HEAD."""


def is_head(scope: Scope) -> bool:
    """Return whether a request is HEAD, for a route whose answer then needs not what GET must read."""
    return bool(scope.get("extensions", {}).get(_HEAD))


class PlainPaths:
    """ASGI middleware that reads repeated slashes of a path as one, and drops those at the end of a path of the APIs.

    Clients write them where they join a base URL and a path. It comes before the check of a key's scopes, so that all
    see one path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with the path."""
        path = scope.get("path", "")
        if "//" in path or path.endswith("/"):
            path = re.sub("//+", "/", path)
            scope["path"] = path.removesuffix("/") if path.startswith("/v1/") else path
        await self._app(scope, receive, send)


class HeadRequests:
    """ASGI middleware that answers HEAD as GET and drops the body (RFC 9110, 9.3.2).

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
        as_get = {**scope, "method": "GET", "extensions": {**scope.get("extensions", {}), _HEAD: True}}
        try:
            await self._app(as_get, receive, send_head)
        finally:
            scope.update({**as_get, "method": "HEAD"})


class SubprotocolKey:
    """ASGI middleware that takes a WebSocket's API key from the offered subprotocols.

    A browser can set no header: `new WebSocket(url, ["penstock", "pk-…"])`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with the key as a header."""
        if scope["type"] == "websocket" and "authorization" not in Headers(scope=scope):
            for offered in scope["subprotocols"]:
                if offered.startswith(_KEY_PREFIX):
                    scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + offered.encode())]
                    break
        await self._app(scope, receive, send)
