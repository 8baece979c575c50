"""Messages between the node and its grammar processes: msgpack after a four-byte length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 28


def frame(message: Any) -> bytes:
    """Encode a message."""
    body: bytes = msgpack.packb(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class FrameReader:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that these bytes complete. Raises ValueError for an impossible length."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
            if end > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {end} bytes")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield msgpack.unpackb(body, strict_map_key=False)
