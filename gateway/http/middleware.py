"""Middleware of all routes: access log, HEAD, traces, the end of a drain, CORS, and a WebSocket's API key."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.contract.errors import ConfigError, InvariantError, UnavailableError
from penstock.gateway.errors import ID_HEADER, ErrorShapes
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request_line import LINE, RequestLine
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.gateway.stream.writer import error_event, framing_of, has_broken_event
from penstock.runtime.tracing.context import TRACER_KEY, carried_by, context_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


logger = logging.getLogger("penstock.gateway")
access_logger = logging.getLogger("penstock.gateway.access")

# The access log: one structured line for each request. It never contains a query, a header or a body.

NO_STATUS = 499
"""Status that is logged when the caller disconnects before the answer begins, as nginx does."""
MAX_PATH_CHARS = 200
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""A client's own request id: printable ASCII characters, at most 128."""
_PROBES = ("/health", "/ready")
SCRAPES = "/metrics"
"""The path whose answered requests have no line."""


class PlainPaths:
    """ASGI middleware that reads repeated slashes of a path as one, and drops those at the end of a path of the APIs.

    Clients write them where they join a base URL and a path. It comes before the check of a key's scopes, so that all
    see one path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with the path."""
        path = scope.get("path", "")
        if "//" in path or path.endswith("/"):
            path = re.sub("//+", "/", path)
            scope["path"] = path.removesuffix("/") if path.startswith("/v1/") else path
        await self._app(scope, receive, send)


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


# HEAD on every route that has GET: the same status and headers, without the body (RFC 9110, 9.3.2).


class HeadRequests:
    """ASGI middleware that answers HEAD as GET and drops the body.

    The answer ends with its first piece of body, so a stream is not read to its end. A route without GET answers 405.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, as GET if it is HEAD."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        is_complete = False

        async def send_head(message: Message) -> None:
            nonlocal is_complete
            if is_complete:
                return
            if message["type"] == "http.response.body":
                is_complete = True
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        # The server must still see HEAD, and outer middleware the route.
        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send_head)
        finally:
            scope.update({**as_get, "method": "HEAD"})


# The span of each HTTP request, in the trace that its caller names. Without traces the gateway has no such part.

TRACE_HEADER = "traceresponse"
"""Response header that names the trace and the request's span, in the form of `traceparent` (W3C Trace Context)."""
FIRST_BYTES = "first_bytes"
"""Name of the event in a request's span when the first bytes of the answer's body are sent."""
_UNTRACED = ("/health", "/ready", "/metrics")


class TracedRequests:
    """ASGI middleware that makes a span of each request. Jobs that are submitted inside carry its context.

    `traceparent` and `tracestate` of the request continue the caller's trace. The span ends with the answer. The state
    of the request gets its `trace_id`, which the access log shows.
    """

    def __init__(self, app: ASGIApp, *, tracer: Tracer, paths: frozenset[str]) -> None:
        """`paths` are the paths of the plain Starlette routes; FastAPI reports its own."""
        self._app = app
        self._tracer = tracer
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on inside its span."""
        if scope["type"] != "http" or scope["path"].startswith(_UNTRACED):
            await self._app(scope, receive, send)
            return
        from opentelemetry import context, trace

        method, path = scope["method"], scope["path"][:MAX_PATH_CHARS]
        attributes = {"http.request.method": method, "url.path": path, "url.scheme": scope["scheme"]}
        parent = context_of(Headers(scope=scope))
        # An exception's message may quote the request, so it is not recorded.
        with self._tracer.start_as_current_span(
            method, parent, trace.SpanKind.SERVER, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            if not carried_by(span):
                await self._app(scope, receive, send)
                return
            scope.setdefault("state", {})["trace_id"] = trace.format_trace_id(span.get_span_context().trace_id)
            token = context.attach(context.set_value(TRACER_KEY, self._tracer))
            try:
                await self._app(scope, receive, _noting(span, send))
            finally:
                context.detach(token)
                route = scope["path"] if scope["path"] in self._paths else getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)


def _noting(span: Span, send: Send) -> Send:
    """Return a `send` that records the answer's status, job and first bytes in the span, and adds TRACE_HEADER."""
    has_body = False

    def noting(message: Message) -> Awaitable[None]:
        nonlocal has_body
        if message["type"] == "http.response.start":
            status, headers = message["status"], MutableHeaders(scope=message)
            headers[TRACE_HEADER] = carried_by(span)[0]
            span.set_attribute("http.response.status_code", int(status))
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                span.set_attribute("error.type", str(int(status)))
            if JOB_HEADER in headers:
                span.set_attribute("penstock.job.id", headers[JOB_HEADER].split(", "))
        elif message.get("body") and not has_body:
            has_body = True
            span.add_event(FIRST_BYTES)
        return send(message)

    return noting


# The end of a planned shutdown: answers still open after the drain end with an error that gives the reason.

SAY_TIMEOUT_S = 1.0
"""Seconds for sending the error to one client. A client that reads nothing does not get it."""
END_GRACE_S = 5
"""Seconds for the canceled answers to release their jobs before the server closes every connection."""


class Drain:
    """ASGI middleware that ends a canceled answer with an error.

    An answer that has not begun becomes a 503 with Retry-After; a stream ends with an error event. The caller can
    continue the stream at another gateway with its last event id.
    """

    def __init__(self, app: ASGIApp, *, errors: ErrorShapes, metrics: GatewayMetrics) -> None:
        self._app = app
        self._errors = errors
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and send an error if its answer is canceled."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started: Headers | None = None
        is_complete = False

        def noting(message: Message) -> Awaitable[None]:
            nonlocal started, is_complete
            if message["type"] == "http.response.start":
                started = Headers(raw=message["headers"])
            else:
                is_complete = not message.get("more_body", False)
            return send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if is_complete:
                return
            error = UnavailableError("this gateway was stopped before the answer was complete", code="gateway_stopped")
            if started is None:
                self._metrics.refused(error)
            else:
                self._metrics.failed(error)
            # Within an event nothing valid can follow, so the server closes the connection.
            if not has_broken_event(scope):
                await self._send_error(error, started, scope, receive, send)

    async def _send_error(
        self, error: UnavailableError, started: Headers | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            async with asyncio.timeout(SAY_TIMEOUT_S):
                if started is None:
                    await self._errors.response(error, scope)(scope, receive, send)
                elif started.get("content-type", "").startswith((framing := framing_of(scope)).media_type):
                    event = error_event(error, self._errors.shape_of(scope))
                    body = framing.error(error, event)
                    await send({"type": "http.response.body", "body": body, "more_body": False})
        except TimeoutError:
            logger.info("a client did not receive the shutdown error", extra={"path": scope["path"]})


async def cut_off_after(drain_s: float, answers: Iterable[asyncio.Task[None]]) -> None:
    """Cancel the answers that are still open after `drain_s` seconds."""
    await asyncio.sleep(drain_s)
    left = [task for task in answers if not task.done()]
    if left:
        facts = {"num_answers": len(left), "drain_s": drain_s}
        logger.warning("answers were cut off at the end of the drain", extra=facts)
    for task in left:
        task.cancel()


# CORS: which pages of other sites may call this gateway from a browser. Credentials (cookies) are never allowed.

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_ANY_ORIGIN = ("*", "null")
"""Every page, and every page without an origin of its own, such as a local file or a sandboxed frame."""
OPERATORS_PATHS = ("/dashboard", "/metrics", "/health/nodes", "/v1/usage")
"""Paths for operators. No page of another site may read them."""


def allows_any_page(origins: Sequence[str]) -> bool:
    """Return whether one of the origins stands for every page."""
    return any(origin in _ANY_ORIGIN for origin in origins)


def check_origins(origins: Sequence[str], *, needs_keys: bool) -> None:
    """Raise ConfigError for an origin that no browser sends, and for one of any page if callers need no key."""
    for origin in origins:
        if origin in _ANY_ORIGIN and not needs_keys:
            message = (
                f"cors_origins: {origin!r} lets any web page use this gateway, which needs no API key here; name exact "
                "origins, make a key with `penstock keys add TENANT`, or start the gateway with --require-keys"
            )
            raise ConfigError(message, param="cors_origins")
        if origin not in _ANY_ORIGIN and _ORIGIN.fullmatch(origin) is None:
            message = (
                f"cors_origins: {origin[:100]!r} is not an origin, such as https://app.example or http://localhost:3000"
            )
            raise ConfigError(message, param="cors_origins")


class Cors:
    """ASGI middleware that answers preflights and lets pages of these origins read answers, but not OPERATORS_PATHS."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str], methods: Sequence[str], exposed: Sequence[str]) -> None:
        self._app = app
        self._open = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=["*"],
            allow_credentials=False,
            expose_headers=exposed,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with or without the headers of CORS."""
        is_operators = scope["type"] == "http" and scope["path"].startswith(OPERATORS_PATHS)
        await (self._app if is_operators else self._open)(scope, receive, send)


_KEY_PREFIX = "pk-"


class SubprotocolKey:
    """ASGI middleware that takes a WebSocket's API key from the offered subprotocols.

    A browser can set no header: `new WebSocket(url, ["penstock", "pk-…"])`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with the key as a header."""
        if scope["type"] == "websocket" and "authorization" not in Headers(scope=scope):
            for offered in scope["subprotocols"]:
                if offered.startswith(_KEY_PREFIX):
                    scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + offered.encode())]
                    break
        await self._app(scope, receive, send)
