"""Whether a process exports spans, and its log messages about a collector that does not answer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import pytest
from fixtures.otlp_collector import OtlpCollector
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock.contract.errors import ConfigError
from penstock.runtime.tracing.export import QuietExporter
from penstock.runtime.tracing.setup import tracing_of, with_path

SDK = "penstock.runtime.tracing.export"
VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector(SpanExporter):
    """Accepts spans, refuses them or raises, as the test sets."""

    def __init__(self) -> None:
        self.answer: SpanExportResult | Exception = SpanExportResult.SUCCESS

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def _without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, SDK, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)


def test_traces_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert tracing_of(None, "service") is None
    assert tracing_of("", "service") is None


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_standard_variables_turn_traces_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    assert tracing_of(None, "service") is None


def test_spans_arrive_with_the_services_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    with OtlpCollector() as collector:
        tracing = tracing_of(collector.url, "service")
        assert tracing is not None
        tracing.tracer.start_span("work").end()
        tracing.close()
        assert [(span.service, span.name) for span in collector.spans] == [("service", "work")]


@pytest.mark.usefixtures("_without_opentelemetry")
def test_a_given_endpoint_without_opentelemetry_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: .*pip install 'penstock-llm\[tracing\]'"):
        tracing_of("http://collector:4318", "service")


@pytest.mark.usefixtures("_without_opentelemetry")
def test_a_clusters_variable_without_opentelemetry_is_only_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "http://collector:4318")
    assert tracing_of(None, "service") is None
    assert [record.getMessage() for record in caplog.records] == ["tracing.not_installed"]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/other/path", "http://collector:4318/other/path"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_standard_one(given: str, used: str) -> None:
    assert with_path(given) == used


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "http://"])
def test_an_endpoint_of_another_protocol_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        with_path(endpoint)


def test_an_unreachable_collector_is_logged_once_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    collector = Collector()
    exporter, span = QuietExporter(collector), ReadableSpan("work")
    for answer in (SpanExportResult.FAILURE, OSError("refused"), SpanExportResult.FAILURE):
        collector.answer = answer
        assert exporter.export([span, span]) is SpanExportResult.FAILURE
    collector.answer = SpanExportResult.SUCCESS
    for _ in range(2):
        assert exporter.export([span]) is SpanExportResult.SUCCESS
    lines = [(record.getMessage(), record.levelname) for record in caplog.records]
    assert lines == [("tracing.collector_unavailable", "WARNING"), ("tracing.collector_available", "INFO")]
    assert vars(caplog.records[-1])["num_lost_spans"] == 6
