"""What uvicorn makes of a request's bytes, mended: it reads a head of any size, for any time, and keeps it; it loses a
body that comes with an offer of another protocol; and it keeps what nobody takes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.contract.errors import PenstockError, RequestError, TooLargeError
from penstock.gateway.openai.errors import error_body

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 60.0
"""A connection without a whole head is closed then: each takes one of the process's descriptors."""
TAKE_TIMEOUT_S = 60.0
"""A reader that takes nothing for so long of what is ready for it is hung up on."""
MAX_LATE_S = 1.0
_NO_LINGER = struct.pack("ii", 1, 0)


class BoundedHead(HttpToolsProtocol):
    """uvicorn's protocol, which answers 431 and hangs up when a head grows beyond MAX_HEAD_BYTES, or what stands
    between a body's chunks and behind them. One that does not come is not waited for.

    An `Upgrade` is passed over, as RFC 9110 (7.8) lets a server do.
    """

    _num_head_bytes = 0
    """Of everything but bodies; they begin anew with each part of a body."""
    _is_head_too_large = False
    _patience: asyncio.TimerHandle | None = None
    """While bytes come, or none have, and no request is being answered: of a head, or of a body that was refused."""
    _stuck: asyncio.TimerHandle | None = None
    """While bytes wait that no more are put behind."""
    _stuck_due_s = 0.0

    def connection_made(self, transport: Any) -> None:
        """Somebody is there."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Much waits for the reader; the answer goes on when most of it is taken."""
        super().pause_writing()
        if self._stuck is None:
            self._watch_reader()

    def resume_writing(self) -> None:
        """Most of it is taken."""
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def on_response_complete(self) -> None:
        """All is written; it may wait for the reader."""
        super().on_response_complete()
        if self._stuck is None:
            self._watch_reader()

    def data_received(self, data: bytes) -> None:
        """Bytes came; they may end a head and begin a body."""
        self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_on(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_head_too_large:
                error = RequestError("this is not HTTP/1.1", code="invalid_http")
                self._refuse(error, HTTPStatus.BAD_REQUEST)
        is_too_large = self._is_head_too_large or self._num_head_bytes > MAX_HEAD_BYTES
        if is_too_large and not self.transport.is_closing():
            error = TooLargeError(f"head or trailers are larger than {MAX_HEAD_BYTES} bytes", code="head_too_large")
            self._refuse(error, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if self._patience is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """The head is read. One that came whole, in a single read, has not been measured yet."""
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._is_head_too_large = True
            raise TooLargeError("the head is too large")  # ends the parser; data_received answers
        self._num_head_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body is read."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head may follow."""
        self._num_head_bytes = 0
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Where this is true, uvicorn does nothing with the head: it is read again, without the offer."""
        return any(name == b"upgrade" for name, _ in self.headers)

    def _read_on(self, rest: bytes) -> None:
        """No body is read behind an offer of another protocol by httptools, taken or not."""
        kept = (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join((line, *kept, b"\r\n", rest)))

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _watch_reader(self, num_before: int = 0) -> None:
        """A transport that is closed still waits for its reader to take the last byte."""
        num_waiting = self.transport.get_write_buffer_size()
        # A process that was busy itself, or had no core, has not written what the reader would have taken.
        is_late = self.loop.time() - self._stuck_due_s > MAX_LATE_S
        if num_waiting and num_waiting == num_before and not is_late:
            # Without it the system would keep megabytes for a reader that may never come.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.transport.abort()
        elif num_waiting:
            self._stuck_due_s = self.loop.time() + TAKE_TIMEOUT_S
            self._stuck = self.loop.call_at(self._stuck_due_s, self._watch_reader, num_waiting)
        else:
            self._stuck = None

    def _refuse(self, error: PenstockError, status: HTTPStatus) -> None:
        body = json.dumps(error_body(error)).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
