"""Retries of a job: after which errors, and what its output must match."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.fields import UNKNOWN_FIELD, WRONG_MEMBER

MAX_ATTEMPTS = 8
"""The most attempts of a job. Its record keeps so many leases that ended."""
MAX_RETRY_BACKOFF_S = 3600
"""The longest mean pause before a second attempt, and the longest one before any."""
MAX_CHECK_BYTES = 64 << 10
"""The most bytes of a schema or a regular expression."""
OUTPUT_REJECTED = "output_rejected"
"""The code of a job whose output its check refused."""
RetryCause = Literal["model_error", "internal_error", "output_rejected"]
"""Errors of node and engine, and outputs that a check refused. An error of the request itself would come again."""
RETRY_CAUSES: tuple[RetryCause, ...] = get_args(RetryCause)


class OutputCheck(BaseModel):
    """What the text of each choice must match: a JSON schema, or a regular expression for the whole text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    json_schema: str | None = None
    """As JSON text."""
    regex: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.json_schema is None) == (self.regex is None):
            raise ValueError("must be either json_schema or regex")
        return self


def _refusal(text: str, member: str | None = None, **context: object) -> PydanticCustomError:
    named = {} if member is None else {WRONG_MEMBER: member}
    return PydanticCustomError("check_output", text, {**context, **named})


def check_of(value: Any) -> OutputCheck | None:
    """Return the check that a caller describes, None for none. Raises PydanticCustomError for another value."""
    if value is None or isinstance(value, OutputCheck):
        return value
    if not isinstance(value, Mapping):
        raise _refusal('must be {"json_schema": …} or {"regex": …}')
    given = {name: one for name, one in value.items() if one is not None}
    if unknown := next((str(name) for name in given if name not in OutputCheck.model_fields), None):
        raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {UNKNOWN_FIELD: unknown})
    if len(given) != 1:
        raise _refusal("must have either json_schema or regex")
    (name,) = given
    return OutputCheck(**{name: _schema_text(given[name]) if name == "json_schema" else _pattern(given[name])})


def _schema_text(schema: Any) -> str:
    """Return a schema as JSON text. It is an object, a Boolean, or the text of either."""
    text = schema if isinstance(schema, str) else None
    try:
        if text is None:
            text = json.dumps(schema, separators=(",", ":"), allow_nan=False)
        _bounded(text, "json_schema")
        if not isinstance(json.loads(text), dict | bool):
            raise ValueError
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, PydanticCustomError):
            raise
        raise _refusal("must be a JSON schema: an object, true or false", "json_schema") from None
    return text


def _pattern(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise _refusal("must be a text", "regex")
    _bounded(pattern, "regex")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _refusal("is no regular expression: {reason}", "regex", reason=str(error)[:200]) from None
    return pattern


def _bounded(text: str, name: str) -> None:
    if len(text.encode(errors="surrogatepass")) > MAX_CHECK_BYTES:
        raise _refusal("must have at most {limit} bytes", name, limit=MAX_CHECK_BYTES)


def _checked(value: Any) -> Any:
    check_of(value)
    return value


AcceptsOutput = Callable[[Any], bool]
"""A check that the client itself makes of a result: whether it accepts it."""
OutputCheckOption = Mapping[str, Any] | OutputCheck | AcceptsOutput | None
"""A check as a caller's argument."""
OutputCheckOfJob = Annotated[OutputCheck | None, BeforeValidator(check_of)]
GivenCheck = Annotated[
    Any,
    AfterValidator(_checked),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"json_schema": {"type": ["object", "boolean", "string"]}},
                    "required": ["json_schema"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"regex": {"type": "string"}},
                    "required": ["regex"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]
"""A valid check in a body, as it was sent."""
