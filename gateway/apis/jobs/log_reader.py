"""The read half of Durable Streams 1.0 (https://github.com/durable-streams/durable-streams), over a log of messages.

A reader names an offset and gets the messages behind it at once, by long-poll, or as server-sent events: as a JSON
array, or joined if the log's messages are no JSON. Offsets are texts that only the log understands. They sort as the
log does. `LogReader` knows no jobs: it reads any `MessageLog`.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, Protocol

from fastapi import Request, Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError, RequestError
from penstock.gateway.errors import error_body
from penstock.gateway.kept.answer import AnswerKeep, keep_of
from penstock.gateway.metrics import StreamMeter
from penstock.gateway.stream.answer import Answers
from penstock.gateway.stream.event_stream import EventSource, until_disconnected, while_connected
from penstock.gateway.stream.writer import EVENT_STREAM, CallerGoneError, EventWriter, event

OFFSET, LIVE, CURSOR = "offset", "live", "cursor"
"""The parameters of the query. A request with one of the first two is one of Durable Streams."""
START: Final = "-1"
NOW: Final = "now"
"""The two offsets that every log knows: before its first message, and behind its present last one."""
STREAM_HEADERS = ("Stream-Next-Offset", "Stream-Up-To-Date", "Stream-Closed", "Stream-Cursor", "ETag")
LONG_POLL_S = 20.0
"""Seconds that a long-poll waits for a message."""
EVENTS_S = 60.0
"""Seconds after which a stream of events is complete; its reader comes again."""
_LONG_POLL, _SSE = "long-poll", "sse"
_CACHED = "private, max-age=60, stale-while-revalidate=300"
_EPOCH_S, _INTERVAL_S, _JITTER_S = 1_728_432_000, 20, 3600
"""Cursors count intervals since 9 October 2024, as the protocol says."""
_MAX_CURSOR_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Page:
    """The next messages of a log."""

    messages: Sequence[bytes]
    next_offset: str
    """That behind the last message."""
    is_up_to_date: bool
    """Whether these are all messages that there are by now."""
    is_closed: bool
    """Whether no further message will come."""
    place: tuple[int, int]
    """What `next_offset` stands for. See `MessageLog.offset_at`."""


class MessageLog(Protocol):
    """A log of messages that grows at its end, until it is closed."""

    name: str
    """It differs from that of every other log."""
    content_type: str
    """Of the messages. Each one is a JSON value if this is `application/json`, else a part of a text or of bytes."""
    headers: Mapping[str, str]
    """What its answers have beside the protocol's headers."""

    def pages(self, offset: str) -> AsyncGenerator[Page, None]:
        """Yield what is behind an offset: at once what there is, maybe nothing, and then what comes.

        Ends behind a page that is closed. Raises NotFoundError for no log, RequestError for an offset of another form,
        and GoneError for one that the log does not have any more.
        """

    def offset_at(self, place: tuple[int, int]) -> str:
        """Return the offset of a page's place."""


def is_log_request(request: Request) -> bool:
    """Return whether a request is one of Durable Streams."""
    return OFFSET in request.query_params or LIVE in request.query_params


class LogReader:
    """Makes the answers about a log."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def head(self, log: MessageLog) -> Response:
        """Return the end of the log, and whether it is closed, as headers."""
        page = await _first(log, NOW)
        headers = {**log.headers, **_headers_of(page), "Content-Type": log.content_type, "Cache-Control": "no-store"}
        return Response(headers=headers)

    def read(self, request: Request, log: MessageLog) -> Response:
        """Return the messages behind the offset that the query names. Raises RequestError."""
        query = request.query_params
        offsets = query.getlist(OFFSET)
        if len(offsets) > 1 or "" in offsets:
            raise RequestError("offset: send one, that is not empty", param=OFFSET)
        live = query.get(LIVE)
        if live not in (None, _LONG_POLL, _SSE):
            raise RequestError(f"live must be {_LONG_POLL} or {_SSE}", param=LIVE)
        if live is not None and not offsets:
            raise RequestError(f"offset: is required with live; {START} is the beginning", param=OFFSET)
        offset = offsets[0] if offsets else START
        if live == _SSE:
            return self._answers.stream(_LogEvents(log, offset, query.get(CURSOR)))
        known = request.headers.get("if-none-match")
        return _PageAnswer(log, offset, known=known, cursor=query.get(CURSOR), waits=live is not None)


async def _first(log: MessageLog, offset: str) -> Page:
    async with aclosing(log.pages(offset)) as pages:
        return await anext(pages)


_SAFE = {"Cross-Origin-Resource-Policy": "same-origin"}
_LINE_ENDS = re.compile(rb"\r\n|\r|\n")
"""All that end a line of server-sent events."""


def _headers_of(page: Page) -> dict[str, str]:
    headers = {"Stream-Next-Offset": page.next_offset, **_SAFE}
    if page.is_up_to_date:
        headers["Stream-Up-To-Date"] = "true"
    if page.is_closed:
        headers["Stream-Closed"] = "true"
    return headers


def next_cursor(known: str | None, now_s: float) -> str:
    """Return the number of the present interval, or a larger one than the reader's `known` cursor.

    So no cache answers two polls of a reader alike.
    """
    interval = int((now_s - _EPOCH_S) // _INTERVAL_S)
    if known is not None and known.isdecimal() and len(known) <= _MAX_CURSOR_DIGITS and int(known) >= interval:
        return str(int(known) + random.randint(1, _JITTER_S // _INTERVAL_S))
    return str(interval)


def _kind_of(log: MessageLog) -> str:
    """Return the log's content type without parameters."""
    return log.content_type.partition(";")[0].strip().lower()


def _body_of(log: MessageLog, messages: Sequence[bytes]) -> bytes:
    if _kind_of(log) != "application/json":
        return b"".join(messages)
    return b"[" + b",".join(messages) + b"]"


def _is_binary(log: MessageLog) -> bool:
    """Return whether events have its messages as base64, because lines of text cannot hold them."""
    kind = _kind_of(log)
    return kind != "application/json" and not kind.startswith("text/")


def _event(name: bytes, body: bytes) -> bytes:
    """Return an event with any text. A reader removes one space before each line's text, if there is one."""
    lines = [b"data:" + (b" " if line.startswith(b" ") else b"") + line for line in _LINE_ENDS.split(body)]
    return b"\n".join([b"event: " + name, *lines]) + b"\n\n"


class _PageAnswer(Response):
    """One page, at once or after the next message has come."""

    def __init__(self, log: MessageLog, offset: str, *, known: str | None, cursor: str | None, waits: bool) -> None:
        """`known`: the tags of the pages that the caller has. `waits`: it is a long-poll."""
        super().__init__()
        self._log = log
        self._offset = offset
        self._known = known
        self._cursor = cursor
        self._waits = waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the page and send it."""
        with suppress(CallerGoneError):
            await while_connected(self._answer(scope, receive, send), until_disconnected(receive))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (keep := keep_of(scope)) is None:
            answer = await self._response()
        else:
            answer = await self._kept_response(keep)
        await answer(scope, receive, send)

    async def _kept_response(self, keep: AnswerKeep) -> Response:
        """Return the response, and note it in the answer's slot; or that which an earlier gateway noted there."""
        if keep.record is not None and (noted := keep.record.get("response")) is not None:
            answer = Response(noted["body"], noted["status"])
            answer.raw_headers = [(name, value) for name, value in noted["headers"]]
            return answer
        keep.begin_read(is_stream=False)
        answer = await self._response()
        headers = [[name, value] for name, value in answer.raw_headers]
        keep.add({"response": {"status": answer.status_code, "headers": headers, "body": answer.body}})
        return answer

    async def _response(self) -> Response:
        page = await self._page()
        headers = {**self._log.headers, **_headers_of(page)}
        if self._waits and not page.is_closed:
            headers["Stream-Cursor"] = next_cursor(self._cursor, time.time())
        if self._waits and not page.messages:
            return Response(status_code=204, headers={**headers, "Cache-Control": "no-store"})
        return self._with_messages(page, headers)

    async def _page(self) -> Page:
        async with aclosing(self._log.pages(self._offset)) as pages:
            page = await anext(pages)
            if self._waits and not page.messages and not page.is_closed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LONG_POLL_S):
                        page = await anext(pages)
            return page

    def _with_messages(self, page: Page, headers: dict[str, str]) -> Response:
        body, kind = _body_of(self._log, page.messages), {"Content-Type": self._log.content_type}
        if self._offset == NOW:
            return Response(body, headers={**headers, **kind, "Cache-Control": "no-store"})
        tag = f'"{self._log.name}:{self._offset}:{page.next_offset}{":c" if page.is_closed else ""}"'
        # What is at the end of an open log is asked for again, until there is something.
        headers |= {"ETag": tag, "Cache-Control": _CACHED if page.messages else "no-store"}
        if not self._waits and _has_tag(self._known, tag):
            return Response(status_code=304, headers=headers)
        return Response(body, headers={**headers, **kind})


def _has_tag(known: str | None, tag: str) -> bool:
    """Return whether the header If-None-Match has a tag."""
    return known is not None and tag in (one.strip().removeprefix("W/") for one in known.split(","))


class _LogEvents(EventSource):
    """The pages of a log as events `data`, each with an event `control` behind it."""

    is_new = False

    def __init__(self, log: MessageLog, offset: str, cursor: str | None) -> None:
        self._log = log
        self._offset = offset
        self._cursor = cursor

    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails. It has no name, so readers of pages pass over it."""
        return event(error_body(error))

    async def send_events(self, writer: EventWriter, meter: StreamMeter) -> None:
        """Send pages until the log is closed, or for EVENTS_S."""
        writer.headers.update({**self._log.headers, **_SAFE, "Content-Type": EVENT_STREAM})
        if _is_binary(self._log):
            writer.headers["Stream-SSE-Data-Encoding"] = "base64"
        end_s = asyncio.get_running_loop().time() + EVENTS_S
        if self.keep is not None:
            self.keep.begin_read(is_stream=True)
            if self.keep.place is not None:
                self._offset = self._log.offset_at(self.keep.place)
        async with aclosing(self._log.pages(self._offset)) as pages:
            while True:
                try:
                    async with asyncio.timeout_at(end_s):
                        page = await anext(pages)
                except TimeoutError:
                    return
                await writer.begin()
                if self.keep is not None:
                    self.keep.note_place(page.place)
                await writer.write(self._events_of(page))
                meter.sent()
                if page.is_closed:
                    return

    def _events_of(self, page: Page) -> bytes:
        control: dict[str, str | bool] = {"streamNextOffset": page.next_offset}
        if not page.is_closed:
            self._cursor = control["streamCursor"] = next_cursor(self._cursor, time.time())
        if page.is_up_to_date:
            control["upToDate"] = True
        if page.is_closed:
            control["streamClosed"] = True
        body = _body_of(self._log, page.messages)
        data = _event(b"data", b64encode(body) if _is_binary(self._log) else body) if page.messages else b""
        return data + _event(b"control", to_json(control))
