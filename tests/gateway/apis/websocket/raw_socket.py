"""A WebSocket client that can violate the protocol: it sends any bytes, and reads the server's frames."""

from __future__ import annotations

import json
import socket
import struct
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

HANDSHAKE = {
    "Host": "gateway",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
}
CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
TIMEOUT_S = 60.0
_MASK = b"\x01\x02\x03\x04"


class ServerFrame(NamedTuple):
    opcode: int
    data: bytes

    @property
    def close_code(self) -> int:
        """The code of a close frame, 1005 if it has none."""
        return int(struct.unpack("!H", self.data[:2])[0]) if self.data else 1005


def frame(opcode: int, data: bytes = b"", *, fin: bool = True, masked: bool = True, reserved: int = 0) -> bytes:
    """The bytes of one frame."""
    size = len(data)
    flag = 0x80 if masked else 0
    head = bytes([(0x80 if fin else 0) | reserved << 4 | opcode])
    if size < 126:
        head += bytes([flag | size])
    elif size < 1 << 16:
        head += struct.pack("!BH", flag | 126, size)
    else:
        head += struct.pack("!BQ", flag | 127, size)
    if not masked:
        return head + data
    key = int.from_bytes((_MASK * (size // 4 + 1))[:size], "big")
    return head + _MASK + (int.from_bytes(data, "big") ^ key).to_bytes(size, "big")


class RawSocket:
    """A connection to the gateway at `url`. `received_bytes`: the size of its receive buffer."""

    def __init__(self, url: str, *, received_bytes: int | None = None, opens: bool = True, **headers: str) -> None:
        address = urlsplit(url)
        self.socket = socket.socket()
        if received_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect((address.hostname, address.port))
        self._unread = b""
        if opens:
            status, _ = self.ask(headers)
            assert status == 101

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    def ask(self, headers: dict[str, str], *, line: str = "GET /v1/stream HTTP/1.1") -> tuple[int, bytes]:
        """Send a handshake. Return the status and the rest of the received bytes."""
        lines = [line, *(f"{name}: {value}" for name, value in (HANDSHAKE | headers).items() if value), "", ""]
        self.socket.sendall("\r\n".join(lines).encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            part = self.socket.recv(65536)
            assert part, "the connection ended without an answer"
            answer += part
        head, _, self._unread = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), head + self._unread

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def send_message(self, **message: Any) -> None:
        self.send(frame(TEXT, json.dumps(message).encode()))

    def receive(self) -> ServerFrame:
        """Return the next frame. The end of the connection is an empty close frame."""
        try:
            head = self._read(2)
            size = head[1]
            if size == 126:
                size = int.from_bytes(self._read(2), "big")
            elif size == 127:
                size = int.from_bytes(self._read(8), "big")
            return ServerFrame(head[0] & 15, self._read(size))
        except EOFError:
            return ServerFrame(CLOSE, b"")

    def messages(self) -> list[dict[str, Any]]:
        """The messages up to the first one that ends a stream."""
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] not in ("end", "error", "refused"):
            received = self.receive()
            if received.opcode == TEXT:
                found.append(json.loads(received.data))
            assert received.opcode != CLOSE, received
        return found

    def close_code(self) -> int:
        """The code with which the server closes."""
        while (received := self.receive()).opcode != CLOSE:
            pass
        return received.close_code

    def _read(self, size: int) -> bytes:
        while len(self._unread) < size:
            part = self.socket.recv(1 << 16)
            if not part:
                raise EOFError
            self._unread += part
        data, self._unread = self._unread[:size], self._unread[size:]
        return data
