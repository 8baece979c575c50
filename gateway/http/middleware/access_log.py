"""The access log: one structured line for each request. It never contains a query, a header or a body."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.contract.errors import InvariantError
from penstock.gateway.errors import ID_HEADER, ErrorShapes
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request_line import LINE, RequestLine
from penstock.gateway.stream.answer import JOB_HEADER

access_logger = logging.getLogger("penstock.gateway.access")

NO_STATUS = 499
"""Status that is logged when the caller disconnects before the answer begins, as nginx does."""
MAX_PATH_CHARS = 200
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""A client's own request id: printable ASCII characters, at most 128."""
_PROBES = ("/health", "/ready")
SCRAPES = "/metrics"
"""The path whose answered requests have no line."""


class AccessLog:
    """ASGI middleware that logs and counts each request, and gives each answer a request id.

    It does not use Starlette's BaseHTTPMiddleware, which would add a task and a queue to every event of a stream.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: GatewayMetrics,
        errors: ErrorShapes,
        paths: frozenset[str],
        logs_starts: bool = False,
    ) -> None:
        """`paths` are the paths of the plain Starlette routes; FastAPI reports its own.

        `logs_starts`: write a line when a request begins, too.
        """
        self._app = app
        self._metrics = metrics
        self._errors = errors
        self._paths = paths
        self._logs_starts = logs_starts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, then log and count it."""
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        started_s, state = time.monotonic(), scope.setdefault("state", {})
        given = Headers(scope=scope).get(ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status = NO_STATUS
        state["request_id"] = request_id
        said = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:MAX_PATH_CHARS]}
        if self._logs_starts and scope["path"] != SCRAPES:
            access_logger.info("request begins", extra=said)
        line = RequestLine()
        token = LINE.set(line)

        def noting_status(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                for name in self._errors.id_headers(scope["path"]):
                    headers[name] = request_id
                line.job = headers.get(JOB_HEADER, line.job)
            return send(message)

        try:
            await self._app(scope, receive, noting_status)
        except Exception:
            if status == NO_STATUS:
                # An outer middleware turns the exception into an answer.
                status = HTTPStatus.INTERNAL_SERVER_ERROR
            self._metrics.refused(InvariantError("internal error"), is_logged=True)
            raise
        finally:
            LINE.reset(token)
            if scope["path"] != SCRAPES or status != HTTPStatus.OK:
                ended = {"status": int(status), "duration_ms": round((time.monotonic() - started_s) * 1000)}
                access_logger.info("request", extra=said | ended | line.facts() | _ids_of(scope))
            # The label is the path of the route. A raw path would create a Prometheus series for every URL.
            is_known = scope["path"] in self._paths
            route = scope["path"] if is_known else getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, int(status)).inc()
            if scope["method"] == "POST":
                self._metrics.rate.note()


def _ids_of(scope: Scope) -> dict[str, str]:
    """Return what names the caller and the trace. Inner and outer parts noted them."""
    caller, trace_id = scope["state"].get("caller"), scope["state"].get("trace_id")
    key_id, tenant = ("", "") if caller is None else (caller.key_id, caller.tenant)
    ids = {"tenant": tenant, "key_id": key_id, "trace_id": trace_id}
    return {name: one for name, one in ids.items() if one}
