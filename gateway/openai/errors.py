"""Translation of errors to HTTP responses in OpenAI's error shape. No other module does this."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.contract.errors import BusyError, ConflictError, PenstockError, RequestError, UnavailableError
from penstock.contract.problems import MAX_NAME_CHARS

ID_HEADER = "X-Request-Id"
"""Response header with the request's id in the access log. OpenAI's client shows it in its errors."""
_WILL_FAIL_AGAIN = frozenset(("node_lost", "model_error"))
"""Error codes of jobs that probably caused their own failure. A `node_lost` job was running when three nodes died, so
each retry may kill as many."""


def error_body(error: PenstockError) -> dict[str, Any]:
    """Return OpenAI's error object for an error. If a retry makes sense, it says after how long."""
    body = _body(error.message, error.type, error.code, error.param)
    if isinstance(error, BusyError | UnavailableError):
        body["error"]["retry_after_ms"] = error.retry_after_ms
    return body


def error_response(error: PenstockError) -> JSONResponse:
    """Return the HTTP response for an error, with Retry-After if a retry makes sense.

    OpenAI's clients retry every 409 and 5xx by themselves unless X-Should-Retry is "false".
    """
    headers = {}
    if isinstance(error, ConflictError) or error.code in _WILL_FAIL_AGAIN:
        headers["X-Should-Retry"] = "false"
    if isinstance(error, BusyError | UnavailableError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
        # OpenAI's clients prefer this one.
        headers["Retry-After-Ms"] = str(error.retry_after_ms)
    return JSONResponse(error_body(error), error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Install the handlers for penstock's errors, for framework errors such as 404, and for bugs."""
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


def _body(message: str, kind: str, code: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _on_penstock_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, PenstockError):
        raise error
    request.app.state.metrics.refused(error)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{error.detail}: {request.method} {request.url.path[:MAX_NAME_CHARS]}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return JSONResponse(_body(message, RequestError.type, code, None), error.status_code, error.headers)


async def _on_bug(request: Request, _: Exception) -> JSONResponse:
    # This response bypasses the middleware that sets the id of other responses. Probes have no id.
    request_id = getattr(request.state, "request_id", None)
    headers = {ID_HEADER: request_id} if request_id else {}
    return JSONResponse(_body("internal error", PenstockError.type, PenstockError.code, None), 500, headers)
