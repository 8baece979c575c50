"""The messages that a client receives over a WebSocket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from penstock.contract.errors import PenstockError
from penstock.gateway.openai.errors import error_body
from penstock.gateway.stream.framing import NDJSON, Framing, events_in


def message(kind: str, tag: str | None, members: Mapping[str, Any]) -> bytes:
    """Encode a message of the type `kind` about the stream that the client calls `tag`."""
    named = {"type": kind, **({} if tag is None else {"id": tag})}
    return to_json({**named, **members}, ensure_ascii=True)


def error_message(kind: str, tag: str | None, error: PenstockError) -> bytes:
    """Encode an error, or with the kind `refused` the refusal of a message."""
    return message(kind, tag, {"status": error.status, **error_body(error)})


class SocketFraming(Framing):
    """The events of one stream as messages, one per line."""

    media_type = content_type = NDJSON
    needs_whole_events = True

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._head = message("event", tag, {})[:-1]

    def events(self, events: bytes) -> bytes:
        """Return one line for each event."""
        return b"".join(
            b'%b,"event_id":"%b","data":%b}\n' % (self._head, event_id, data)
            if event_id
            else b'%b,"data":%b}\n' % (self._head, data)
            for event_id, data in events_in(events)
        )

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
        return not line.startswith(self._head)
