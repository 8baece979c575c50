"""How a streamed answer is framed on the wire: as server-sent events, or as one JSON object per line (NDJSON).

Encoders write server-sent events. Every other framing is made from these events, so an API defines its events once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.contract.errors import PenstockError

END_OF_EVENT = b"\n\n"
"""Encoders never split this between two parts."""
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
DONE_LINE = b'{"done":true}\n'
"""The last line of a complete answer as NDJSON."""
MAX_ACCEPT_CHARS = 1024
"""Characters of the header `Accept` that are read."""
_EXTENSION = "penstock.framing"
_BROKEN = "penstock.broken_event"


class Framing:
    """Server-sent events, as the encoders write them. Subclasses change the bytes, for one stream each."""

    media_type = EVENT_STREAM
    content_type = "text/event-stream; charset=utf-8"

    def events(self, events: bytes) -> bytes:
        """Return the bytes for events, or for the next part of them: encoders cut large events into parts."""
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


class LineFraming(Framing):
    """One line for each event, made from the JSON of its data. A part of a large event becomes a part of its line."""

    media_type = content_type = NDJSON

    def __init__(self) -> None:
        self._head = b""
        """The lines before the data of an event whose data has not begun."""
        self._is_within = False
        """Whether a line has begun."""

    @abstractmethod
    def _begin(self, event_id: bytes, data: bytes) -> bytes:
        """Return the beginning of a line. `data` is the beginning of an event's data, one byte at least."""

    @property
    @abstractmethod
    def _line_end(self) -> bytes:
        """The end of a line after the data."""

    def events(self, events: bytes) -> bytes:
        """Return one line for each event, or the next part of a line."""
        if not self._is_within and not self._head and events.endswith(END_OF_EVENT):
            return b"".join([self._begin(*event) + self._line_end for event in events_in(events)])
        return b"".join(self._parts_of(events))

    def _parts_of(self, events: bytes) -> Iterator[bytes]:
        *ended, last = (self._head + events).split(END_OF_EVENT)
        self._head = b""
        for block in ended:
            if self._is_within:
                self._is_within = False
                yield block + self._line_end
            else:
                yield from (self._begin(*event) + self._line_end for event in events_in(block))
        if self._is_within:
            yield last
        elif (begun := next(events_in(last), None)) is None:
            self._head = last
        else:
            self._is_within = True
            yield self._begin(*begun)


class NdjsonFraming(LineFraming):
    """One JSON object per line. The id of an event is the member `event_id` of its object."""

    _line_end = b"\n"

    def _begin(self, event_id: bytes, data: bytes) -> bytes:
        return b'{"event_id":"%b",%b' % (event_id, data[1:]) if event_id else data

    def keep_alive(self, comment: bytes) -> bytes:
        """Return white space before the next object. An empty line would end the parsers that expect an object."""
        return b" "

    def end(self) -> bytes:
        """Return the line that marks a complete answer."""
        return DONE_LINE


SSE = Framing()


def events_in(events: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the id, which may be empty, and the JSON object of each event. Comments and `[DONE]` are left out."""
    for block in events.split(END_OF_EVENT):
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
    return NdjsonFraming() if _prefers_ndjson(Headers(scope=scope).get("accept", "")) else SSE


def note_broken_event(scope: Scope) -> None:
    """Note that the answer to this request stopped within an event. Nothing may follow it."""
    scope.setdefault("extensions", {})[_BROKEN] = True


def has_broken_event(scope: Scope) -> bool:
    """Return whether the answer to this request stopped within an event."""
    return _BROKEN in scope.get("extensions", {})


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
