"""Sending of answers: server-sent events or NDJSON, bodies in pieces, and the short ways to the connection.

Encoders write server-sent events. Every other framing is made from these events, so an API defines its events once.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Scope, Send

from penstock.contract.errors import InvariantError, PenstockError
from penstock.gateway.errors import ErrorShape
from penstock.gateway.kept.answer import AnswerKeep
from penstock.gateway.stream.direct_body import DirectBody, kept_body
from penstock.runtime import crash_points
from penstock.runtime.event_loop import LoopYielder

# How a streamed answer is framed: as server-sent events, or as one JSON object per line (NDJSON).

END_OF_EVENT = b"\n\n"
"""Encoders never split this between two parts."""
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
DONE_LINE = b'{"done":true}\n'
"""The last line of a complete answer as NDJSON."""
MAX_ACCEPT_CHARS = 1024
"""Characters of the header `Accept` that are read."""
_FRAMING = "penstock.framing"
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
    framing: Framing | None = scope.get("extensions", {}).get(_FRAMING)
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
    return {_FRAMING: framing}


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


class CallerGoneError(Exception):
    """The caller disconnected, or stopped reading its answer."""


# Server-sent events, and a writer of streams that keeps silent ones alive.

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, with the blank line that readers expect which take one block for one event."""
KEEP_ALIVE_BETWEEN_IDS = b": waiting\n"
"""A comment without a blank line: after an `id`, some readers, such as OpenAI's, parse that as an empty event."""

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold tokens back
}


def event(payload: Mapping[str, Any], event_id: str = "") -> bytes:
    """Encode one event. It is ASCII only, because many readers also split lines at characters such as U+2028."""
    data = b"data: " + to_json(payload, ensure_ascii=True) + b"\n\n"
    return b"id: " + event_id.encode() + b"\n" + data if event_id else data


def error_event(error: PenstockError, shape: ErrorShape) -> bytes:
    """Return an error as the last event of a stream, in the shape of its API."""
    data = event(shape.event_payload(error))
    return b"event: " + shape.event_name + b"\n" + data if shape.event_name else data


class EventWriter:
    """Sends one response of events. Status 200 goes out with the first bytes."""

    # Without a dictionary, because the memory of thousands of streams is fetched anew for each event.
    __slots__ = (
        *("_body", "_clock", "_framing", "_has_failed", "_is_behind", "_keep", "_keep_alive", "_send"),
        *("_sending_since_s", "_silent", "_sleep", "headers", "is_within_event", "keep_alive_source", "started"),
    )

    def __init__(
        self,
        send: Send,
        framing: Framing = SSE,
        *,
        keep_alive: bytes = KEEP_ALIVE,
        body: DirectBody | None = None,
        keep: AnswerKeep | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`watch` sends `keep_alive`. `clock` and `sleep`, both in seconds, are its time source.

        Events take the short way `body`, if given, while the client keeps up. `keep` has the answer's slot.
        """
        self.started = False
        self.is_within_event = keep is not None and keep.was_within_event
        """Whether a part of an event was sent, and not its end. Then no other event may follow."""
        self.headers = MutableHeaders(headers={"content-type": framing.content_type, **_HEADERS})
        self.keep_alive_source: Callable[[], Awaitable[bytes]] | None = None
        """Makes each keep-alive in place of the constant one."""
        self._send = send
        self._framing = framing
        self._keep_alive = framing.keep_alive(keep_alive)
        self._has_failed = False
        self._body = body
        self._keep = keep
        # A copy, because each event reads it: the objects behind `keep` would be fetched from memory for each.
        self._is_behind = keep is not None and keep.is_behind
        self._silent = True
        self._sending_since_s: float | None = None
        self._clock = clock
        self._sleep = sleep

    @property
    def is_ready(self) -> bool:
        """Whether `write_now` may be called: the response has begun, and the client keeps up."""
        body = self._body
        return body is not None and self.started and not self._is_behind and body.is_ready

    async def begin(self) -> None:
        """Send the head of the response, unless it has begun."""
        if not self.started:
            self.started = True
            if self._body is not None and self._keep is not None:
                self._body = kept_body(self._body, self._keep)
            await self._send({"type": "http.response.start", "status": 200, "headers": self.headers.raw})

    def write_now(self, events: bytes, counter: int | None = 0) -> None:
        """Send events without waiting. Only while `is_ready`. `counter` is that of `write`."""
        if self._body is None:
            raise InvariantError("this response has no direct body")
        self._silent = False
        data = self._framing.events(events)
        # An empty part would end a chunked body. Some framings have no bytes for some events.
        if data and counter == 0:
            self._body.write(data, events)
        else:
            if counter is not None and self._keep is not None:
                self._keep.count(counter, events)
            if data:
                self._body.write(data)
        crash_points.point("after", "event")

    async def write(self, events: bytes, counter: int | None = None) -> None:
        """Send events, or a part of them. Waits while the client reads too slowly.

        `counter`: which of the answer's positions counts them; None for those that are no function of the jobs' logs.
        """
        keep = self._keep
        if keep is not None and keep.is_behind:
            if counter is None:
                return
            old, events = keep.split(counter, events)
            self._is_behind = keep.is_behind
            if old:
                self._framing.events(old)  # Its later bytes may depend on these.
            if not events:
                return
            counter = None  # They are counted.
        elif keep is not None and counter is not None and not self.is_ready:
            keep.count(counter, events)
        is_within = not events.endswith(END_OF_EVENT) if events else self.is_within_event
        self.is_within_event |= is_within
        if keep is not None:
            keep.note_within(is_within=is_within)
        if self.is_ready:
            self.write_now(events, counter)
        else:
            await self._write(self._framing.events(events))
        # Cleared only after the write, because a failed one may have sent a part.
        self.is_within_event = is_within

    async def fail(self, error: PenstockError, event: bytes) -> None:
        """Send the end of a stream that fails. `event` is the error in the API's shape."""
        self._has_failed = True
        if self._keep is not None:
            self._keep.note_failure()
        await self._write(self._framing.error(error, event))

    async def end(self) -> None:
        """Complete the response."""
        await self._write(b"" if self._has_failed else self._framing.end(), more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        self._silent = False
        self._sending_since_s = self._clock()
        await self.begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        crash_points.point("after", "event")
        self._sending_since_s = None

    async def watch(self, *, first_wait_s: float, interval_s: float, send_timeout_s: float) -> None:
        """Send `keep_alive` after each silent interval, and return when the client has stopped reading.

        The first one comes after `first_wait_s` and starts the response if it has not begun. The client counts as
        stuck after `send_timeout_s` in one send. One timer watches the whole stream, because a timeout around each
        event would cost as much as the event.
        """
        await self._sleep(first_wait_s)
        while self._sending_since_s is None or self._clock() - self._sending_since_s < send_timeout_s:
            keep_alive = self._keep_alive
            self._silent &= self._keep is None or not self._keep.is_behind
            if self._silent and self.keep_alive_source is not None:
                keep_alive = self._framing.keep_alive(await self.keep_alive_source())
            if self._silent and not self.is_within_event:
                async with asyncio.timeout(send_timeout_s):
                    await self._write(keep_alive)
            self._silent = self._sending_since_s is None
            slept_since_s = self._clock()
            await self._sleep(interval_s)
            if self._sending_since_s is not None:
                # Do not count the time during which this process itself was too busy to send.
                self._sending_since_s += max(0.0, self._clock() - slept_since_s - interval_s)


# Sending of a response body in pieces. Memory holds at most two pieces, whatever the size of the body.

PIECE_BYTES = 64 << 10
"""Size from which a piece is sent, in bytes."""
MAX_WORK_S = 0.004
"""Seconds of rendering after which other tasks may run, whether a piece is complete or not."""

MIN_BYTES_PER_S = 4 << 10
"""Least rate at which a client must read a body. The memory of its result is not free until the end."""


class BodyWriter:
    """Sends a JSON body while it is rendered. The status goes out with the first piece.

    Each piece waits until the client has read enough of the previous ones. A body of one piece has a `Content-Length`;
    a longer body uses chunked encoding.
    """

    def __init__(
        self,
        send: Send,
        headers: Mapping[str, str],
        yielder: LoopYielder,
        *,
        timeout_s: float,
        keep: AnswerKeep | None = None,
    ) -> None:
        """timeout_s: how long the client may delay the body in all, besides the time it takes at MIN_BYTES_PER_S.

        `keep` has the answer's slot.
        """
        self._keep = keep
        self.started = False
        self._patience_s = timeout_s
        self._yielder = yielder
        self._send = send
        self._headers = {"content-type": "application/json", **headers}

    async def send_all(self, parts: AsyncGenerator[bytes, None]) -> None:
        """Send all parts as one body and complete the response. Raises CallerGoneError if the client is too slow."""
        piece, size, worked_since_s = list[bytes](), 0, time.monotonic()
        async with aclosing(parts):
            async for part in parts:
                piece.append(part)
                size += len(part)
                if size >= PIECE_BYTES:
                    await self._write(b"".join(piece), more=True)
                    piece, size = [], 0
                if time.monotonic() - worked_since_s >= MAX_WORK_S:
                    await self._yielder.wait()
                    worked_since_s = time.monotonic()
        await self._write(b"".join(piece), more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            headers = MutableHeaders(headers=self._headers)
            if not more:
                headers["content-length"] = str(len(body))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers.raw})
        if self._keep is not None:
            _, body = self._keep.split(0, body)
            if more and not body:
                return
        since_s = time.monotonic()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise CallerGoneError from None
        self._patience_s += len(body) / MIN_BYTES_PER_S - (time.monotonic() - since_s)
