"""The route `/v1/stream`: a WebSocket, or for a plain HTTP request the advice to open one."""

from __future__ import annotations

import logging
import time

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError, RequestError
from penstock.gateway.errors import error_response
from penstock.gateway.http.request_head import SOCKET_PATH
from penstock.gateway.openai.errors import error_body
from penstock.gateway.websocket.handshake import SUBPROTOCOL, check_origin
from penstock.gateway.websocket.session import SocketSession

logger = logging.getLogger("penstock.gateway.access")


class StreamSocket:
    """The ASGI app of the WebSocket."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept a WebSocket and serve it to its end, or answer why not."""
        state, caller = scope["app"].state, scope["state"]["caller"]
        started_s, session = time.monotonic(), None
        try:
            check_origin(Headers(scope=scope), state.settings.cors_origins)
            with state.sockets.counted(caller), state.metrics.socket():
                subprotocol = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
                await send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": []})
                session = SocketSession(scope, receive, send)
                await session.run()
        except PenstockError as error:
            state.metrics.refused(error)
            await error_response(error, scope)(scope, receive, send)
        finally:
            key = {"key_id": caller.key_id} if caller.key_id else {}
            facts = {"path": scope["path"], "num_streams": session.num_streams if session else 0, **key}
            logger.info("socket", extra={**facts, "duration_ms": round((time.monotonic() - started_s) * 1000)})


def _advise(request: Request) -> Response:
    """Answer a request that opens no WebSocket."""
    error = RequestError("/v1/stream is a WebSocket: send Connection: Upgrade and Upgrade: websocket")
    return JSONResponse(error_body(error), 426, {"Upgrade": "websocket", "Connection": "Upgrade"})


SOCKET_ROUTE = WebSocketRoute(SOCKET_PATH.decode(), StreamSocket())
ADVICE_ROUTE = Route(SOCKET_PATH.decode(), _advise, methods=["GET"], include_in_schema=False)
