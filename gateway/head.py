"""What uvicorn makes of a request's bytes, mended: it reads a head of any size, and keeps it; and it loses a body that
comes with an offer of another protocol.
"""

from __future__ import annotations

import json
from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.contract.errors import TooLargeError
from penstock.gateway.openai.errors import error_body

MAX_HEAD_BYTES = 64 << 10


class BoundedHead(HttpToolsProtocol):
    """uvicorn's protocol, which answers 431 and hangs up when a head grows beyond MAX_HEAD_BYTES, or what stands
    between a body's chunks and behind them.

    An `Upgrade` is passed over, as RFC 9110 (7.8) lets a server do.
    """

    _num_head_bytes = 0
    """Of everything but bodies; they begin anew with each part of a body."""

    def data_received(self, data: bytes) -> None:
        """Bytes came; they may end a head and begin a body."""
        self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_on(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        """The head is read."""
        self._num_head_bytes = 0
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

    def _refuse(self) -> None:
        error = TooLargeError(f"head or trailers are larger than {MAX_HEAD_BYTES} bytes", code="head_too_large")
        body = json.dumps(error_body(error)).encode()
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
