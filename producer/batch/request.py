"""The requests of a batch's rows, which are checked when they are submitted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import to_json

from penstock.contract.errors import RequestError
from penstock.contract.fields import UNKNOWN_FIELD, IgnoredFields, only
from penstock.contract.problems import MAX_NAME_CHARS, rename, request_error
from penstock.producer.batch.rows import NAMES_OF_RESPONSES, EmbeddingRow, MessageRow, QueuedRow, ResponseRow
from penstock.producer.openai.bodies import ChatBody, CompletionBody, GenerationBody
from penstock.producer.parsed_body import ParsedBody, parsed_body
from penstock.queue.files.batch import MESSAGES_ENDPOINT

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
RESPONSES_URL = "/v1/responses"

TEXTS_FIELDS = {EMBEDDINGS_URL: "input"}
"""Endpoint → the field with a row's texts, where each text becomes a job."""

_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})

AnyRow = TypeVar("AnyRow", bound=QueuedRow)


class _RowFields(QueuedRow, GenerationBody):
    """Fields of a row that generates text."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream_options: Annotated[Any, only(None)] = None
    service_tier: Annotated[Any, only(None, "auto", "default", "flex")] = None


class _ChatRow(_RowFields, ChatBody):
    pass


class _CompletionRow(_RowFields, CompletionBody):
    pass


ROWS: dict[str, type[_ChatRow | _CompletionRow | EmbeddingRow | ResponseRow]] = {
    CHAT_URL: _ChatRow,
    COMPLETIONS_URL: _CompletionRow,
    EMBEDDINGS_URL: EmbeddingRow,
    RESPONSES_URL: ResponseRow,
}
"""The schema of a row's body by its url."""


def request_of_line(fields: Mapping[str, Any]) -> ParsedBody:
    """Return the request of a line in a batch file. Raises RequestError for an invalid line."""
    _refuse_unknown(fields, _LINE_FIELDS)
    if fields.get("method", "POST") != "POST":
        raise RequestError("method must be POST", param="method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in ROWS:
        raise RequestError(f"url must be one of {', '.join(ROWS)}", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    return request_of(url, body)


def request_of(url: str, body: Mapping[str, Any]) -> ParsedBody:
    """Return the request of an OpenAI body, whose options name its url. Raises RequestError for an invalid body."""
    row = _validated(ROWS[url], body)
    if isinstance(row, ResponseRow):
        return _response_of(row)
    parsed = parsed_body(row)
    if parsed.task is None and len(parsed.prompts) != 1:
        raise RequestError("a row must have exactly one prompt", param=parsed.names["prompt"])
    return replace(parsed, options={**parsed.options, "url": url})


def message_request_of(body: Mapping[str, Any], *, ignores_unknown: bool = False) -> ParsedBody:
    """Return the request of Anthropic's body. Raises RequestError for an invalid body.

    With `ignores_unknown`, unknown fields of the body itself are dropped instead of refused.
    """
    parsed = parsed_body(_validated(MessageRow, body, IgnoredFields(MessageRow) if ignores_unknown else None))
    return replace(parsed, options={**parsed.options, "url": MESSAGES_ENDPOINT})


def _validated(schema: type[AnyRow], body: Mapping[str, Any], context: IgnoredFields | None = None) -> AnyRow:
    try:
        # Validate as JSON: in strict mode, pydantic then still accepts a list for a tuple and an object for a record.
        return schema.model_validate_json(to_json(body, inf_nan_mode="constants"), context=context)
    except ValidationError as error:
        raise request_error(error) from None


def _response_of(row: ResponseRow) -> ParsedBody:
    try:
        chat = request_of(CHAT_URL, row.chat_body())
    except RequestError as error:
        rename(error, NAMES_OF_RESPONSES)
        raise
    return replace(chat, names=NAMES_OF_RESPONSES, options={"url": RESPONSES_URL, "echo": row.echo()})


def _refuse_unknown(fields: Mapping[str, Any], known: Collection[str]) -> None:
    for name in fields:
        if name not in known:
            shown = name[:MAX_NAME_CHARS]
            raise RequestError(f"{shown}: unknown field", code=UNKNOWN_FIELD, param=shown)
