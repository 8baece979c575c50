"""The access log: one structured line for each request. It never contains a query, a header or a body."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.errors import request_id_headers
from penstock.gateway.openai.errors import ID_HEADER
from penstock.gateway.stream.answer import JOB_HEADER

logger = logging.getLogger("penstock.gateway.access")

NO_STATUS = 499
"""Status that is logged when the caller disconnects before the answer begins, as nginx does."""
MAX_PATH_CHARS = 200
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""A client's own request id: printable ASCII characters, at most 128."""
_PROBES = ("/health", "/ready")


def _request_id_of(scope: Scope) -> str:
    """Return the client's request id, or a new one if it sent none or an unusable one."""
    given = Headers(scope=scope).get(ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _ids_in(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the ids that inner and outer parts noted: of the caller's key, and of a recorded trace."""
    caller, trace_id = state.get("caller"), state.get("trace_id")
    key = {"key_id": caller.key_id} if caller is not None and caller.key_id else {}
    return key | ({"trace_id": trace_id} if trace_id else {})


class AccessLog:
    """ASGI middleware that logs and counts each request, and gives each answer a request id.

    It does not use Starlette's BaseHTTPMiddleware, which would add a task and a queue to every event of a stream.
    """

    def __init__(self, app: ASGIApp, *, paths: frozenset[str]) -> None:
        """`paths` are the paths of the plain Starlette routes; FastAPI reports its own."""
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, then log and count it."""
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        status, request_id, jobs = NO_STATUS, _request_id_of(scope), {}
        scope.setdefault("state", {})["request_id"] = request_id

        def noting_status(message: Message) -> Awaitable[None]:
            nonlocal status, jobs
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                for name in request_id_headers(scope["path"]):
                    headers[name] = request_id
                jobs = {"job": headers[JOB_HEADER]} if JOB_HEADER in headers else {}
            return send(message)

        try:
            await self._app(scope, receive, noting_status)
        except Exception:
            if status == NO_STATUS:
                # An outer middleware turns the exception into an answer.
                status = HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            duration_ms = round((time.monotonic() - started_s) * 1000)
            line: dict[str, Any] = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"][:MAX_PATH_CHARS],
            }
            line |= {"status": int(status), "duration_ms": duration_ms}
            logger.info("request", extra={**line, **jobs, **_ids_in(scope["state"])})
            metrics = scope["app"].state.metrics
            metrics.requests.labels(self._route_of(scope), int(status)).inc()
            if scope["method"] == "POST":
                metrics.rate.note()

    def _route_of(self, scope: Scope) -> str:
        """Return the route's path for the metric label. A raw path would create a Prometheus series for every URL."""
        return scope["path"] if scope["path"] in self._paths else getattr(scope.get("route"), "path", "other")
