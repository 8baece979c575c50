"""From a line's fields to what the client submits. A name that is not honoured is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat without it runs to the model's limit."""

_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_SHARED_FIELDS = frozenset({"model", *SamplingParams.model_fields})
_BODY_FIELDS = {
    CHAT_URL: _SHARED_FIELDS | {"messages", "max_completion_tokens"},
    COMPLETIONS_URL: _SHARED_FIELDS | {"prompt"},
}

Prompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """One checked body. `model` is None where the body leaves it to the batch."""

    url: str
    prompt: Prompt
    model: str | None
    params: SamplingParams


def request_of_line(fields: Mapping[str, Any]) -> Request:
    """The request that a line of a batch file asks for; raises RequestError."""
    _refuse_unknown(fields, _LINE_FIELDS)
    if fields.get("method", "POST") != "POST":
        raise RequestError("method must be POST", param="method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in _BODY_FIELDS:
        raise RequestError(f"url must be {CHAT_URL} or {COMPLETIONS_URL}", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    return request_of(url, body)


def request_of(url: str, body: Mapping[str, Any]) -> Request:
    """The request in an OpenAI body; a field that is null is not given. Raises RequestError."""
    _refuse_unknown(body, _BODY_FIELDS[url])
    given = {name: value for name, value in body.items() if value is not None}
    model = given.pop("model", None)
    if not isinstance(model, str | None):
        raise RequestError("model must be a string", param="model")
    prompt: Prompt
    if url == CHAT_URL:
        prompt = _messages(given.pop("messages", None))
        _take_new_name_of_max_tokens(given)
    else:
        prompt = _prompt(given.pop("prompt", None))
        given.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
    return Request(url, prompt, model, _params(given))


def _refuse_unknown(fields: Mapping[str, Any], known: Collection[str]) -> None:
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown field: {name[:100]}", code="unknown_field", param=name[:100])


def _take_new_name_of_max_tokens(given: dict[str, Any]) -> None:
    limit = given.pop("max_completion_tokens", None)
    if limit is None:
        return
    if given.setdefault("max_tokens", limit) != limit:
        raise RequestError(
            "max_completion_tokens differs from max_tokens, its older name; send one of them",
            param="max_completion_tokens",
        )


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise RequestError("messages must be a non-empty list of objects", param="messages")
    return value


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    raise RequestError("prompt must be a text or a non-empty list of token ids", param="prompt")


def _params(given: Mapping[str, Any]) -> SamplingParams:
    # Strict, so that "5" is no number here either; JSON has no tuples, so lists stand for them.
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return SamplingParams.model_validate(values, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        said = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{param}: {said}" if param else said, param=param) from error
