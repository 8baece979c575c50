"""Spans of time as callers in Python give them: seconds, a timedelta, or the moment at which they end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

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


def span_of(given: Any, name: str = "not_before_s") -> Any:
    """Return the seconds until a moment that is given as text, such as `2027-01-01T03:00:00+01:00`.

    Anything else is returned as it is. Raises RequestError for another text.
    """
    if not isinstance(given, str):
        return given
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        message = f"{name}: must be seconds, or a time with its offset, such as 2027-01-01T03:00:00+01:00"
        raise RequestError(message, param=name) from None
    return seconds_of(name, moment)


def _in_json(given: Any) -> Any:
    try:
        return span_of(given)
    except RequestError as error:
        raise PydanticCustomError("moment", error.message.partition(": ")[2]) from None


GivenSpan = Annotated[
    float | None,
    BeforeValidator(_in_json),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "format": "date-time"}, {"type": "null"}]}),
]
"""Seconds in a JSON body, or as a text the time at which they have passed."""
