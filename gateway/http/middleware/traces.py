"""The span of each HTTP request, in the trace that its caller names. Without traces the gateway has no such part."""

from __future__ import annotations

from collections.abc import Awaitable
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.http.middleware.access_log import MAX_PATH_CHARS
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.runtime.tracing.context import TRACER_KEY, carried_by, context_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

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
