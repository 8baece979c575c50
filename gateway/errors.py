"""Translation of errors to HTTP responses, in the shape of the API that the request's path belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.contract.problems import MAX_NAME_CHARS
from penstock.gateway.anthropic import errors as anthropic
from penstock.gateway.openai import errors as openai
from penstock.gateway.openai.errors import ID_HEADER
from penstock.gateway.stream.writer import event

VERSION_HEADER = "anthropic-version"
READ_TIMEOUT_S = 2.0
"""Seconds that probes and other requests that only read wait for Redis."""


def request_id_headers(path: str) -> tuple[str, ...]:
    """Return the names of the response headers that hold the request's id."""
    return (ID_HEADER, anthropic.ID_HEADER) if anthropic.is_messages_path(path) else (ID_HEADER,)


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether the answer has Anthropic's shape. Both APIs have `/v1/models`; only Anthropic's has a version."""
    path = scope["path"]
    is_models_path = path == "/v1/models" or path.startswith("/v1/models/")
    return anthropic.is_messages_path(path) or (is_models_path and VERSION_HEADER in Headers(scope=scope))


def error_response(error: PenstockError, scope: Scope) -> JSONResponse:
    """Return the HTTP response for an error of a request."""
    if speaks_anthropic(scope):
        return anthropic.error_response(error, _request_id_of(scope))
    return openai.error_response(error)


@asynccontextmanager
async def soon() -> AsyncIterator[None]:
    """Give up a read of the queue in the block after READ_TIMEOUT_S, with UnavailableError.

    The client would retry for as long as a submission may take. A caller that only reads may repeat its request.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            yield
    except TimeoutError:
        raise UnavailableError("Redis is unreachable", code="redis_away") from None


def error_event(error: PenstockError, scope: Scope) -> bytes:
    """Return an error as the last event of a stream."""
    if speaks_anthropic(scope):
        return anthropic.error_event(error)
    return event(openai.error_body(error))


def install_error_handlers(app: FastAPI) -> None:
    """Install the handlers for penstock's errors, for framework errors such as 404, and for bugs."""
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


def _request_id_of(scope: Scope) -> str | None:
    """Return the id that the access log gave to the request. Probes have none."""
    request_id: str | None = scope.get("state", {}).get("request_id")
    return request_id


async def _on_penstock_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, PenstockError):
        raise error
    request.app.state.metrics.refused(error)
    return error_response(error, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{error.detail}: {request.method} {request.url.path[:MAX_NAME_CHARS]}"
    body: dict[str, Any] = openai.http_error_body(message, error.status_code)
    if speaks_anthropic(request.scope):
        body = anthropic.error_body(message, error.status_code, _request_id_of(request.scope))
    return JSONResponse(body, error.status_code, error.headers)


async def _on_bug(request: Request, _: Exception) -> JSONResponse:
    # This response bypasses the middleware that sets the id of other responses.
    path, request_id = request.scope["path"], _request_id_of(request.scope)
    body: dict[str, Any] = openai.bug_body()
    if speaks_anthropic(request.scope):
        body = anthropic.error_body("internal error", HTTPStatus.INTERNAL_SERVER_ERROR, request_id)
    headers = dict.fromkeys(request_id_headers(path), request_id) if request_id else {}
    return JSONResponse(body, HTTPStatus.INTERNAL_SERVER_ERROR, headers)
