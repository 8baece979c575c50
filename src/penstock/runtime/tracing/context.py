"""The trace context that a job carries from its caller, in the format of W3C Trace Context.

Only processes that use OpenTelemetry have a current span, and those have imported its API. So this module imports
nothing of OpenTelemetry by itself: without traces it costs a look into `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

SCOPE = "penstock"
"""Name of the instrumentation scope of all spans."""
TRACER_KEY = "penstock-tracer"
"""Key of the tracer in a context. Without it the application's own tracer makes the spans of a client."""
MAX_STATE_CHARS = 512
"""Characters of `tracestate` that are carried. W3C Trace Context asks for no more; a longer one is left out."""
_API = "opentelemetry.trace"

Carried = tuple[str, ...]
"""`traceparent`, and `tracestate` where the trace has one. Empty: the job has no trace, or it is not sampled."""


def start_enqueue_span(job_id: str, pool: str) -> Span | None:
    """Start the span of a submission below the current span. None if there is none, or if it is not sampled."""
    api = sys.modules.get(_API)
    if api is None:
        return None
    current = api.get_current_span()
    if not current.get_span_context().trace_flags.sampled:
        return None
    from opentelemetry import context, trace

    tracer = context.get_value(TRACER_KEY)
    if not isinstance(tracer, trace.Tracer):
        tracer = trace.get_tracer(SCOPE)
    attributes = {
        "messaging.system": "redis",
        "messaging.operation.type": "send",
        "messaging.destination.name": pool,
        "messaging.message.id": job_id,
    }
    # An exception's message may quote the request, so it is not recorded.
    return tracer.start_span(
        "enqueue",
        kind=trace.SpanKind.PRODUCER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    )


def carried_by(span: Span) -> Carried:
    """Return what a job carries of this span; nothing if the span is not sampled."""
    at = span.get_span_context()
    if not at.trace_flags.sampled:
        return ()
    parent, state = f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}", at.trace_state.to_header()
    return (parent, state) if 0 < len(state) <= MAX_STATE_CHARS else (parent,)


def context_of(headers: Mapping[str, str]) -> Context:
    """Return the context that the headers `traceparent` and `tracestate` name; an empty one without valid headers."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers, Context())


def context_carried(carried: Sequence[str]) -> Context:
    """Return the context of what a job carries."""
    return context_of(dict(zip(("traceparent", "tracestate"), carried, strict=False)))
