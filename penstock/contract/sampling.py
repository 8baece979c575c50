"""Sampling options: structured outputs, and the options as keyword arguments for type checkers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self, TypedDict

from pydantic import AliasChoices, FailFast, Field, StringConstraints, field_validator, model_validator

from penstock.contract.named import Named
from penstock.contract.tools import WantedCalls, json_of

# Structured-output options of a request. Nodes compile them into masks of allowed tokens.

MAX_SCHEMA_CHARS = 1 << 18
MAX_GRAMMAR_CHARS = 1 << 16
MAX_REGEX_CHARS = 1 << 13
MAX_ALTERNATIVES = 1024
MAX_ALTERNATIVE_CHARS = 1024
MAX_CHOICE_CHARS = 1 << 18
"""Characters of all alternatives of `choice` together."""

Alternative = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ALTERNATIVE_CHARS)]


class StructuredOutputs(Named):
    """The constraint that the output must satisfy; exactly one field is set.

    `json_schema` (alias `json`, kept as text): JSON that matches the schema. `json_object`: any JSON object. `regex`: a
    full match. `choice`: one of these texts. `grammar`: a text derived from a Lark grammar. `calls`: tool calls in the
    model's own syntax.
    """

    json_schema: Annotated[str, StringConstraints(max_length=MAX_SCHEMA_CHARS)] | None = Field(
        default=None, validation_alias=AliasChoices("json_schema", "json")
    )
    json_object: bool = False
    regex: Annotated[str, StringConstraints(min_length=1, max_length=MAX_REGEX_CHARS)] | None = None
    choice: Annotated[tuple[Alternative, ...] | None, FailFast()] = Field(
        default=None, min_length=1, max_length=MAX_ALTERNATIVES
    )
    grammar: Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    calls: WantedCalls | None = None

    if TYPE_CHECKING:
        # Callers may give a schema as a mapping and a choice as a list; fields hold text and a tuple.
        def __init__(
            self,
            *,
            json: Mapping[str, Any] | str | None = None,
            json_schema: Mapping[str, Any] | str | None = None,
            json_object: bool = False,
            regex: str | None = None,
            choice: Sequence[str] | None = None,
            grammar: str | None = None,
            calls: WantedCalls | None = None,
        ) -> None: ...

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        try:
            if isinstance(value, Mapping):
                return json.dumps(value, allow_nan=False)
            is_schema = value is None or isinstance(json_of(value), dict)
        except (TypeError, ValueError, RecursionError):
            is_schema = False
        if not is_schema:
            raise ValueError("a JSON schema must be a JSON object, or the text of one")
        return value

    @field_validator("choice")
    @classmethod
    def _not_too_much_text(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        num_chars = sum(map(len, value or ()))
        if num_chars > MAX_CHOICE_CHARS:
            raise ValueError(f"the alternatives have {num_chars} characters together; the limit is {MAX_CHOICE_CHARS}")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(f"exactly one of {names} must be given, not {given or 'none'}")
        return self


# The sampling fields as keyword arguments: wider types than the checked record, whose fields they become.


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `SamplingParams`, and of the client's `submit`; `SamplingParams` says what each means."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None
    logprobs: int | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    return_token_ids: bool
    cache_salt: str | None
