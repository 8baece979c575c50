"""One stream of a WebSocket: requests to the routes of this gateway, whose answers become messages.

A stream passes through the whole app like an HTTP request. So the API key is checked again, and scopes, limits,
metering, the access log and the end of a drain are those of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from penstock.contract.durability import TOKEN_DURABILITY
from penstock.contract.errors import InvariantError, JobCancelledError, NotFoundError, PenstockError, RequestError
from penstock.contract.job import RETURN_PROGRESS
from penstock.gateway.errors import ID_HEADER, error_body
from penstock.gateway.request.encoding import JOBS_PATH, Attach, Submit
from penstock.gateway.request.reading import AFTER, EVENT_IDS_HEADER, KEY_HEADER, PARSED_BODY
from penstock.gateway.stream.answer import IGNORED_HEADER, JOB_HEADER, MAX_TOKENS_HEADER, NOTICE_HEADER
from penstock.gateway.stream.writer import LineFraming, framing_extension
from penstock.producer.client import AsyncClient
from penstock.producer.parsed_body import ParsedBody

logger = logging.getLogger("penstock.gateway")

# What a client receives: the types of messages, the events of a stream as messages, and the channel that sends them.

CLOSE_TIMEOUT_S = 1.0
"""Seconds for sending the close frame."""
BROKEN_MESSAGE = 1011
"""Close code (RFC 6455, 7.4.1)."""


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


class SocketChannel:
    """Sends messages, one after another. A message waits until the client has read enough of those before it.

    A large message is sent in parts, as several frames, so that memory never holds the whole message.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # The buffer of the connection can then exceed its limit only by one message or part.
        self._turn = asyncio.Lock()
        self._is_open = True

    async def write(self, message: bytes) -> None:
        """Send a whole message in ASCII. After the end of the connection it does nothing."""
        async with self._turn:
            await self._pass_on({"type": "websocket.send", "text": message.decode()})

    async def begin_message(self) -> None:
        """Wait until all other messages are sent. The parts of one message may follow."""
        await self._turn.acquire()

    async def write_part(self, part: bytes, *, is_last: bool) -> None:
        """Send the next part, in ASCII, of a message that has begun."""
        await self._pass_on({"type": "websocket.send", "part": part, "is_last": is_last})
        if is_last:
            self._turn.release()

    async def break_off(self) -> None:
        """Close the WebSocket because a message that has begun cannot be completed."""
        await self.close(BROKEN_MESSAGE, "a message could not be completed")
        self._turn.release()

    async def close(self, code: int, reason: str) -> None:
        """Close the WebSocket. A client that reads nothing gets no reason."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._pass_on({"type": "websocket.close", "code": code, "reason": reason})
        self._is_open = False

    async def _pass_on(self, event: dict[str, object]) -> None:
        if self._is_open:
            try:
                await self._send(event)
            except OSError:
                self._is_open = False


# One stream: its requests, and their answers.

MESSAGES_PER_ROUND = 64
"""Messages that are sent before other tasks run. They take about a millisecond."""
MAX_ERROR_BYTES = 64 << 10
"""Bytes of an answer that is not a stream. Only errors and the state of a submitted job are such answers."""
_CREDENTIALS = (b"authorization", b"x-api-key")
_NOTHING: Message = {"type": "http.request", "body": b"", "more_body": False}

RawHeaders = Sequence[tuple[bytes, bytes]]


class SocketStream:
    """One stream: the requests that a submit or attach message causes, and their answers."""

    def __init__(
        self,
        tag: str,
        channel: SocketChannel,
        client: AsyncClient,
        socket_scope: Scope,
        note: Callable[[PenstockError], None],
    ) -> None:
        """`socket_scope` is the ASGI scope of the WebSocket. `note` logs an error that no request of the stream had."""
        self._note = note
        self._tag = tag
        self._channel = channel
        self._socket_scope = socket_scope
        self._app: Any = socket_scope["app"]
        self._client = client
        self._tenant: str = socket_scope["state"]["caller"].tenant
        self._framing = SocketFraming(tag)
        self._job_ids: list[str] = []
        self._is_left = asyncio.Event()
        self._is_background = False
        self._is_canceled = False
        self._has_read = False
        self.has_ended = False
        """Whether the last message about the stream was sent."""
        self._status = 0
        self._is_accepted = False
        self._is_stream = False
        self._body = b""
        self._num_sent = 0
        self._is_within_message = False
        """Whether a message has begun whose last part was not sent."""

    async def submit(self, request: Submit, body: ParsedBody | PenstockError | None) -> None:
        """Submit the jobs of a request and send their events, then the end."""
        headers = [(EVENT_IDS_HEADER.encode(), b"true" if request.event_ids else b"false")]
        if request.idempotency_key is not None:
            headers.append((KEY_HEADER.encode(), request.idempotency_key.encode()))
        self._is_background = isinstance(body, ParsedBody) and bool(body.queueing.get("background"))
        query = _position(request.after)
        returns_progress = isinstance(body, ParsedBody) and bool(body.queueing.get(RETURN_PROGRESS))
        extensions = {PARSED_BODY: body}
        del body  # The request takes it out of the extensions, and keeps what it needs.
        await self._ask("POST", request.path, query, headers, extensions)
        if request.path == JOBS_PATH and self._status == HTTPStatus.ACCEPTED:
            if returns_progress:
                query[RETURN_PROGRESS] = "true"
            await self._ask("GET", _stream_path(self._job_ids[0]), query)
        await self._end()

    async def attach(self, request: Attach) -> None:
        """Send the chunks of a job, then the end."""
        self._job_ids = [request.job]
        query = _position(request.after)
        if request.token_durability is not None:
            query[TOKEN_DURABILITY] = request.token_durability
        await self._ask("GET", _stream_path(request.job), query)
        await self._end()

    def leave(self) -> None:
        """End the stream as if the reader of an HTTP stream had left."""
        self._is_left.set()

    async def cancel(self) -> None:
        """Cancel the jobs; the stream then ends by itself. Jobs that are not known yet are canceled once they are.

        Without background jobs the stream ends at once, which cancels them too.
        """
        self._is_canceled = True
        if self._job_ids:
            await self._cancel_jobs()
        elif not self._is_background:
            self.leave()

    async def _cancel_jobs(self) -> None:
        for job_id in self._job_ids:
            with suppress(NotFoundError):
                await self._client.cancel(job_id, tenant=self._tenant)

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: RawHeaders = (),
        extensions: dict[str, Any] | None = None,
    ) -> None:
        extensions = {} if extensions is None else extensions
        extensions |= framing_extension(self._framing)
        socket = self._socket_scope
        scope = {
            "type": "http",
            "asgi": socket["asgi"],
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": urlencode(query).encode(),
            "root_path": "",
            "headers": [*(header for header in socket["headers"] if header[0] in _CREDENTIALS), *headers],
            "client": socket["client"],
            "server": socket["server"],
            "state": {},
            "extensions": extensions,
        }
        self._has_read = False
        try:
            await self._app(scope, self._receive, self._send)
        except Exception:
            # The app has answered what it could, as for an HTTP request.
            logger.exception("a request of a WebSocket failed", extra={"path": path})

    async def _receive(self) -> Message:
        if not self._has_read:
            self._has_read = True
            return _NOTHING
        await self._is_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, part: Message) -> None:
        if part["type"] == "http.response.start":
            await self._note_start(part["status"], Headers(raw=part["headers"]))
        elif self._is_stream:
            await self._send_lines(part["body"])
        else:
            self._body = (self._body + part["body"])[:MAX_ERROR_BYTES]
            if not part.get("more_body", False):
                await self._note_body()

    async def _send_lines(self, body: bytes) -> None:
        """Send a message for each line. A line that does not end here becomes the beginning of one."""
        *ends, rest = body.split(b"\n")
        for line in ends:
            if self._is_within_message:
                await self._channel.write_part(line, is_last=True)
                self._is_within_message = False
            else:
                await self._write(line)
        if rest:
            if not self._is_within_message:
                await self._channel.begin_message()
                self._is_within_message = True
            await self._channel.write_part(rest, is_last=False)

    async def _note_start(self, status: int, headers: Headers) -> None:
        self._status, self._body = status, b""
        self._is_stream = status == HTTPStatus.OK and headers.get("content-type") == self._framing.content_type
        if JOB_HEADER in headers:
            self._job_ids = headers[JOB_HEADER].split(", ")
        if status < HTTPStatus.BAD_REQUEST and not self._is_accepted:
            self._is_accepted = True
            members: dict[str, Any] = {"jobs": self._job_ids, "request_id": headers.get(ID_HEADER)}
            if IGNORED_HEADER in headers:
                members["ignored_fields"] = headers[IGNORED_HEADER].split(", ")
            if MAX_TOKENS_HEADER in headers:
                members["max_tokens"] = int(headers[MAX_TOKENS_HEADER])
            if NOTICE_HEADER in headers:
                members["notice"] = headers[NOTICE_HEADER]
            await self._channel.write(message("accepted", self._tag, members))
        if self._is_canceled and JOB_HEADER in headers:
            await self._cancel_jobs()

    async def _note_body(self) -> None:
        """Handle a whole answer: an error, the state of a submitted job, or nothing after the last chunk of a job."""
        if self._status == HTTPStatus.NO_CONTENT:
            await self._write(self._framing.end().rstrip())
        elif self._status >= HTTPStatus.BAD_REQUEST:
            error = json.loads(self._body)["error"]
            await self._write(message("error", self._tag, {"status": self._status, "error": error}))

    async def _write(self, line: bytes) -> None:
        if self.has_ended:
            return
        await self._channel.write(line)
        self.has_ended = self._framing.is_last(line)
        self._num_sent += 1
        if self._num_sent % MESSAGES_PER_ROUND == 0:
            await asyncio.sleep(0)

    async def _end(self) -> None:
        """Send the end of a stream whose requests ended without one."""
        if self._is_within_message:
            await self._channel.break_off()
            return
        if self.has_ended:
            return
        error: PenstockError
        if self._is_canceled:
            error = JobCancelledError("the stream was canceled before its jobs were known")
        elif self._is_left.is_set():
            return
        elif self._is_stream:
            error = RequestError("this WebSocket was read too slowly", code="slow_reader")
        else:
            error = InvariantError("internal error")
        self._note(error)
        await self._write(error_message("error", self._tag, error))


def _position(after: str | None) -> dict[str, str]:
    return {} if after is None else {AFTER: after}


def _stream_path(job_id: str) -> str:
    return f"{JOBS_PATH}/{job_id}/stream"
