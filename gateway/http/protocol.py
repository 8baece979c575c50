"""A uvicorn HTTP protocol with limits that uvicorn lacks.

uvicorn accepts a request head of any size, waits for it without limit, and drops the body of a request that offers a
protocol upgrade. It keeps unsent bytes forever for a client that has stopped reading. It sends chunks to clients of
HTTP/1.0, and answers invalid bytes in the middle of the answer to the request before them.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn._types import ASGI3Application, HTTPScope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.contract.errors import InvariantError, PenstockError, RequestError, TooLargeError, UnavailableError
from penstock.gateway.errors import ID_HEADER, error_body
from penstock.gateway.kept.answer import AnswerKeep, offer_keep
from penstock.gateway.kept.connection import Keep, KeptConnection
from penstock.gateway.stream.direct_body import offer_direct_body

# A bound on how long unsent bytes wait for a client that has stopped reading.

TAKE_TIMEOUT_S = 60.0
"""Seconds after which a connection is closed if its client reads none of the bytes that wait for it."""
MAX_LATE_S = 1.0
"""If the check itself runs later than this many seconds, the process was too busy, and the client may be fine."""
_NO_LINGER = struct.pack("ii", 1, 0)
"""Value of SO_LINGER that resets the connection and discards its unsent bytes."""


class ReaderWatch:
    """Resets a connection whose client reads nothing for TAKE_TIMEOUT_S while bytes wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        """Event-loop time at which the timer should fire."""

    def start(self) -> None:
        """Begin to check, unless the checks run already. They end once no byte waits."""
        if self._timer is None:
            self._check()

    def stop(self) -> None:
        """End the checks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, num_before: int = 0) -> None:
        """Abort the connection if the client has read nothing since the last check; otherwise check again later.

        `num_before` is the number of unsent bytes at the last check. The check also covers a closed transport, which
        still waits for its client to read the last byte.
        """
        num_waiting = self._transport.get_write_buffer_size()
        # If this process was busy or had no core, it has not written bytes that the client would have read.
        is_late = self._loop.time() - self._due_s > MAX_LATE_S
        if num_waiting and num_waiting == num_before and not is_late:
            # Otherwise the kernel would keep megabytes for a client that may never read them.
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        elif num_waiting:
            self._due_s = self._loop.time() + TAKE_TIMEOUT_S
            self._timer = self._loop.call_at(self._due_s, self._check, num_waiting)
        else:
            self._timer = None


MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 60.0
"""Seconds that a connection may take to send a whole head. Each open connection uses a file descriptor."""
MAX_UNSENT_BYTES = 128 << 10
"""Bytes that the kernel takes for a client beyond those on their way to it. Without a limit, it takes megabytes for a
client that has stopped reading, and the gateway notices that only once they are full."""
MAX_BUFFERED_BYTES = 16 << 10
"""Unsent bytes that this process holds for a connection before the answer pauses, beyond the last part of it. The
kernel has enough to send meanwhile."""
RETRY_AFTER_S = 1
"""What the answer to a connection beyond the limit advises."""
_WITHOUT_CHUNKS = ("0.9", "1.0")


class BoundedHead(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on the request head, on slow clients and on unread answers.

    It answers 431 and closes the connection when the head, a chunk header or the trailers exceed MAX_HEAD_BYTES. It
    closes a connection that does not send a head in time. It ignores `Upgrade`, as RFC 9110 (7.8) allows, except that
    of a WebSocket at one of `socket_paths`.

    Invalid bytes behind a whole request end the connection after the answer to that request. Otherwise it answers 400.
    """

    socket_paths: frozenset[bytes] = frozenset()
    """The paths of WebSockets."""
    note_refusal: Callable[[PenstockError, HTTPStatus, str], None] = staticmethod(lambda *_: None)
    """Logs and counts an answer that no route gives, with the id in its header."""
    _num_head_bytes = 0
    """Bytes received outside of bodies. Each part of a body resets the count."""
    keep: Keep | None = None
    """The gateway's keeper, if it has one."""
    take_over: Callable[[BoundedHead], None] | None = None
    """Goes on with a connection of an earlier gateway, once it is made."""
    kept: KeptConnection | None = None
    """This connection as the keeper may hold it."""
    _running_task: asyncio.Task[Any] | None = None
    """The task of the request that is being answered."""
    _answer_keep: AnswerKeep | None = None
    """The slot of the answer that runs."""
    _head_error: tuple[PenstockError, HTTPStatus] | None = None
    """Why a complete head is refused."""
    _head_timer: asyncio.TimerHandle | None = None
    """Closes the connection if no whole head arrives. Set while no request is being answered."""
    _reader_watch: ReaderWatch
    """Checks that the client reads, while unsent bytes wait and the answer adds no more."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered, or was answered last. `cycle` is the newest one, which may wait behind it."""
    _is_over = False
    """Whether further bytes are dropped, because bytes before them were refused."""

    def connection_made(self, transport: Any) -> None:
        """Handle a new connection: start the timer for its first head."""
        super().connection_made(transport)
        self._reader_watch = ReaderWatch(self.loop, transport)
        connection = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)  # as in tcp(7)
        transport.set_write_buffer_limits(high=MAX_BUFFERED_BYTES)
        if self.keep is not None:
            self.kept = KeptConnection(self.keep, transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._refuse_connection(self.limit_concurrency - 1)
            return
        self._wait_for_head()
        if self.take_over is not None:
            self.take_over(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection: stop its timers."""
        if self.kept is not None:
            self.kept.leave()
            if self._answer_keep is not None:
                self._answer_keep.release()
        self._stop_waiting()
        self.resume_writing()
        if self._running is not None and not self._running.response_complete:
            # uvicorn notifies only the newest request. This one's answer would be written to a closed connection.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no byte of a request has arrived that is not answered."""
        return self._num_head_bytes == 0 and (self.cycle is None or self.cycle.response_complete)

    @property
    def is_kept(self) -> bool:
        """Whether a successor of this gateway can go on with the open answer."""
        return self._answer_keep is not None and self._answer_keep.is_kept

    def cut_off(self) -> None:
        """End the open answer, if there is one, with an error, and the connection."""
        if self._running_task is not None:
            self._running_task.cancel()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """Handle a full send buffer: the answer pauses, and the client is watched."""
        super().pause_writing()
        self._reader_watch.start()

    def resume_writing(self) -> None:
        """Handle a drained send buffer: the answer continues."""
        super().resume_writing()
        self._reader_watch.stop()

    def on_response_complete(self) -> None:
        """Handle a complete answer. Its last bytes may still wait for the client, so the client is watched."""
        if self.kept is not None:
            self.kept.complete()
            if self._answer_keep is not None:
                self._answer_keep.release()
        super().on_response_complete()
        self._reader_watch.start()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and refuse the request if they are not HTTP or the head is too large."""
        if self._is_over:
            return
        if self.kept is not None:
            self.kept.note_received(len(data))
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            # An answer that is due comes before a WebSocket.
            is_first = self._running is None or self._running.response_complete
            opens_socket = self.url.partition(b"?")[0] in self.socket_paths and self._get_upgrade() == b"websocket"
            if is_first and opens_socket:
                self._hand_over(rest)
                return
            self._reparse_without_upgrade(rest)
        except httptools.HttpParserError:
            if self._head_error is None:
                error = RequestError("the request is not valid HTTP/1.1", code="invalid_http")
                self._refuse(error, HTTPStatus.BAD_REQUEST)
        if self._head_error is None and self._num_head_bytes > MAX_HEAD_BYTES:
            self._head_error = _too_large()
        if self._head_error is not None and not self._is_over:
            self._refuse(*self._head_error)
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """Handle the first bytes of a request. They may arrive while the one before is answered."""
        if self.kept is not None and self._running is not None and not self._running.response_complete:
            self.kept.note_ahead()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Handle a complete head. Measure it here: a head that arrived in a single read was not measured before."""
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._head_error = _too_large()
        else:
            self._head_error = _wrong_host(
                sum(name == b"host" for name, _ in self.headers), self.parser.get_http_version()
            ) or _wrong_encoding([value for name, value in self.headers if name == b"transfer-encoding"])
        if self._head_error is not None:
            raise self._head_error[0]  # stops the parser; data_received sends the answer
        self._num_head_bytes = 0
        self._stop_waiting()
        self._take_host_of_target()
        super().on_headers_complete()
        if self.parser.get_http_version() in _WITHOUT_CHUNKS:
            _end_body_by_closing(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body. It ends the count of bytes outside of bodies."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request. The bytes of the next head are counted from zero."""
        self._num_head_bytes = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start answering a request, and remember which one it is."""
        self._running = cycle
        offer_direct_body(cycle)
        if self.kept is not None:
            self._answer_keep = offer_keep(cycle, self.kept)
            app = partial(self._run, app)
        super()._start_asgi_task(cycle, app)

    async def _run(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        self._running_task = asyncio.current_task()
        try:
            await app(scope, receive, send)
        finally:
            self._running_task = None

    def _should_upgrade(self) -> bool:
        """Return whether the head offers a protocol upgrade.

        If so, uvicorn ignores the head, and `data_received` parses it again without the offer.
        """
        return any(name == b"upgrade" for name, _ in self.headers)

    def resume(self, scope: HTTPScope, app: ASGI3Application, *, keep_alive: bool) -> AnswerKeep:
        """Start the rest of an answer that an earlier gateway began, and return its slot."""
        self._stop_waiting()
        cycle = RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )
        cycle.more_body = False
        cycle.message_event.set()
        self.cycle = cycle
        self._start_asgi_task(cycle, app)
        if self._answer_keep is None:
            raise InvariantError("a connection without a keeper was taken over")
        return self._answer_keep

    def _hand_over(self, rest: bytes) -> None:
        """Let the protocol of WebSockets continue with the head and the bytes behind it."""
        if self.kept is not None:
            self.kept.leave()
        self._reader_watch.stop()
        self.handle_websocket_upgrade()
        protocol: Any = self.transport.get_protocol()
        protocol.data_received(rest)

    def _take_host_of_target(self) -> None:
        """Replace `Host` by the host of an absolute target, such as `http://name/`: that counts (RFC 9112, 3.2.2)."""
        if self.url.startswith(b"/") or b"://" not in self.url:
            return
        authority = self.url.split(b"://", 1)[1].partition(b"/")[0].partition(b"?")[0].rpartition(b"@")[2]
        self.headers[:] = [field for field in self.headers if field[0] != b"host"] + [(b"host", authority)]

    def _reparse_without_upgrade(self, rest: bytes) -> None:
        """Parse the head again without `Upgrade`, because httptools reads no body after an upgrade offer."""
        kept = (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"".join((line, *kept, b"\r\n", rest)))

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_connection(self, max_connections: int) -> None:
        """Answer 503 to a connection beyond the limit, before anything of it is read, and close it."""
        message = (
            f"this gateway has {max_connections} open connections, its limit (max_connections); repeat the request"
        )
        error = UnavailableError(message, code="too_many_connections", retry_after_ms=1000 * RETRY_AFTER_S)
        self._refuse(error, HTTPStatus.SERVICE_UNAVAILABLE, f"retry-after: {RETRY_AFTER_S}\r\n")

    def _refuse(self, error: PenstockError, status: HTTPStatus, headers: str = "") -> None:
        """Answer an error and close the connection. Where an answer is due or has begun, close behind it instead."""
        self._is_over = True
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            if not running.more_body:
                running.keep_alive = False
                # A second request has paused reading. Bytes that stay unread would reset the connection at its end.
                self.flow.resume_reading()
                return
            running.disconnected = True
            running.message_event.set()
        if self.kept is not None:
            self.kept.leave()
        if running is None or running.response_complete or not running.response_started:
            body, request_id = json.dumps(error_body(error)).encode(), uuid.uuid4().hex
            self.note_refusal(error, status, request_id)
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            head += f"x-content-type-options: nosniff\r\n{ID_HEADER.lower()}: {request_id}\r\n{headers}"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def head_with_sockets(
    paths: Iterable[str], note_refusal: Callable[[PenstockError, HTTPStatus, str], None], keep: Keep | None = None
) -> type[BoundedHead]:
    """Return the protocol of a gateway with WebSockets at these paths. `keep`: what holds its connections, too."""
    own = {"socket_paths": frozenset(path.encode() for path in paths), "note_refusal": staticmethod(note_refusal)}
    return type("BoundedHead", (BoundedHead,), {**own, "keep": keep})


def _too_large() -> tuple[PenstockError, HTTPStatus]:
    message = f"the request's head or trailers are larger than {MAX_HEAD_BYTES} bytes"
    return TooLargeError(message, code="head_too_large"), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


def _wrong_host(num_hosts: int, version: str) -> tuple[PenstockError, HTTPStatus] | None:
    """Return the error of a request with too few or too many `Host` headers (RFC 9112, 3.2), or None."""
    if num_hosts == 1 or (num_hosts == 0 and version in _WITHOUT_CHUNKS):
        return None
    message = f"the request has {num_hosts} Host headers; HTTP/1.1 requires exactly one"
    return RequestError(message, code="invalid_http", param="host"), HTTPStatus.BAD_REQUEST


def _wrong_encoding(values: list[bytes]) -> tuple[PenstockError, HTTPStatus] | None:
    """Return the error of a body in a transfer coding that is not decoded here (RFC 9112, 6.1), or None."""
    given = b", ".join(values)
    if not values or given.strip().lower() == b"chunked":
        return None
    message = (
        f"Transfer-Encoding {given[:100].decode('latin-1')!r} is not supported: send the body as it is, or chunked"
    )
    error = RequestError(message, code="transfer_encoding_unsupported", param="transfer-encoding")
    return error, HTTPStatus.NOT_IMPLEMENTED


def _end_body_by_closing(cycle: RequestResponseCycle) -> None:
    """Send a body of unknown length as it is. It ends with the connection, because HTTP/1.0 has no chunks."""
    send_framed, has_length = cycle.send, False

    async def send(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            # uvicorn compares each part with the length that is left.
            cycle.expected_content_length = len(message.get("body", b""))
        await send_framed(message)

    cycle.send = send  # type: ignore[method-assign]
