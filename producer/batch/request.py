"""The requests of a batch's rows, which are checked when they are submitted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import to_json

from penstock.contract.channel import ChannelOption
from penstock.contract.errors import RequestError
from penstock.contract.fields import UNKNOWN_FIELD, IgnoredFields, only
from penstock.contract.job import NO_SAMPLING, SamplingParams
from penstock.contract.problems import MAX_NAME_CHARS, rename, request_error
from penstock.contract.tasks import Embed
from penstock.producer.batch.rows import NAMES_OF_RESPONSES, EmbeddingRow, MessageRow, QueuedRow, ResponseRow
from penstock.producer.openai.bodies import ChatBody, CompletionBody, GenerationBody
from penstock.producer.openai.messages import NO_TOOLS, ToolUse
from penstock.queue.files.batch import MESSAGES_ENDPOINT

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
RESPONSES_URL = "/v1/responses"

TEXTS_FIELDS = {EMBEDDINGS_URL: "input"}
"""Endpoint → the field with a row's texts, where each text becomes a job."""

_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})

Prompt = str | list[int] | list[dict[str, Any]]


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


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One checked request. `model` is None if the row uses the batch's model."""

    url: str
    prompt: Prompt
    model: str | None
    params: SamplingParams
    echoes: bool = False
    echoes_alone: bool = False
    template_kwargs: str | None = None
    deadline_s: float | None = None
    ttl_s: float | None = None
    not_before_s: float | None = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, str] | None = None
    channel: ChannelOption = None
    task: Embed | None = None
    """The task of a row of embeddings, whose prompts are `inputs`."""
    inputs: Sequence[str | list[int]] = ()
    as_base64: bool = False
    response_echo: Mapping[str, Any] | None = None
    """The members of a response that repeat its request."""
    tool_use: ToolUse = NO_TOOLS
    """The tools that the assistant may or must call."""
    shows_thinking: bool = False
    """Whether a message has thinking blocks."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps penstock's field names to those of the body, where they differ."""


def request_of_line(fields: Mapping[str, Any]) -> BatchRequest:
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


def request_of(url: str, body: Mapping[str, Any]) -> BatchRequest:
    """Return the request of an OpenAI body. Raises RequestError for an invalid body."""
    try:
        # Validate as JSON: in strict mode, pydantic then still accepts a list for a tuple and an object for a record.
        row = ROWS[url].model_validate_json(to_json(body, inf_nan_mode="constants"))
        if isinstance(row, EmbeddingRow):
            return _embeddings_of(row)
        if isinstance(row, ResponseRow):
            return _response_of(row)
    except ValidationError as error:
        raise request_error(error) from None
    try:
        params = row.params()
    except ValidationError as error:
        raise request_error(error, row.names()) from None
    prompts = row.prompts()
    if len(prompts) != 1:
        raise RequestError("a row must have exactly one prompt", param=row.prompt_field)
    return BatchRequest(
        url,
        prompts[0],
        row.model,
        params,
        row.echoes,
        isinstance(row, CompletionBody) and row.echoes_alone,
        row.template_kwargs,
        channel=row.channel,
        tool_use=row.tool_use(),
        names=row.names(),
        **row.queueing(),
    )


def message_request_of(body: Mapping[str, Any], *, ignores_unknown: bool = False) -> BatchRequest:
    """Return the request of Anthropic's body. Raises RequestError for an invalid body.

    With `ignores_unknown`, unknown fields of the body itself are dropped instead of refused.
    """
    context = IgnoredFields(MessageRow) if ignores_unknown else None
    try:
        row = MessageRow.model_validate_json(to_json(body, inf_nan_mode="constants"), context=context)
    except ValidationError as error:
        raise request_error(error) from None
    try:
        params = row.params()
    except ValidationError as error:
        raise request_error(error, row.names()) from None
    return BatchRequest(
        MESSAGES_ENDPOINT,
        row.prompts()[0],
        row.model,
        params,
        template_kwargs=row.template_kwargs,
        channel=row.channel,
        tool_use=row.tool_use(),
        shows_thinking=row.shows_thinking,
        names=row.names(),
        **row.queueing(),
    )


def _embeddings_of(row: EmbeddingRow) -> BatchRequest:
    return BatchRequest(
        EMBEDDINGS_URL,
        row.input[0],
        row.model,
        NO_SAMPLING,
        task=row.task(),
        inputs=row.input,
        as_base64=row.encoding_format == "base64",
        **row.queueing(),
    )


def _response_of(row: ResponseRow) -> BatchRequest:
    try:
        chat = request_of(CHAT_URL, row.chat_body())
    except RequestError as error:
        rename(error, NAMES_OF_RESPONSES)
        raise
    return replace(chat, url=RESPONSES_URL, names=NAMES_OF_RESPONSES, response_echo=row.echo())


def _refuse_unknown(fields: Mapping[str, Any], known: Collection[str]) -> None:
    for name in fields:
        if name not in known:
            shown = name[:MAX_NAME_CHARS]
            raise RequestError(f"{shown}: unknown field", code=UNKNOWN_FIELD, param=shown)
