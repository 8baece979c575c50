"""Errors in Anthropic's shape, with its types and status codes."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.contract.errors import PenstockError
from penstock.gateway.errors import ID_HEADER as COMMON_ID_HEADER
from penstock.gateway.errors import ErrorShape, retry_headers
from penstock.producer.anthropic.message import error_body, message_of_error, status_of

ID_HEADER = "request-id"
"""Response header with the request's id in the access log. Anthropic's client shows it in its errors."""
VERSION_HEADER = "anthropic-version"
_NO_THREADS = "thread_unsupported_request"
"""Anthropic's code for a refused `thread`. Its client then sends the whole conversation instead."""


def names_version(scope: Scope) -> bool:
    """Return whether Anthropic's client sent a request to a path that several APIs have, such as `/v1/models`."""
    return VERSION_HEADER in Headers(scope=scope)


class AnthropicErrors(ErrorShape):
    """Anthropic's shape of errors."""

    paths = ("/v1/messages",)
    id_headers = (COMMON_ID_HEADER, ID_HEADER)
    event_name = b"error"

    def is_for(self, scope: Scope) -> bool:
        """Return whether the answer to a request has Anthropic's shape."""
        path = scope["path"]
        is_models_path = path == "/v1/models" or path.startswith("/v1/models/")
        return self.has_path(path) or (is_models_path and names_version(scope))

    def response(self, error: PenstockError, request_id: str | None) -> JSONResponse:
        """Return the HTTP response for an error."""
        status = status_of(error)
        body = error_body(message_of_error(error), status, request_id)
        if error.param == "thread":
            body["error"]["details"] = {"error_code": _NO_THREADS}
        return JSONResponse(body, status, retry_headers(error))

    def framework_body(self, message: str, status: int, request_id: str | None) -> dict[str, Any]:
        """Return the body for an error of the web framework."""
        return error_body(message, status, request_id)

    def bug_body(self, request_id: str | None) -> dict[str, Any]:
        """Return the body for a bug in penstock."""
        return error_body("internal error", HTTPStatus.INTERNAL_SERVER_ERROR, request_id)

    def event_payload(self, error: PenstockError) -> dict[str, Any]:
        """Return the data of the event that ends a failed stream."""
        body = error_body(message_of_error(error), status_of(error), None)
        return {"type": body["type"], "error": body["error"]}


def event(payload: Mapping[str, Any]) -> bytes:
    """Encode one event; its name is the payload's `type`. It is ASCII, because some readers split at U+2028."""
    return b"event: %b\ndata: %b\n\n" % (str(payload["type"]).encode(), to_json(payload, ensure_ascii=True))
