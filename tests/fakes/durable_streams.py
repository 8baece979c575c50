"""`python -m fakes.durable_streams`: streams that are written by PUT and POST, and read by the gateway's `LogReader`.

The public suite for servers of Durable Streams makes its streams itself, so this program mounts the reader over logs in
memory. The writer is as small as the suite's tests of readers allow. It prints its URL as JSON when it serves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

import uvicorn
from fastapi import Request, Response
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from penstock.contract.errors import ConflictError, NotFoundError, PenstockError, RequestError
from penstock.gateway.apis.jobs.log_reader import NOW, START, LogReader, Page
from penstock.gateway.errors import error_body
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import Answers
from penstock.runtime.event_loop import LoopYielder

MAX_PAGE_MESSAGES = 100


class MemoryLog:
    """A log of messages in memory."""

    headers: Mapping[str, str] = {}

    def __init__(self, name: str, content_type: str) -> None:
        self.name, self.content_type = name, content_type
        self.messages: list[bytes] = []
        self.is_closed = False
        self._changed = asyncio.Event()

    @property
    def is_json(self) -> bool:
        return kind_of(self.content_type) == "application/json"

    @property
    def end(self) -> str:
        return f"{len(self.messages):010d}"

    def append(self, body: bytes, *, closes: bool, is_first: bool = False) -> None:
        """Append a body. In JSON mode each element of an array is a message."""
        if body and self.is_json:
            self.messages += json_messages(body, may_be_empty=is_first)
        elif body:
            self.messages.append(body)
        self.is_closed |= closes
        self._changed.set()
        self._changed = asyncio.Event()

    def offset_at(self, place: tuple[int, int]) -> str:
        """Return the offset of a page's place."""
        return f"{place[0]:010d}"

    async def pages(self, offset: str) -> AsyncGenerator[Page, None]:
        """Yield the messages behind an offset; see `MessageLog`."""
        at = self._place_of(offset)
        is_first = True
        while True:
            changed = self._changed
            messages = self.messages[at : at + MAX_PAGE_MESSAGES]
            at += len(messages)
            is_at_end = at == len(self.messages)
            if messages or is_first or self.is_closed:
                closes = is_at_end and self.is_closed
                yield Page(messages, f"{at:010d}", is_up_to_date=is_at_end, is_closed=closes, place=(at, 0))
                if closes:
                    return
            is_first = False
            if is_at_end:
                await changed.wait()

    def _place_of(self, offset: str) -> int:
        if offset in (START, NOW):
            return 0 if offset == START else len(self.messages)
        if len(offset) != len(self.end) or not offset.isdecimal():
            raise RequestError("offset: send that of an earlier answer", param="offset")
        return min(int(offset), len(self.messages))


def kind_of(content_type: str) -> str:
    """Return a content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def json_messages(body: bytes, *, may_be_empty: bool) -> list[bytes]:
    """Return the messages of a body in JSON mode. Raises RequestError."""
    try:
        value = json.loads(body)
    except ValueError:
        raise RequestError("the body is not JSON") from None
    values = value if isinstance(value, list) else [value]
    if not values and not may_be_empty:
        raise RequestError("the array is empty")
    return [json.dumps(one, separators=(",", ":")).encode() for one in values]


class Streams:
    """All logs, and the answers about them."""

    def __init__(self) -> None:
        self._logs: dict[str, MemoryLog] = {}
        self._num_made = 0
        none = cast(Any, None)
        self._reader = LogReader(Answers(none, GatewaySettings(), GatewayMetrics(), LoopYielder(), none))

    def _log(self, request: Request) -> MemoryLog:
        log = self._logs.get(request.url.path)
        if log is None:
            raise NotFoundError(f"no stream {request.url.path}")
        return log

    async def read(self, request: Request) -> Response:
        """Read a log, which is the reader's."""
        log = self._log(request)
        return await self._reader.head(log) if request.method == "HEAD" else self._reader.read(request, log)

    async def create(self, request: Request) -> Response:
        """Make a log, or return that it is there."""
        path, kind = request.url.path, request.headers.get("content-type") or "application/octet-stream"
        closes, known = request.headers.get("stream-closed") == "true", self._logs.get(path)
        if known is not None:
            if kind_of(known.content_type) != kind_of(kind) or known.is_closed != closes:
                raise ConflictError("the stream has another configuration", code="conflict")
            return answer_about(known, 200)
        self._num_made += 1
        log = MemoryLog(f"{self._num_made}", kind)
        log.append(await request.body(), closes=closes, is_first=True)
        self._logs[path] = log
        return answer_about(log, 201, Location=str(request.url))

    async def append(self, request: Request) -> Response:
        """Append to a log, or close it."""
        log, body = self._log(request), await request.body()
        closes = request.headers.get("stream-closed") == "true"
        if not body and not closes:
            raise RequestError("the body is empty")
        if log.is_closed and body:
            return answer_about(log, 409)
        if body:
            kind = request.headers.get("content-type")
            if kind is None:
                raise RequestError("Content-Type is missing")
            if kind_of(kind) != kind_of(log.content_type):
                raise ConflictError("the stream has another content type", code="conflict")
        log.append(body, closes=closes)
        return answer_about(log, 204)

    async def delete(self, request: Request) -> Response:
        """Delete a log."""
        self._log(request)
        del self._logs[request.url.path]
        return Response(status_code=204)


def answer_about(log: MemoryLog, status: int, **headers: str) -> Response:
    """Return the answer to a write."""
    closed = {"Stream-Closed": "true"} if log.is_closed else {}
    own = {"Content-Type": log.content_type, "Stream-Next-Offset": log.end}
    return Response(status_code=status, headers={**own, **closed, **headers})


async def refused(request: Request, error: Exception) -> Response:
    """Return an error of penstock as the gateway does."""
    assert isinstance(error, PenstockError)
    return Response(json.dumps(error_body(error)), error.status, {"Content-Type": "application/json"})


def app() -> Starlette:
    """Return the app."""
    streams, path = Streams(), "/{path:path}"
    routes = [
        Route(path, streams.read, methods=["GET", "HEAD"]),
        Route(path, streams.create, methods=["PUT"]),
        Route(path, streams.append, methods=["POST"]),
        Route(path, streams.delete, methods=["DELETE"]),
    ]
    cors = Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return Starlette(routes=routes, exception_handlers={PenstockError: refused}, middleware=[cors])


async def main() -> None:
    """Serve until a signal."""
    # As the gateway's server does.
    config = uvicorn.Config(app(), port=0, log_level="warning", headers=[("X-Content-Type-Options", "nosniff")])
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(main())
