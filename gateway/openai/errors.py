"""The one place where errors become HTTP: every refusal leaves in OpenAI's error shape."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.contract.errors import BusyError, ConflictError, PenstockError, RequestError, UnavailableError
from penstock.contract.problems import MAX_NAME_CHARS

ID_HEADER = "X-Request-Id"
"""By which OpenAI's client tells of a request, so that its line in the log is found."""
_WILL_FAIL_AGAIN = frozenset(("node_lost", "model_error"))
"""What ended jobs whose own doing it probably was. The first took three nodes along: each try more may take as many."""


def error_body(error: PenstockError) -> dict[str, Any]:
    """OpenAI's error object."""
    return _body(error.message, error.type, error.code, error.param)


def error_response(error: PenstockError) -> JSONResponse:
    """The HTTP answer for an error, with Retry-After where trying again makes sense.

    OpenAI's clients try again by themselves after any 409 and 5xx that does not say otherwise.
    """
    headers = {}
    if isinstance(error, ConflictError) or error.code in _WILL_FAIL_AGAIN:
        headers["X-Should-Retry"] = "false"
    if isinstance(error, BusyError | UnavailableError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    return JSONResponse(error_body(error), error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Every way a request can fail ends in one of these three."""
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
    # Made outside of all middleware, which gives other answers their id; a probe has none.
    request_id = getattr(request.state, "request_id", None)
    headers = {ID_HEADER: request_id} if request_id else {}
    return JSONResponse(_body("internal error", PenstockError.type, PenstockError.code, None), 500, headers)
