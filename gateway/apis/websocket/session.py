"""The WebSocket `/v1/stream`: the checks before it is accepted, and its session, which owns the streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    InvariantError,
    NotFoundError,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.contract.tenant import ApiKey
from penstock.gateway.apis.websocket.stream import SocketChannel, SocketStream, error_message
from penstock.gateway.errors import ErrorShapes, error_body
from penstock.gateway.http.entry import check_page
from penstock.gateway.http.protocol import SOCKET_PATH
from penstock.gateway.http.socket_protocol import EXTENSION, BoundedSocket
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request.encoding import Attach, Cancel, SocketMessage, Submit
from penstock.gateway.request.reading import Parser, RequestReader
from penstock.gateway.settings import GatewaySettings
from penstock.producer.client import AsyncClient

logger = logging.getLogger("penstock.gateway")

MESSAGES_PER_S = 100.0
BURST_MESSAGES = 200
"""A WebSocket's messages above this rate wait unread."""
NOT_TEXT, RESTART = 1003, 1012
"""Close codes (RFC 6455, 7.4.1, and IANA's registry)."""


class MessagePace:
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


class SocketSession:
    """The state of one accepted WebSocket."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        client: AsyncClient,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        reader: RequestReader,
        parser: Parser,
    ) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._reader = reader
        self._parser = parser
        caller: ApiKey = scope["state"]["caller"]
        self._tenant = caller.tenant
        self._connection: BoundedSocket = scope["extensions"][EXTENSION]
        self._scope = scope
        self._receive = receive
        self._channel = SocketChannel(send)
        self._pace = MessagePace(MESSAGES_PER_S, BURST_MESSAGES)
        # Of one request.
        self._streams: dict[str, SocketStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.num_streams = 0
        """Streams that the client began."""

    async def run(self) -> None:
        """Handle messages until the client leaves or the gateway stops. The streams end with the session."""
        memory = partial(self._reader.message_memory, self._tenant)
        self._connection.memory.set_budget(memory, self._settings.body_timeout_s)
        closing = asyncio.create_task(self._close_when_drained())
        try:
            while (raw := await self._next()) is not None:
                await self._handle(raw)
        except asyncio.CancelledError:
            # The end of the drain: each stream ends with an error that says so.
            for task in self._tasks:
                task.cancel()
            await self._wait_for_streams()
            await self._channel.close(RESTART, "this gateway was stopped")
        finally:
            closing.cancel()
            for stream in self._streams.values():
                stream.leave()
            await self._wait_for_streams()

    async def _wait_for_streams(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next(self) -> bytes | None:
        """Return the next message, or None at the end of the connection."""
        event = await self._receive()
        if event["type"] == "websocket.connect":
            event = await self._receive()
        if event["type"] != "websocket.receive":
            return None
        text: bytes | None = event.get("utf8")
        if text is None:
            await self._channel.close(NOT_TEXT, "messages must be text")
        return text

    async def _handle(self, raw: bytes) -> None:
        await self._pace.wait()
        try:
            message = await self._parser.parse_message(raw, self._tenant)
        except PenstockError as error:
            message = SocketMessage(error=error)
        except Exception:
            # A bug refuses one message. The other streams of this WebSocket go on.
            logger.exception("a message of a WebSocket was not parsed", extra={"message_bytes": len(raw)})
            message = SocketMessage(error=InvariantError("internal error"))
        finally:
            self._connection.release_message()
        try:
            if message.content is None:
                raise message.error or InvariantError("a message has neither content nor an error")
            if isinstance(message.content, Cancel):
                tag = message.content.id
                if tag not in self._open_tags():
                    raise NotFoundError(f"id: {tag!r} is not an open stream", code="stream_not_found", param="id")
                await self._streams[tag].cancel()
            else:
                self._begin(message, message.content)
        except PenstockError as error:
            self._metrics.refused(error)
            await self._channel.write(error_message("refused", message.tag, error))

    def _begin(self, message: SocketMessage, content: Submit | Attach) -> None:
        tag = content.id
        if self._connection.draining.is_set():
            raise UnavailableError("this gateway is stopping; connect to another one", code="gateway_stopped")
        open_tags = self._open_tags()
        if tag in open_tags:
            raise ConflictError(f"id: {tag!r} is an open stream of this WebSocket", code="id_in_use", param="id")
        if len(open_tags) >= (limit := self._settings.max_socket_streams):
            raise BusyError(f"a WebSocket may have {limit} open streams", retry_after_ms=1000, code="too_many_streams")
        stream = SocketStream(tag, self._channel, self._client, self._scope)
        work = (
            stream.submit(content, message.error or message.body)
            if isinstance(content, Submit)
            else stream.attach(content)
        )
        self.num_streams += 1
        self._streams[tag] = stream
        self._is_idle.clear()
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _open_tags(self) -> set[str]:
        """Return the ids of the open streams, and forget those that have ended. Their tasks may still tidy up."""
        self._streams = {tag: stream for tag, stream in self._streams.items() if not stream.has_ended}
        return set(self._streams)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._is_idle.set()

    async def _close_when_drained(self) -> None:
        await self._connection.draining.wait()
        await self._is_idle.wait()
        await self._channel.close(RESTART, "this gateway is stopping")


access_log = logging.getLogger("penstock.gateway.access")

# Checks before a WebSocket is accepted: the page that opens it, and the number of WebSockets. `SubprotocolKey` in
# `http/middleware.py` takes its key.

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


# The route `/v1/stream`: a WebSocket, or for a plain HTTP request the advice to open one.


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
        started_s, session, code = time.monotonic(), None, ""
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
            code = error.code
            self._metrics.refused(error)
            await self._errors.response(error, scope)(scope, receive, send)
        finally:
            ids = {"tenant": caller.tenant, "key_id": caller.key_id, "code": code}
            facts = {name: one for name, one in ids.items() if one}
            facts |= {"path": scope["path"], "num_streams": session.num_streams if session else 0}
            access_log.info("socket", extra={**facts, "duration_ms": round((time.monotonic() - started_s) * 1000)})

    async def advise(self, request: Request) -> Response:
        """Answer a request that opens no WebSocket."""
        error = RequestError("/v1/stream is a WebSocket: send Connection: Upgrade and Upgrade: websocket")
        self._metrics.refused(error)
        return JSONResponse(error_body(error), 426, {"Upgrade": "websocket", "Connection": "Upgrade"})


def socket_routes(socket: StreamSocket) -> list[BaseRoute]:
    """Return the routes of `/v1/stream`."""
    path = SOCKET_PATH.decode()
    return [WebSocketRoute(path, socket), Route(path, socket.advise, methods=["GET"], include_in_schema=False)]
