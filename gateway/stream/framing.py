"""How a streamed answer is framed on the wire: as server-sent events, or as one JSON object per line (NDJSON).

Encoders write server-sent events. Every other framing is made from these events, so an API defines its events once.
"""

from __future__ import annotations

from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.contract.errors import PenstockError

EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
DONE_LINE = b'{"done":true}\n'
"""The last line of a complete answer as NDJSON."""
MAX_ACCEPT_CHARS = 1024
"""Characters of the header `Accept` that are read."""
_EXTENSION = "penstock.framing"


class Framing:
    """Server-sent events, as the encoders write them. Subclasses change the bytes."""

    media_type = EVENT_STREAM
    content_type = "text/event-stream; charset=utf-8"
    needs_whole_events = False
    """Whether `events` takes only whole events. Encoders cut large events into parts."""

    def events(self, events: bytes) -> bytes:
        """Return the bytes for events."""
        return events

    def keep_alive(self, comment: bytes) -> bytes:
        """Return what a silent stream sends. `comment` is that of server-sent events."""
        return comment

    def error(self, error: PenstockError, event: bytes) -> bytes:
        """Return the end of a stream that fails. `event` is the error in the API's shape."""
        return self.events(event)

    def end(self) -> bytes:
        """Return the end of a complete stream."""
        return b""


class NdjsonFraming(Framing):
    """One JSON object per line. The id of an event is the member `event_id` of its object."""

    media_type = content_type = NDJSON
    needs_whole_events = True

    def events(self, events: bytes) -> bytes:
        """Return one line for each event."""
        return b"".join(
            b'{"event_id":"%b",%b\n' % (event_id, data[1:]) if event_id else data + b"\n"
            for event_id, data in events_in(events)
        )

    def keep_alive(self, comment: bytes) -> bytes:
        """Return white space before the next object. An empty line would end the parsers that expect an object."""
        return b" "

    def end(self) -> bytes:
        """Return the line that marks a complete answer."""
        return DONE_LINE


SSE = Framing()
_NDJSON_LINES = NdjsonFraming()


def events_in(events: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the id, which may be empty, and the JSON object of each event. Comments and `[DONE]` are left out."""
    for block in events.split(b"\n\n"):
        event_id = data = b""
        for line in block.split(b"\n"):
            name, _, value = line.partition(b": ")
            if name == b"data":
                data = value
            elif name == b"id":
                event_id = value
        if data.startswith(b"{"):
            yield event_id, data


def framing_of(scope: Scope) -> Framing:
    """Return the framing of a request's stream: that of its WebSocket, or what its header `Accept` asks for."""
    framing: Framing | None = scope.get("extensions", {}).get(_EXTENSION)
    if framing is not None:
        return framing
    return _NDJSON_LINES if _prefers_ndjson(Headers(scope=scope).get("accept", "")) else SSE


def framing_extension(framing: Framing) -> dict[str, Framing]:
    """Return the ASGI extension that sets the framing of a request's stream."""
    return {_EXTENSION: framing}


def _prefers_ndjson(accept: str) -> bool:
    """Return whether `Accept` names NDJSON, with a quality not below that of server-sent events."""
    if NDJSON not in accept.lower():
        return False
    qualities = dict(map(_quality, accept[:MAX_ACCEPT_CHARS].lower().split(",")))
    return qualities.get(NDJSON, 0) > 0 and qualities[NDJSON] >= qualities.get(EVENT_STREAM, 0)


def _quality(media_range: str) -> tuple[str, float]:
    name, *parameters = (part.strip() for part in media_range.split(";"))
    quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
    return name, float(quality) if quality.replace(".", "", 1).isdecimal() else 0.0
