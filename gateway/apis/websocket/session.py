"""The session of an accepted WebSocket, which owns its streams."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from starlette.types import Receive, Scope, Send

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    InvariantError,
    NotFoundError,
    PenstockError,
    UnavailableError,
)
from penstock.contract.tenant import ApiKey
from penstock.gateway.apis.websocket.stream import SocketChannel, SocketStream, error_message
from penstock.gateway.http.middleware.access_log import log_socket_error
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
            self._refused(error)
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
        stream = SocketStream(tag, self._channel, self._client, self._scope, self._refused)
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

    def _refused(self, error: PenstockError) -> None:
        log_socket_error(self._metrics, error, self._scope["state"]["caller"], self._scope["path"])

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
