"""A uvicorn WebSocket protocol with limits that uvicorn lacks.

uvicorn parses all received bytes at once, which takes a second for a flood of tiny frames. It keeps each fragment of a
message as an object, buffers messages of any number of connections, and answers pings of a client that reads nothing.
It closes every WebSocket at the start of a shutdown, and it calls a client dead whose pong it has not read yet.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from penstock.gateway.budget import Claim
from penstock.gateway.http.protocol import ReaderWatch

# The memory claimed for a large WebSocket message. It grows while the message arrives, within a time limit.

Budget = Callable[[], AbstractAsyncContextManager[Claim]]
"""Makes an empty claim for one message."""


class MessageMemory:
    """The memory of one connection's large message, from its first parts until the application has taken it."""

    def __init__(self, resume: Callable[[], None], fail: Callable[[str], None]) -> None:
        """`resume` is called when received bytes may be parsed again, and `fail` when a message does not arrive."""
        self._resume = resume
        self._fail = fail
        self._budget: Budget | None = None
        self._timeout_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._num_needed = self._num_granted = 0
        self._has_arrived = False
        self._changed = asyncio.Event()
        """Set when the message needs more memory, or has arrived."""
        self._taken = asyncio.Event()

    def set_budget(self, budget: Budget, timeout_s: float) -> None:
        """Set where memory comes from. A message must arrive within `timeout_s`, without its waits for memory."""
        self._budget, self._timeout_s = budget, timeout_s

    @property
    def must_wait(self) -> bool:
        """Whether no more bytes may be parsed: the message waits for memory, or has arrived and is not taken yet."""
        return self._task is not None and (self._num_granted < self._num_needed or self._has_arrived)

    def claim(self, num_bytes: int) -> None:
        """Start waiting for memory if the parts of the message have more bytes than were granted."""
        if self._budget is None or self._has_arrived or num_bytes <= self._num_granted:
            return
        self._num_needed = num_bytes
        self._changed.set()
        if self._task is None:
            self._taken.clear()
            self._task = asyncio.get_running_loop().create_task(self._hold(self._budget))

    def arrived(self) -> None:
        """Note that the message is complete."""
        self._has_arrived = self._task is not None
        self._changed.set()

    def taken(self) -> None:
        """Note that the application no longer needs the message."""
        self._taken.set()

    def close(self) -> None:
        """Give the memory back at the end of the connection."""
        if self._task is not None:
            self._task.cancel()

    async def _hold(self, budget: Budget) -> None:
        async with budget() as claim:
            try:
                await self._arrive(claim)
            except TimeoutError:
                self._fail(f"a message did not arrive within {self._timeout_s:g} s")
            else:
                await self._taken.wait()
        self._task = None
        self._num_needed = self._num_granted = 0
        self._has_arrived = False
        self._resume()

    async def _arrive(self, claim: Claim) -> None:
        """Let the claim grow until the message has arrived. Raises TimeoutError."""
        loop, left_s = asyncio.get_running_loop(), self._timeout_s
        while not self._has_arrived:
            await claim.grow_to(self._num_needed)
            # A claim may have at most what one message may have, so the whole message then has its memory.
            self._num_granted = max(self._num_needed, claim.amount)
            self._changed.clear()
            self._resume()
            began_s = loop.time()
            async with asyncio.timeout(left_s):
                await self._changed.wait()
            left_s -= loop.time() - began_s


PING_INTERVAL_S = 20.0
PING_TIMEOUT_S = 20.0
"""Seconds in which an idle client must answer a ping."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that a client has to close the connection after the server's close frame."""
PARSE_S = 0.002
"""Seconds of parsing after which other connections are served."""
SLICE_BYTES = 1 << 10
"""Bytes that are parsed at once. They may contain 170 frames, which take 2 ms."""
MAX_SMALL_BYTES = 16 << 10
"""Bytes of an incomplete message that are kept without asking for memory."""
RECEIVE_BYTES = 64 << 10
"""Bytes that the kernel keeps for a WebSocket that is not read; Linux takes twice as much. Without a limit, it takes
megabytes. As much may wait unparsed in this process."""
_CHECKED_BYTES = 256 << 10
"""Bytes of a text that are checked at once."""
EXTENSION = "penstock.socket"
"""The name under which the ASGI scope holds the protocol."""
_LOG = logging.getLogger("penstock.gateway.sockets")
# The libraries log each connection at this level, with its query.
_LOG.setLevel(logging.WARNING)


class _Connection(ServerProtocol):
    """The protocol's state. A client may close within a message, because control frames may come between fragments."""

    def recv_frame(self, frame: Frame) -> None:
        """Process a received frame."""
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


class BoundedSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with bounds on work, memory and slow clients.

    - Received bytes are parsed in slices, and the connection is not read meanwhile.
    - A message above MAX_SMALL_BYTES waits for memory (`memory`) while it arrives, and must arrive in time.
    - A client that reads nothing gets only the newest of its pongs, and is disconnected as ReaderWatch says.
    - After a violation of the protocol, the server sends a close frame and waits CLOSE_TIMEOUT_S for the client's end.
    - A shutdown sets `draining`; the application closes the WebSocket.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOG
        # No extensions: a compressed message may be a thousand times as large as its bytes.
        self.conn = _Connection(max_size=self.config.ws_max_size, logger=_LOG)
        self.close_timeout = CLOSE_TIMEOUT_S
        self.draining = asyncio.Event()
        """Set when the server begins to shut down."""
        self._unparsed = bytearray()
        self._fragments = bytearray()
        """The frames of an incomplete message."""
        self._later: asyncio.Handle | None = None
        self._late_pong = b""
        self.memory = MessageMemory(self._parse_more, lambda reason: self._fail(CloseCode.POLICY_VIOLATION, reason))
        """The memory of large messages. The application sets where it comes from."""

    # For the application ----------------------------------------------------------------------------

    def release_message(self) -> None:
        """Give back the memory of the last received message."""
        self.memory.taken()
        self._parse_more()

    async def receive(self) -> Any:
        """Return the next event for the application. A text has the name `utf8` and is in bytes."""
        message = await super().receive()
        self._parse_more()
        return message

    async def send(self, message: Any) -> None:
        """Send an event of the application, or a `part` of a text. Raises ClientDisconnected after the end."""
        if self.close_sent:
            raise ClientDisconnected
        if "part" in message:
            await self._send_part(message["part"], is_last=message["is_last"])
            return
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._parse_more()
        elif message["type"] == "websocket.close":
            self._reader_watch.start()
        elif message["type"] == "websocket.http.response.body" and self.transport.is_closing():
            # uvicorn would log that a refused handshake is not complete.
            self.handshake_complete = True

    async def _send_part(self, part: bytes, *, is_last: bool) -> None:
        """Send a part of a text as a frame, once the client has read enough."""
        await self.writable.wait()
        if self.disconnected or self.close_sent:
            raise ClientDisconnected
        if self.conn.expect_continuation_frame:
            self.conn.send_continuation(part, fin=is_last)
        else:
            self.conn.send_text(part, fin=is_last)
        self.transport.write(b"".join(self.conn.data_to_send()))

    # Events of the connection -----------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Handle a connection whose HTTP head offers a WebSocket."""
        super().connection_made(transport)
        self._reader_watch = ReaderWatch(self.loop, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._reader_watch.stop()
        self._unparsed.clear()
        self.memory.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Queue received bytes for parsing."""
        if not self.conn.eof_sent:
            self._unparsed += data
            self._parse_more()

    def pause_writing(self) -> None:
        """Handle a full send buffer: the client is watched."""
        super().pause_writing()
        self._reader_watch.start()

    def resume_writing(self) -> None:
        """Handle a drained send buffer."""
        super().resume_writing()
        self._reader_watch.stop()
        pong, self._late_pong = self._late_pong, b""
        if pong and not self.close_sent and not self.transport.is_closing():
            self.transport.write(pong)

    def shutdown(self) -> None:
        """Handle the beginning of a shutdown."""
        self.draining.set()
        if self.close_sent:
            super().shutdown()

    # Parsing ----------------------------------------------------------------------------------------

    def _parse_more(self) -> None:
        """Parse received bytes for PARSE_S, and the rest later. Read from the connection again once all are parsed."""
        if self._later is not None or self.transport.is_closing():
            return
        until_s = time.monotonic() + PARSE_S
        at = 0
        while at < len(self._unparsed) and not self._must_wait():
            if time.monotonic() > until_s:
                self._later = self.loop.call_soon(self._parse_more_later)
                break
            self._parse(bytes(self._unparsed[at : at + SLICE_BYTES]))
            at += SLICE_BYTES
        del self._unparsed[:at]
        if self.transport.is_closing():
            self._unparsed.clear()
        elif self._unparsed or self._must_wait():
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _parse_more_later(self) -> None:
        self._later = None
        self._parse_more()

    def _must_wait(self) -> bool:
        """Return whether the next bytes may not be parsed yet."""
        is_opening = self.handshake_initiated and not self.handshake_complete
        return not self.conn.eof_sent and (is_opening or self.read_paused or self.memory.must_wait)

    def _parse(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()
        if self.conn.parser_exc is not None and not self.close_sent:
            self.handle_parser_exception()
        elif self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        elif (num_bytes := len(self.conn.reader.buffer) + len(self._fragments)) > MAX_SMALL_BYTES:
            self.memory.claim(num_bytes)

    # Frames -----------------------------------------------------------------------------------------

    def handle_connect(self, event: Request) -> None:
        """Handle the head: start the application, with access to this protocol."""
        super().handle_connect(event)
        if not self.close_sent:
            extensions: dict[str, Any] = {**(self.scope["extensions"] or {}), EXTENSION: self}
            self.scope["extensions"] = extensions

    def handle_text(self, event: Frame) -> None:
        """Handle the first frame of a text."""
        self.curr_msg_data_type = "text"
        self._begin_message(event)

    def handle_bytes(self, event: Frame) -> None:
        """Handle the first frame of a binary message."""
        self.curr_msg_data_type = "bytes"
        self._begin_message(event)

    def handle_cont(self, event: Frame) -> None:
        """Add a frame to its message. One buffer holds all frames, because a client may send millions of tiny ones."""
        self._fragments += event.data
        if event.fin:
            whole, self._fragments = bytes(self._fragments), bytearray()
            self._end_message(whole)

    def _begin_message(self, event: Frame) -> None:
        if event.fin:
            self._end_message(bytes(event.data))
        else:
            self._fragments += event.data

    def _end_message(self, whole: bytes) -> None:
        """Queue a whole message for the application. Text that is not UTF-8 ends the connection."""
        self.memory.arrived()
        if self.close_sent:
            self.memory.taken()
        elif self.curr_msg_data_type == "text" and not _is_utf8(whole):
            self._fail(CloseCode.INVALID_DATA, "the text is not UTF-8")
        else:
            # Parsers of JSON take bytes. A text of megabytes would be copied twice more.
            name = "utf8" if self.curr_msg_data_type == "text" else "bytes"
            event: Any = {"type": "websocket.receive", name: whole}
            self.queue.put_nowait(event)
            self.read_paused = True

    def handle_ping(self) -> None:
        """Answer a ping. While the client reads nothing, only the newest pong is kept (RFC 6455, 5.5.3)."""
        pongs = self.conn.data_to_send()
        if self.writable.is_set():
            self.transport.write(b"".join(pongs))
        elif pongs:
            self._late_pong = pongs[-1]

    def handle_close(self, event: Frame) -> None:
        """Handle a close frame. The client may not read the answer."""
        super().handle_close(event)
        self._reader_watch.start()

    def keepalive_timeout(self) -> None:
        """Handle a missing pong. It may be in bytes that are not read yet, or its ping behind bytes that wait."""
        self._reader_watch.start()
        if self.read_paused or self._unparsed or self._must_wait() or self.transport.get_write_buffer_size():
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def handle_parser_exception(self) -> None:
        """Send the close frame of a violated protocol, and wait for the client's end.

        A connection that is closed with unread bytes would be reset, and the client might miss the close frame.
        """
        close = self.conn.close_sent
        code = CloseCode.ABNORMAL_CLOSURE if close is None else close.code
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self._reader_watch.start()
        self.stop_keepalive()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
        self.transport.resume_reading()

    def _fail(self, code: int, reason: str) -> None:
        if not self.close_sent and not self.transport.is_closing():
            self.conn.fail(code, reason)
            self.handle_parser_exception()


def _is_utf8(text: bytes) -> bool:
    """Return whether a text is UTF-8, without a copy of a large one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for at in range(0, len(text), _CHECKED_BYTES):
            decoder.decode(text[at : at + _CHECKED_BYTES])
        decoder.decode(b"", True)
    except UnicodeDecodeError:
        return False
    return True
