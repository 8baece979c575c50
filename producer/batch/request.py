"""Parsing of one row of a batch into a checked request. Unsupported fields are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import to_json

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.named import UNKNOWN_FIELD
from penstock.contract.problems import MAX_NAME_CHARS, request_error
from penstock.producer.openai.bodies import ChatBody, CompletionBody
from penstock.producer.openai.fields import only
from penstock.producer.openai.generation_body import GenerationBody

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})

Prompt = str | list[int] | list[dict[str, Any]]


class _RowFields(GenerationBody):
    """Fields of a row beside OpenAI's body. A row cannot stream and cannot choose its priority class."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: Annotated[Any, only(None, False)] = None
    stream_options: Annotated[Any, only(None)] = None
    service_tier: Annotated[Any, only(None, "auto", "default", "flex")] = None


class _ChatRow(_RowFields, ChatBody):
    tools: Annotated[Any, only(None, [])] = None
    tool_choice: Annotated[Any, only(None, "none", "auto")] = None


class _CompletionRow(_RowFields, CompletionBody):
    pass


ROWS: dict[str, type[_ChatRow | _CompletionRow]] = {CHAT_URL: _ChatRow, COMPLETIONS_URL: _CompletionRow}
"""The schema of a row's body by its url."""


@dataclass(frozen=True, slots=True)
class Request:
    """One checked request. `model` is None if the row uses the batch's model."""

    url: str
    prompt: Prompt
    model: str | None
    params: SamplingParams
    echoes: bool = False
    template_kwargs: str | None = None


def request_of_line(fields: Mapping[str, Any]) -> Request:
    """Return the request of a line in a batch file. Raises RequestError for an invalid line."""
    _refuse_unknown(fields, _LINE_FIELDS)
    if fields.get("method", "POST") != "POST":
        raise RequestError("method must be POST", param="method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in ROWS:
        raise RequestError(f"url must be {CHAT_URL} or {COMPLETIONS_URL}", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    return request_of(url, body)


def request_of(url: str, body: Mapping[str, Any]) -> Request:
    """Return the request of an OpenAI body. Raises RequestError for an invalid body."""
    try:
        # Validate as JSON: in strict mode, pydantic then still accepts a list for a tuple and an object for a record.
        row = ROWS[url].model_validate_json(to_json(body, inf_nan_mode="constants"))
        params = row.params()
    except ValidationError as error:
        raise request_error(error) from None
    prompts = row.prompts()
    if len(prompts) != 1:
        raise RequestError("a row must have exactly one prompt", param=row.prompt_field)
    return Request(url, prompts[0], row.model, params, row.echoes, row.template_kwargs)


def _refuse_unknown(fields: Mapping[str, Any], known: Collection[str]) -> None:
    for name in fields:
        if name not in known:
            shown = name[:MAX_NAME_CHARS]
            raise RequestError(f"{shown}: unknown field", code=UNKNOWN_FIELD, param=shown)
