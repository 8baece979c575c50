"""Spans of time as callers in Python give them: seconds, a timedelta, or the moment at which they end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from penstock.contract.errors import RequestError

Span = float | timedelta | datetime
"""Seconds, a timedelta, or an aware datetime: until then."""


def seconds_of(name: str, span: Span) -> float:
    """Return a span in seconds. A moment that has passed is 0 seconds away.

    Raises RequestError that names the option for a datetime without a time zone. Anything else is returned as it is.
    """
    if isinstance(span, timedelta):
        return span.total_seconds()
    if not isinstance(span, datetime):
        return span
    if span.utcoffset() is None:
        message = f"{name}: {span.isoformat()[:32]} has no time zone; use datetime.now(timezone.utc) or .astimezone()"
        raise RequestError(message, param=name)
    return max(0.0, (span - datetime.now(UTC)).total_seconds())
