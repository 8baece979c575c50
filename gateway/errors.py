"""Errors as HTTP responses, in the shape of the API that the request's path belongs to.

OpenAI's shape is the default. An API with another one registers a subclass of `ErrorShape`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    NotConfirmedError,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.contract.output import WaitEstimate
from penstock.contract.problems import MAX_NAME_CHARS
from penstock.gateway.other_servers import hint

ID_HEADER = "X-Request-Id"
"""Response header with the request's id in the access log. OpenAI's client shows it in its errors."""
READ_TIMEOUT_S = 2.0
"""Seconds that probes and other requests that only read wait for Redis. A pause of this process hardly counts."""
_TICK_S = 0.25
"""Part of these seconds that one timer waits for. It counts as no more, however late the timer is."""
_WILL_FAIL_AGAIN = frozenset(("node_lost", "model_error"))
"""Error codes of jobs that probably caused their own failure. A `node_lost` job was running when `max_losses` nodes
died, so each retry may kill as many."""


class _Countdown:
    """Lets a timeout expire after READ_TIMEOUT_S of time in which the event loop runs."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_TICK_S, self._tick, READ_TIMEOUT_S - _TICK_S)

    def stop(self) -> None:
        """Stop counting."""
        self._timer.cancel()

    def _tick(self, left_s: float) -> None:
        if left_s > 0:
            self._timer = self._loop.call_later(min(_TICK_S, left_s), self._tick, left_s - _TICK_S)
        else:
            self._limit.reschedule(self._loop.time())


@asynccontextmanager
async def soon() -> AsyncIterator[None]:
    """Give up a read of the queue in the block after READ_TIMEOUT_S, with UnavailableError.

    The client would retry for as long as a submission may take. A caller that only reads may repeat its request.
    Time in which this process does not get to run hardly counts, because the answer may have arrived meanwhile.
    """
    try:
        async with asyncio.timeout(None) as limit:
            countdown = _Countdown(limit)
            try:
                yield
            finally:
                countdown.stop()
    except TimeoutError:
        raise UnavailableError("Redis is unreachable", code="redis_away") from None


def error_body(error: PenstockError) -> dict[str, Any]:
    """Return OpenAI's error object for an error.

    If a retry makes sense, it says after how long. A 429 also says what is known of the queue.
    """
    body = _body(error.message, error.type, error.code, error.param)
    if isinstance(error, BusyError | UnavailableError):
        body["error"]["retry_after_ms"] = error.retry_after_ms
    if isinstance(error, NotConfirmedError) and error.job_id:
        body["error"]["job_id"] = error.job_id
    if isinstance(error, BusyError):
        waiting = {name: getattr(error, name) for name in ("num_waiting_ahead", *WaitEstimate._fields)}
        body["error"] |= {name: value for name, value in waiting.items() if value is not None}
    return body


def _body(message: str, kind: str, code: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def retry_headers(error: PenstockError) -> dict[str, str]:
    """Return Retry-After if a retry makes sense.

    OpenAI's and Anthropic's clients retry every 409 and 5xx by themselves unless X-Should-Retry is "false".
    """
    headers = {}
    if isinstance(error, ConflictError) or error.code in _WILL_FAIL_AGAIN:
        headers["X-Should-Retry"] = "false"
    if isinstance(error, BusyError | UnavailableError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
        # OpenAI's clients prefer this one.
        headers["Retry-After-Ms"] = str(error.retry_after_ms)
    return headers


def _code_of(status: int) -> str:
    """Return the code of an error of the web framework."""
    return {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")


class ErrorShape:
    """How an API writes its errors. This is OpenAI's shape, for every path that no other shape claims."""

    paths: tuple[str, ...] = ()
    """Paths that belong to the API alone, with all below them. Empty: all."""
    id_headers: tuple[str, ...] = (ID_HEADER,)
    """Response headers that hold the request's id."""
    event_name = b""
    """The name of the event that ends a failed stream. Empty: the event has no name."""

    def has_path(self, path: str) -> bool:
        """Return whether the path belongs to the API alone."""
        return not self.paths or any(path == one or path.startswith(f"{one}/") for one in self.paths)

    def is_for(self, scope: Scope) -> bool:
        """Return whether the answer to a request has this shape. An API may share a path with others."""
        return self.has_path(scope["path"])

    def response(self, error: PenstockError, request_id: str | None) -> JSONResponse:
        """Return the HTTP response for an error."""
        return JSONResponse(error_body(error), error.status, retry_headers(error))

    def framework_body(self, message: str, status: int, request_id: str | None) -> dict[str, Any]:
        """Return the body for an error of the web framework, such as an unknown path."""
        return _body(message, RequestError.type, _code_of(status), None)

    def bug_body(self, request_id: str | None) -> dict[str, Any]:
        """Return the body for a bug in penstock."""
        return _body("internal error", PenstockError.type, PenstockError.code, None)

    def event_payload(self, error: PenstockError) -> dict[str, Any]:
        """Return the data of the event that ends a failed stream."""
        return error_body(error)


class ErrorShapes:
    """Writes each error in the shape of its request's API."""

    def __init__(self, registered: Sequence[ErrorShape] = ()) -> None:
        self._shapes = (*registered, ErrorShape())

    @property
    def all_id_headers(self) -> list[str]:
        """The response headers that hold a request's id, of all APIs; the default one comes first."""
        return [*dict.fromkeys((ID_HEADER, *(name for shape in self._shapes for name in shape.id_headers)))]

    def id_headers(self, path: str) -> tuple[str, ...]:
        """Return the names of the response headers that hold the request's id."""
        return next(shape.id_headers for shape in self._shapes if shape.has_path(path))

    def shape_of(self, scope: Scope) -> ErrorShape:
        """Return the shape of a request's API."""
        return next(shape for shape in self._shapes if shape.is_for(scope))

    def response(self, error: PenstockError, scope: Scope) -> JSONResponse:
        """Return the HTTP response for an error of a request."""
        return self.shape_of(scope).response(error, _request_id_of(scope))


class ErrorHandlers:
    """The app's handlers for penstock's errors, for framework errors such as 404, and for bugs."""

    def __init__(self, shapes: ErrorShapes, count: Callable[[PenstockError], None]) -> None:
        """`count` counts a refusal in the metrics."""
        self._shapes = shapes
        self._count = count

    def install(self, app: FastAPI) -> None:
        """Install them."""
        app.add_exception_handler(PenstockError, self._on_penstock_error)
        app.add_exception_handler(HTTPException, self._on_http_exception)
        app.add_exception_handler(Exception, self._on_bug)

    async def _on_penstock_error(self, request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, PenstockError):
            raise error
        self._count(error)
        return self._shapes.response(error, request.scope)

    async def _on_http_exception(self, request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        message = f"{error.detail}: {request.method} {request.url.path[:MAX_NAME_CHARS]}"
        if error.status_code == HTTPStatus.NOT_FOUND:
            message += hint(request.scope, request.app.routes)
        self._count(RequestError(message, code=_code_of(error.status_code)))
        shape, request_id = self._shapes.shape_of(request.scope), _request_id_of(request.scope)
        return JSONResponse(
            shape.framework_body(message, error.status_code, request_id), error.status_code, error.headers
        )

    async def _on_bug(self, request: Request, _: Exception) -> JSONResponse:
        # This response bypasses the middleware that sets the id of other responses.
        path, request_id = request.scope["path"], _request_id_of(request.scope)
        headers = dict.fromkeys(self._shapes.id_headers(path), request_id) if request_id else {}
        body = self._shapes.shape_of(request.scope).bug_body(request_id)
        return JSONResponse(body, HTTPStatus.INTERNAL_SERVER_ERROR, headers)


def _request_id_of(scope: Scope) -> str | None:
    """Return the id that the access log gave to the request. Probes have none."""
    request_id: str | None = scope.get("state", {}).get("request_id")
    return request_id
