"""A limit on a request's head: uvicorn reads one of any size, and keeps it."""

from __future__ import annotations

import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.contract.errors import TooLargeError
from penstock.gateway.openai.errors import error_body

MAX_HEAD_BYTES = 64 << 10


class BoundedHead(HttpToolsProtocol):
    """uvicorn's protocol, which answers 431 and hangs up when a head grows beyond MAX_HEAD_BYTES."""

    _num_head_bytes = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        """Bytes came; they may end a head and begin a body."""
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        """The head is read."""
        self._is_in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next head may follow."""
        self._is_in_head = True
        super().on_message_complete()

    def _refuse(self) -> None:
        error = TooLargeError(f"the head is larger than {MAX_HEAD_BYTES} bytes", code="head_too_large")
        body = json.dumps(error_body(error)).encode()
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
