"""The requests of a batch's rows, which are checked when they are submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import to_json

from penstock.contract.errors import RequestError
from penstock.contract.fields import UNKNOWN_FIELD, IgnoredFields
from penstock.contract.problems import MAX_NAME_CHARS, request_error
from penstock.producer.batch.endpoints import ENDPOINTS
from penstock.producer.flows.rows import FLOW_FIELDS
from penstock.producer.parsed_body import ParsedBody, RequestBody, parsed_body
from penstock.queue.files.batch import FLOW_ENDPOINT

_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})


def request_of_line(fields: Mapping[str, Any]) -> ParsedBody:
    """Return the request of a line in a batch file. Raises RequestError for an invalid line."""
    if (unknown := next((name for name in fields if name not in _LINE_FIELDS), None)) is not None:
        shown = unknown[:MAX_NAME_CHARS]
        hint = (
            f"; only rows of a flow have it, a batch with the endpoint {FLOW_ENDPOINT}" if shown in FLOW_FIELDS else ""
        )
        raise RequestError(f"{shown}: unknown field{hint}", code=UNKNOWN_FIELD, param=shown)
    if fields.get("method", "POST") != "POST":
        raise RequestError("method must be POST", param="method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise RequestError(f"url must be one of {', '.join(ENDPOINTS)}", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    return request_of(url, body)


def request_of(url: str, body: Mapping[str, Any], *, ignores_unknown: bool = False) -> ParsedBody:
    """Return the request of an endpoint's body; its options name the url. Raises RequestError for an invalid body.

    With `ignores_unknown`, unknown fields of the body itself are dropped instead of refused.
    """
    schema = ENDPOINTS[url].schema
    try:
        # Validate as JSON: in strict mode, pydantic then still accepts a list for a tuple and an object for a record.
        raw = to_json(body, inf_nan_mode="constants")
        row = schema.model_validate_json(raw, context=IgnoredFields(schema) if ignores_unknown else None)
    except ValidationError as error:
        raise request_error(error) from None
    parsed = parsed_body(cast("RequestBody", row))
    return replace(parsed, options={**parsed.options, "url": url})
