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

from penstock.contract.errors import InvariantError, PenstockError
from penstock.contract.tenant import ApiKey
from penstock.gateway.errors import ID_HEADER, ErrorShapes
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request_line import RequestLine, new_line
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.producer.responses.answer import RESPONSE_PREFIX

access_logger = logging.getLogger("penstock.gateway.access")

NO_STATUS = 499
"""Status that is logged when the caller disconnects before the answer begins, as nginx does."""
MAX_PATH_CHARS = 200
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""A client's own request id: printable ASCII characters, at most 128."""
_PROBES = ("/health", "/ready")
NUM_STREAMS = "num_streams"
"""Where the state of a WebSocket has the number of streams that it began."""
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
        if scope["type"] == "websocket":
            await self._log_socket(scope, receive, send)
        elif scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
        else:
            with new_line() as line:
                await self._log_request(line, scope, receive, send)

    async def _log_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a WebSocket on, and log it at its end. Each of its streams is a request with a line of its own."""
        started_s, state = time.monotonic(), scope.setdefault("state", {})
        with new_line() as line:
            try:
                await self._app(scope, receive, send)
            finally:
                facts = {"path": scope["path"][:MAX_PATH_CHARS], "num_streams": state.get(NUM_STREAMS, 0)}
                access_logger.info("socket", extra=facts | _lasted(started_s) | line.facts() | _ids_of(scope))

    async def _log_request(self, line: RequestLine, scope: Scope, receive: Receive, send: Send) -> None:
        started_s, state = time.monotonic(), scope.setdefault("state", {})
        given = Headers(scope=scope).get(ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status = NO_STATUS
        state["request_id"] = request_id
        said = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:MAX_PATH_CHARS]}
        if self._logs_starts and scope["path"] != SCRAPES:
            access_logger.info("request begins", extra=said)

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
            if not line.job and status < HTTPStatus.BAD_REQUEST:
                line.job = _job_in_path(scope)
            if scope["path"] != SCRAPES or status != HTTPStatus.OK:
                ended = {"status": int(status), **_lasted(started_s)}
                access_logger.info("request", extra=said | ended | line.facts() | _ids_of(scope))
            # The label is the path of the route. A raw path would create a Prometheus series for every URL.
            is_known = scope["path"] in self._paths
            route = scope["path"] if is_known else getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, int(status)).inc()
            if scope["method"] == "POST":
                self._metrics.rate.note()


def log_unparsed(metrics: GatewayMetrics, error: PenstockError, status: HTTPStatus, request_id: str) -> None:
    """Log and count an answer that the parser of HTTP gave, so that no route saw the request."""
    with new_line() as line:
        metrics.refused(error)
    metrics.requests.labels("other", int(status)).inc()
    access_logger.info("request", extra={"request_id": request_id, "status": int(status), **line.facts()})


def log_socket_error(metrics: GatewayMetrics, error: PenstockError, caller: ApiKey, path: str) -> None:
    """Log and count an error that a WebSocket sends for a message, or for a stream whose requests have ended."""
    with new_line() as line:
        metrics.refused(error)
    access_logger.info("socket error", extra={"path": path, **line.facts(), **_ids_of_caller(caller)})


def _lasted(started_s: float) -> dict[str, int]:
    return {"duration_ms": round((time.monotonic() - started_s) * 1000)}


def _job_in_path(scope: Scope) -> str:
    """Return the job that the path of an answered request names, alone or as a response."""
    named: dict[str, str] = scope.get("path_params", {})
    return named.get("job_id", "") or named.get("response_id", "").removeprefix(RESPONSE_PREFIX)


def _ids_of_caller(caller: ApiKey) -> dict[str, str]:
    return {name: one for name, one in {"tenant": caller.tenant, "key_id": caller.key_id}.items() if one}


def _ids_of(scope: Scope) -> dict[str, str]:
    """Return what names the caller and the trace. Inner and outer parts noted them."""
    caller, trace_id = scope["state"].get("caller"), scope["state"].get("trace_id")
    ids = {} if caller is None else _ids_of_caller(caller)
    return ids | ({"trace_id": trace_id} if trace_id else {})
