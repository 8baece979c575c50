"""The route `/v1/stream`: the checks before a WebSocket is accepted. A plain request is told to open one.

`SubprotocolKey` in `http/middleware/request_forms.py` takes the key of a WebSocket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import BusyError, PenstockError, RequestError
from penstock.contract.tenant import ApiKey
from penstock.gateway.apis.websocket.session import SocketSession
from penstock.gateway.errors import ErrorShapes, error_body
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.http.foreign_pages import check_page
from penstock.gateway.http.middleware.access_log import NUM_STREAMS
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request.reading import Parser, RequestReader
from penstock.gateway.settings import GatewaySettings
from penstock.producer.client import AsyncClient

PATH = "/v1/stream"
SUBPROTOCOL = "penstock"
_RETRY_AFTER_MS = 5_000


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


class StreamSocket:
    """The ASGI app of the WebSocket."""

    def __init__(
        self,
        client: AsyncClient,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        errors: ErrorShapes,
        reader: RequestReader,
        parser: Parser,
    ) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._errors = errors
        self._reader = reader
        self._parser = parser
        self._counter = SocketCounter(settings.max_sockets, settings.max_key_sockets)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept a WebSocket and serve it to its end, or answer why not."""
        caller = scope["state"]["caller"]
        session = None
        try:
            check_page(Headers(scope=scope), self._settings.cors_origins)
            with self._counter.counted(caller), self._metrics.socket():
                subprotocol = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
                await send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": []})
                session = SocketSession(
                    scope,
                    receive,
                    send,
                    client=self._client,
                    settings=self._settings,
                    metrics=self._metrics,
                    reader=self._reader,
                    parser=self._parser,
                )
                await session.run()
        except PenstockError as error:
            self._metrics.refused(error)
            await self._errors.response(error, scope)(scope, receive, send)
        finally:
            scope["state"][NUM_STREAMS] = session.num_streams if session else 0

    async def advise(self, request: Request) -> Response:
        """Answer a request that opens no WebSocket."""
        error = RequestError("/v1/stream is a WebSocket: send Connection: Upgrade and Upgrade: websocket")
        self._metrics.refused(error)
        return JSONResponse(error_body(error), 426, {"Upgrade": "websocket", "Connection": "Upgrade"})


def _routes(services: Services) -> list[BaseRoute]:
    socket = StreamSocket(
        services.client, services.settings, services.metrics, services.errors, services.reader, services.parser
    )
    return [WebSocketRoute(PATH, socket), Route(PATH, socket.advise, methods=["GET"], include_in_schema=False)]


WEBSOCKET = HttpDialect(_routes)
