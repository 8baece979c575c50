"""The export of spans by OTLP: a bounded queue and one background thread. The only module that needs the SDK."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from penstock.runtime.proxies import is_loopback
from penstock.runtime.tracing.context import SCOPE

_LOG = logging.getLogger(__package__)

_DEFAULT_ENDPOINT = "http://localhost:4318"
"""OTLP's own default."""
CLOSE_S = 2.0
"""Longest time that the end of a process waits for its last spans."""
EXPORT_INTERVAL_MS = 1000
"""How long a span waits for others, without OTEL_BSP_SCHEDULE_DELAY. A killed process loses the spans that wait."""
_NOISY_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers that write lines for each batch that is not delivered. `QuietExporter` writes one line for all of them."""


class QuietExporter(SpanExporter):
    """An exporter that logs an unreachable collector once, and once more when it answers again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._num_lost = 0
        """Spans lost since the collector last answered."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans to the collector. They are lost if it does not take them."""
        reason = "the collector did not accept the spans"
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            result, reason = SpanExportResult.FAILURE, repr(error)
        if result is SpanExportResult.FAILURE:
            if not self._num_lost:
                _LOG.warning("tracing.collector_unavailable", extra={"reason": reason})
            self._num_lost += len(spans)
        elif self._num_lost:
            _LOG.info("tracing.collector_available", extra={"num_lost_spans": self._num_lost})
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


class _SpanIds(RandomIdGenerator):
    """Random ids of spans, except where `given` names the next one."""

    given = 0

    def generate_span_id(self) -> int:
        given, self.given = self.given, 0
        return given or super().generate_span_id()


def _session_for(endpoint: str | None) -> requests.Session:
    """Return a session that reaches a collector on this machine without the environment's proxies."""
    of_environment = (
        os.environ.get(name) for name in (OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT)
    )
    url = endpoint or next(filter(None, of_environment), _DEFAULT_ENDPOINT)
    session = requests.Session()
    session.trust_env = not is_loopback(url)
    return session


class Tracing:
    """A process's spans. OTEL_TRACES_SAMPLER decides which traces are recorded; a caller's decision comes first."""

    def __init__(self, endpoint: str | None, service: str, exporter: SpanExporter | None = None) -> None:
        """`endpoint`: the collector's URL; None: that of the standard variables. `exporter` replaces that of OTLP."""
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._ids = _SpanIds()
        given = os.environ.get("OTEL_SERVICE_NAME")
        resource = Resource.create({} if given else {SERVICE_NAME: service})
        # At its end the process waits for CLOSE_S, not for as long as the SDK's own handler would.
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        interval_ms = None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else EXPORT_INTERVAL_MS
        quiet = QuietExporter(exporter or OTLPSpanExporter(endpoint=endpoint, session=_session_for(endpoint)))
        self._provider.add_span_processor(BatchSpanProcessor(quiet, schedule_delay_millis=interval_ms))
        self.tracer = self._provider.get_tracer(SCOPE)

    def record(
        self,
        name: str,
        parent: Context,
        times_ns: tuple[int, int],
        attributes: Mapping[str, Any],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        span_id: int = 0,
        error: str = "",
    ) -> Span:
        """Record a span that has ended. `times_ns`: start and end. `span_id`: its id; 0: a random one."""
        self._ids.given = span_id
        start_ns, end_ns = times_ns
        span = self.tracer.start_span(name, parent, kind, attributes, links, start_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(max(start_ns, end_ns))
        return span

    def close(self) -> None:
        """Export the spans that wait, within CLOSE_S. Blocks for that time at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="penstock-tracing-close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)
