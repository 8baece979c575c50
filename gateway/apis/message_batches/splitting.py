"""The body of a message batch, split into a line for each request while it arrives.

Its command is `python -m penstock.gateway.apis.message_batches.splitting MAX_ROWS`. A gateway starts this process for
each large body, and sends the body to its stdin, a socket. What comes back are blocks with a HEAD: lines, and at last
either the number of rows or a refusal.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import struct
import sys
from typing import Any

from pydantic_core import from_json, to_json

from penstock.contract.errors import RequestError, TooLargeError
from penstock.contract.json_text import json_refusal, without_mark
from penstock.contract.problems import put_under
from penstock.gateway.request.structure import check_structure
from penstock.runtime.process_memory import limit_growth

MAX_ROW_BYTES = 16 << 20
"""Largest request of a batch in bytes. The holder of a batch reads no longer line."""
HEAD = struct.Struct(">cI")
"""Header of a block of the answer: its kind, and its length in bytes."""
LINES, END, REFUSAL = b"L", b"E", b"R"
COUNT = struct.Struct(">Q")
"""The content of the block END: the number of rows."""
MAX_GROWTH_BYTES = 192 << 20
"""Bytes of data memory that the process may allocate after its start. A body that needs more kills it."""
PARSE_TIMEOUT_S = 20
"""Seconds that one piece of a body may take. After that the process is killed."""
_READ_BYTES = 256 << 10
_MARK_BYTES = 4
"""Bytes of the longest byte order mark."""
_BLANK = re.compile(rb"[ \t\r\n]*")
_MARK = re.compile(rb'["{}\[\]]')
"""What begins a string, or opens or closes a bracket."""
_QUOTE, _OPENING = ord('"'), frozenset(b"{[")
_NEXT: dict[str, dict[bytes, str]] = {
    "body": {b"{": "name"},
    "name": {b'"requests"': "colon"},
    "colon": {b":": "list"},
    "list": {b"[": "first"},
    "first": {b"{": "request", b"]": "close"},
    "separator": {b",": "start", b"]": "close"},
    "start": {b"{": "request"},
    "close": {b"}": "end"},
    "end": {},
}
"""What may come outside of the requests: the next token, and what follows it."""
_IN_LIST = ("first", "separator", "start")
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MEMBERS = {"custom_id", "params"}


class RequestSplitter:
    """Makes a line with `custom_id` and `body` of each request of a body, which comes in pieces.

    Its methods raise RequestError for a body that is no batch, and TooLargeError for a request that is too large.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        # Of one request.
        self._numbers = dict[str, int]()
        self._held = bytearray()
        """What has arrived of the token or request that is being read."""
        self._plain = bytearray()
        """The same with other characters in place of escaped backslashes and quotes, so that a quote ends a string.

        No pattern reads whole strings. One that can go back takes memory with each escape. One that cannot (`*+`) gives
        wrong ends in CPython 3.11.0 to 3.11.4 (CPython issue 106052).
        """
        self._cut = b""
        """A backslash at the end of the last piece, whose second half has not arrived."""
        self._expected = "body"
        self._at = self._depth = 0
        """Position in the request that is being read, and the number of its open brackets."""
        self._is_in_string = False
        self._has_begun = False
        """Whether the first bytes have arrived, which tell the body's encoding."""

    @property
    def num_rows(self) -> int:
        """The number of requests that have ended."""
        return len(self._numbers)

    def push(self, piece: bytes | bytearray) -> bytes:
        """Add a piece of the body, and return the lines of the requests that end in it."""
        if not self._has_begun:
            self._held += piece
            if len(self._held) < _MARK_BYTES:
                return b""
            piece = self._begin()
        self._add(piece)
        lines = list[bytes]()
        while True:
            if self._expected == "request":
                if not self._read_request():
                    break
                lines.append(self._line_of(self._taken(self._at)))
                self._expected = "separator"
            elif not self._read_token():
                break
        if len(self._held) > MAX_ROW_BYTES:
            raise self._row_too_large()
        return b"".join(lines)

    def end(self) -> None:
        """Note that the body has ended."""
        if not self._has_begun:
            self.push(self._begin())
        if self._expected != "end" or self._cut:
            raise RequestError("the body ends early: it is not valid JSON")
        if not self._numbers:
            raise RequestError("requests: must have at least 1 item", param="requests")

    def _begin(self) -> bytes:
        """Return the first bytes without the mark of their encoding."""
        first, self._has_begun = without_mark(bytes(self._held)), True
        self._held.clear()
        return first

    def _add(self, piece: bytes | bytearray) -> None:
        piece = self._cut + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._cut = piece[len(piece) - num_backslashes % 2 :]
        piece = piece[: len(piece) - len(self._cut)]
        self._held += piece
        self._plain += piece.replace(rb"\\", b"__").replace(rb"\"", b"__")

    def _taken(self, num_bytes: int) -> bytes:
        taken = bytes(self._held[:num_bytes])
        del self._held[:num_bytes]
        del self._plain[:num_bytes]
        return taken

    def _read_token(self) -> bool:
        """Read what comes next outside of the requests. Return whether it was there."""
        self._taken(_BLANK.match(self._held).end())  # type: ignore[union-attr]
        if not self._held:
            return False
        for token, following in _NEXT[self._expected].items():
            if self._held.startswith(token):
                self._expected = following
                if following == "request":
                    self._at = self._depth = 0
                else:
                    self._taken(len(token))
                return True
            if token.startswith(self._held):
                return False
        if self._expected not in _IN_LIST:
            raise RequestError("the body must be a JSON object with one member, the list requests", param="requests")
        name = f"requests[{self.num_rows}]"
        raise RequestError(f"{name}: the list must have objects, with commas between them", param=name)

    def _read_request(self) -> bool:
        """Read on in a request. Return whether it ends at `_at`."""
        while True:
            if self._is_in_string:
                quote = self._plain.find(b'"', self._at)
                if quote < 0:
                    break
                self._at = quote + 1
                self._is_in_string = False
            found = _MARK.search(self._plain, self._at)
            if found is None:
                break
            self._at = found.end()
            mark = self._plain[found.start()]
            if mark == _QUOTE:
                self._is_in_string = True
                continue
            self._depth += 1 if mark in _OPENING else -1
            if self._depth == 0:
                return True
        self._at = len(self._plain)
        return False

    def _line_of(self, raw: bytes) -> bytes:
        number = self.num_rows
        name = f"requests[{number}]"
        if number == self._max_rows:
            message = f"requests: must have at most {number} items (PENSTOCK_FILES_MAX_MESSAGE_BATCH_ROWS)"
            raise RequestError(message, param="requests")
        check_structure(raw)
        try:
            fields: dict[str, Any] = from_json(raw, allow_inf_nan=False)
        except ValueError as error:
            refusal = json_refusal(raw, error, f"{name}: not valid JSON")
            if refusal.param is not None:
                put_under(refusal, name)
            raise RequestError(refusal.message, param=refusal.param or name) from None
        custom_id, params = fields.get("custom_id"), fields.get("params")
        if not isinstance(custom_id, str) or _CUSTOM_ID.fullmatch(custom_id) is None:
            message = f"{name}.custom_id: must be a string that matches the pattern ^[a-zA-Z0-9_-]{{1,64}}$"
            raise RequestError(message, param=f"{name}.custom_id")
        if custom_id in self._numbers:
            message = f"{name}.custom_id: {custom_id} is also that of requests[{self._numbers[custom_id]}]"
            raise RequestError(message, param=f"{name}.custom_id")
        if not isinstance(params, dict):
            raise RequestError(f"{name}.params: must be an object", param=f"{name}.params")
        if unknown := fields.keys() - _MEMBERS:
            param = f"{name}.{min(unknown)[:64]}"
            raise RequestError(f"{param}: unknown field", code="unknown_field", param=param)
        line = to_json({"custom_id": custom_id, "body": params}) + b"\n"
        if len(raw) > MAX_ROW_BYTES or len(line) > MAX_ROW_BYTES:
            raise self._row_too_large()
        if b"Infinity" in line:
            _check_numbers(line, name)
        self._numbers[custom_id] = number
        return line

    def _row_too_large(self) -> TooLargeError:
        name = f"requests[{self.num_rows}]"
        return TooLargeError(f"{name}: larger than {MAX_ROW_BYTES} bytes", code="body_too_large", param=name)


def _check_numbers(line: bytes, name: str) -> None:
    """Refuse a request with a number such as 1e999, which the holder of the batch could not read again."""
    try:
        from_json(line, allow_inf_nan=False)
    except ValueError:
        raise RequestError(f"{name}.params: a number is too large", param=f"{name}.params") from None


def main() -> None:
    """Split one body."""
    splitter = RequestSplitter(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the gateway, which ends this process.
    os.nice(10)  # Large bodies must not take the cores from token streams.
    gc.disable()  # A parsed request is a tree without cycles.
    limit_growth(MAX_GROWTH_BYTES)
    with socket.socket(fileno=sys.stdin.fileno()) as line:

        def send(kind: bytes, content: bytes) -> None:
            line.sendall(HEAD.pack(kind, len(content)) + content)

        try:
            while piece := line.recv(_READ_BYTES):
                signal.alarm(PARSE_TIMEOUT_S)
                lines = splitter.push(piece)
                signal.alarm(0)
                if lines:
                    send(LINES, lines)
            splitter.end()
            send(END, COUNT.pack(splitter.num_rows))
        except RequestError as error:
            refusal = {"message": error.message, "code": error.code, "param": error.param, "status": error.status}
            send(REFUSAL, json.dumps(refusal).encode())


if __name__ == "__main__":
    main()
