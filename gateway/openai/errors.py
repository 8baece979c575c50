"""Errors in OpenAI's shape. No other module writes it."""

from __future__ import annotations

import math
from typing import Any

from fastapi.responses import JSONResponse

from penstock.contract.errors import BusyError, ConflictError, PenstockError, RequestError, UnavailableError

ID_HEADER = "X-Request-Id"
"""Response header with the request's id in the access log. OpenAI's client shows it in its errors."""
_WILL_FAIL_AGAIN = frozenset(("node_lost", "model_error"))
"""Error codes of jobs that probably caused their own failure. A `node_lost` job was running when three nodes died, so
each retry may kill as many."""


def error_body(error: PenstockError) -> dict[str, Any]:
    """Return OpenAI's error object for an error.

    If a retry makes sense, it says after how long. A 429 also says what is known of the queue.
    """
    body = _body(error.message, error.type, error.code, error.param)
    if isinstance(error, BusyError | UnavailableError):
        body["error"]["retry_after_ms"] = error.retry_after_ms
    if isinstance(error, BusyError):
        waiting = {"num_waiting_ahead": error.num_waiting_ahead, "estimated_wait_ms": error.estimated_wait_ms}
        body["error"] |= {name: value for name, value in waiting.items() if value is not None}
    return body


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


def error_response(error: PenstockError) -> JSONResponse:
    """Return the HTTP response for an error."""
    return JSONResponse(error_body(error), error.status, retry_headers(error))


def http_error_body(message: str, status: int) -> dict[str, Any]:
    """Return OpenAI's error object for an error of the web framework, such as an unknown path."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    return _body(message, RequestError.type, code, None)


def bug_body() -> dict[str, Any]:
    """Return OpenAI's error object for a bug in penstock."""
    return _body("internal error", PenstockError.type, PenstockError.code, None)


def _body(message: str, kind: str, code: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
