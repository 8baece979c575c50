"""Whether this process exports spans: its own setting, and the standard OTEL_* variables."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from penstock.contract.errors import ConfigError

if TYPE_CHECKING:
    from penstock.runtime.tracing.export import Tracing

_LOG = logging.getLogger(__package__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACES_PATH = "/v1/traces"
_ADVICE = "pip install 'penstock-llm[tracing]'"


def tracing_of(endpoint: str | None, service: str) -> Tracing | None:
    """Return the export of this process's spans, or None where traces are off.

    They are on if `endpoint` is given, or if a standard variable names a collector. `service` is the service's name
    without OTEL_SERVICE_NAME. Raises ConfigError if `endpoint` is given and OpenTelemetry is not installed.
    """
    if not endpoint and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    try:
        from penstock.runtime.tracing.export import Tracing
    except ModuleNotFoundError as error:
        if endpoint:
            message = f"otlp_traces_endpoint: {error.name} is not installed: {_ADVICE}"
            raise ConfigError(message, param="otlp_traces_endpoint") from error
        # Clusters may set the variables for every process, so that is no reason to refuse to start.
        _LOG.warning("tracing.not_installed", extra={"missing": error.name, "advice": _ADVICE})
        return None
    return Tracing(endpoint and with_path(endpoint), service)


def with_path(endpoint: str) -> str:
    """Return the URL to which spans are sent. A URL without a path gets the standard one."""
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("http", "https") or not rest:
        message = f"otlp_traces_endpoint: {endpoint!r} must begin with http:// or https://; spans are sent by HTTP"
        raise ConfigError(message, param="otlp_traces_endpoint")
    return endpoint if "/" in rest.rstrip("/") else endpoint.rstrip("/") + TRACES_PATH
