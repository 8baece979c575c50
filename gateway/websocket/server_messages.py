"""The messages that a client receives over a WebSocket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from penstock.contract.errors import PenstockError
from penstock.gateway.openai.errors import error_body
from penstock.gateway.stream.framing import LineFraming


def message(kind: str, tag: str | None, members: Mapping[str, Any]) -> bytes:
    """Encode a message of the type `kind` about the stream that the client calls `tag`."""
    named = {"type": kind, **({} if tag is None else {"id": tag})}
    return to_json({**named, **members}, ensure_ascii=True)


def error_message(kind: str, tag: str | None, error: PenstockError) -> bytes:
    """Encode an error, or with the kind `refused` the refusal of a message."""
    return message(kind, tag, {"status": error.status, **error_body(error)})


class SocketFraming(LineFraming):
    """The events of one stream as messages, one per line."""

    _line_end = b"}\n"

    def __init__(self, tag: str) -> None:
        super().__init__()
        self._tag = tag
        self._message_head = message("event", tag, {})[:-1]

    def _begin(self, event_id: bytes, data: bytes) -> bytes:
        if event_id:
            return b'%b,"event_id":"%b","data":%b' % (self._message_head, event_id, data)
        return b'%b,"data":%b' % (self._message_head, data)

    def keep_alive(self, comment: bytes) -> bytes:
        """Return nothing: the pings of the WebSocket keep it alive."""
        return b""

    def error(self, error: PenstockError, event: bytes) -> bytes:
        """Return the message that ends a failed stream. It has the same shape in every API."""
        return error_message("error", self._tag, error) + b"\n"

    def end(self) -> bytes:
        """Return the message that ends a complete stream."""
        return message("end", self._tag, {}) + b"\n"

    def is_last(self, line: bytes) -> bool:
        """Return whether no message about the stream follows this one."""
        return not line.startswith(self._message_head)
