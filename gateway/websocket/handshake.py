"""Checks before a WebSocket is accepted: the page that opens it, its key, and the number of WebSockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.contract.api_keys import ApiKey
from penstock.contract.errors import BusyError, ForbiddenError

SUBPROTOCOL = "penstock"
_KEY_PREFIX = "pk-"
_RETRY_AFTER_MS = 5_000


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


def check_origin(headers: Headers, allowed: Sequence[str]) -> None:
    """Raise ForbiddenError if a page of another site opens the WebSocket. Browsers apply CORS only to HTTP."""
    origin = headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed or _host_of(origin) == headers.get("host"):
        return
    message = f"Origin {origin[:100]!r} may not open a WebSocket here (cors_origins)"
    raise ForbiddenError(message, code="origin_not_allowed", param="origin")


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


class SocketCounter:
    """Counts the open WebSockets of a gateway, all of them and those of each API key."""

    def __init__(self, max_sockets: int, max_sockets_of_key: int) -> None:
        self._max_sockets = max_sockets
        self._max_sockets_of_key = max_sockets_of_key
        self._of_keys = Counter[str]()
        self._num_open = 0

    @contextmanager
    def counted(self, caller: ApiKey) -> Iterator[None]:
        """Count one WebSocket in the block. Raises BusyError at a limit. Without API keys, only the total counts."""
        if self._num_open >= self._max_sockets:
            message = f"this gateway has {self._max_sockets} WebSockets, its limit (max_sockets)"
            raise BusyError(message, retry_after_ms=_RETRY_AFTER_MS, code="too_many_sockets")
        if caller.key_id and self._of_keys[caller.key_id] >= self._max_sockets_of_key:
            message = f"this API key has {self._max_sockets_of_key} WebSockets at this gateway, its limit"
            raise BusyError(message, retry_after_ms=_RETRY_AFTER_MS, code="too_many_sockets")
        self._num_open += 1
        self._of_keys[caller.key_id] += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._of_keys[caller.key_id] -= 1
            if not self._of_keys[caller.key_id]:
                del self._of_keys[caller.key_id]
