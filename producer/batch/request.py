"""From a line's fields to what the client submits. A name that is not honoured is refused by name."""

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
from penstock.producer.openai.fields import Wire, only

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})

Prompt = str | list[int] | list[dict[str, Any]]


class _Asked(Wire):
    """A row is answered in one piece, and in its batch's class."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: Annotated[Any, only(None, False)] = None
    stream_options: Annotated[Any, only(None)] = None


class _ChatRow(ChatBody, _Asked):
    tools: Annotated[Any, only(None, [])] = None
    tool_choice: Annotated[Any, only(None, "none", "auto")] = None


class _CompletionRow(CompletionBody, _Asked):
    pass


_BODIES: dict[str, type[_ChatRow | _CompletionRow]] = {CHAT_URL: _ChatRow, COMPLETIONS_URL: _CompletionRow}


@dataclass(frozen=True, slots=True)
class Request:
    """One checked body. `model` is None where the body leaves it to the batch."""

    url: str
    prompt: Prompt
    model: str | None
    params: SamplingParams
    echoes: bool = False


def request_of_line(fields: Mapping[str, Any]) -> Request:
    """The request that a line of a batch file asks for; raises RequestError."""
    _refuse_unknown(fields, _LINE_FIELDS)
    if fields.get("method", "POST") != "POST":
        raise RequestError("method must be POST", param="method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in _BODIES:
        raise RequestError(f"url must be {CHAT_URL} or {COMPLETIONS_URL}", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    return request_of(url, body)


def request_of(url: str, body: Mapping[str, Any]) -> Request:
    """The request in an OpenAI body; raises RequestError."""
    try:
        # Read as JSON, where a list may stand for a tuple and an object for a record although the types are strict.
        row = _BODIES[url].model_validate_json(to_json(body, inf_nan_mode="constants"))
        params = row.params()
    except ValidationError as error:
        raise request_error(error) from None
    prompts = row.prompts()
    if len(prompts) != 1:
        raise RequestError("a row has one prompt", param=row.prompt_field)
    return Request(url, prompts[0], row.model, params, row.echoes)


def _refuse_unknown(fields: Mapping[str, Any], known: Collection[str]) -> None:
    for name in fields:
        if name not in known:
            shown = name[:MAX_NAME_CHARS]
            raise RequestError(f"{shown}: unknown field", code=UNKNOWN_FIELD, param=shown)
