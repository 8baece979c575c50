"""The one place where errors become HTTP: every refusal leaves in OpenAI's error shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from penstock.contract.errors import BusyError, PenstockError, RequestError, UnavailableError

MAX_NAME_CHARS = 128
"""A field's name comes from the request, so what is echoed of it is bounded."""


def error_body(error: PenstockError) -> dict[str, Any]:
    """OpenAI's error object."""
    return _body(error.message, error.type, error.code, error.param)


def error_response(error: PenstockError) -> JSONResponse:
    """The HTTP answer for an error, with Retry-After where trying again makes sense."""
    headers = {}
    if isinstance(error, BusyError | UnavailableError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    return JSONResponse(error_body(error), error.status, headers)


def request_error(error: ValidationError) -> RequestError:
    """What pydantic found wrong in a body, named as the caller wrote it."""
    return _first_of(error.errors(include_url=False, include_input=False))


def install_error_handlers(app: FastAPI) -> None:
    """Every way a request can fail ends in one of these four."""
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


def _body(message: str, kind: str, code: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _first_of(found: Sequence[Mapping[str, Any]]) -> RequestError:
    first = found[0]
    unknown = first.get("ctx", {}).get("unknown_field")
    loc = first["loc"] if unknown is None else (*first["loc"], unknown)
    param = _path(loc)
    said = first["msg"].removeprefix("Value error, ")
    message = f"{param}: {said}" if param else said
    code = first["type"] if first["type"] in ("unknown_field", "unsupported_value") else None
    return RequestError(message, code=code, param=param)


def _path(loc: Sequence[str | int]) -> str | None:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:MAX_NAME_CHARS] or None


async def _on_penstock_error(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, PenstockError):
        raise error
    return error_response(error)


async def _on_validation_error(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    # FastAPI puts the part of the request first ("header", ...); callers know the field's own name.
    found = [{**e, "loc": e["loc"][1:]} for e in error.errors()]
    return error_response(_first_of(found))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{error.detail}: {request.method} {request.url.path[:MAX_NAME_CHARS]}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return JSONResponse(_body(message, RequestError.type, code, None), error.status_code, error.headers)


async def _on_bug(_: Request, __: Exception) -> JSONResponse:
    return JSONResponse(_body("internal error", PenstockError.type, PenstockError.code, None), 500)
