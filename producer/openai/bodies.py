"""What a body may say, in a file and over HTTP. A name that is unknown, or known but not honoured, is refused by name.

Fields that only ask for what happens anyway (`logit_bias: {}`) are accepted with exactly those values; fields
that identify the caller (`user`, `metadata`) are accepted and have no effect. Ranges of the sampling options are
checked in one place, `SamplingParams`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.contract.job import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS_LIMIT,
    SamplingParams,
    TokenId,
)
from penstock.contract.logprobs import MAX_LOGPROBS
from penstock.contract.tools import MAX_TOOLS
from penstock.producer.openai.fields import Wire, at_most, only
from penstock.producer.openai.messages import NO_TOOLS, ChatMessage, OfferedTool, ToolUse, few_calls

MAX_PROMPTS = 64
"""Prompts of one completions request: each is a job, and all their ids stand in one response header."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat without it runs to the model's limit."""

_LOGPROBS = {"logprobs", "prompt_logprobs"}
"""Options that each dialect asks for in its own way."""

_TOKEN_IDS: TypeAdapter[list[int]] = TypeAdapter(
    Annotated[list[TokenId], Field(min_length=1), FailFast()], config=ConfigDict(strict=True)
)


def _list_of(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


class _NamedSchema(Wire):
    """The fields beside the schema describe it to models that read them; it is kept to whatever `strict` says."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Wire):
    """OpenAI's way of saying what form an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("unsupported_value", "json_schema goes with type json_schema, and no other")
        return self

    def structured_outputs(self) -> dict[str, Any] | None:
        """The same as our own field says it."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class _Generation(Wire):
    prompt_field: ClassVar[str]

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    # Lengths are checked here too: pydantic finds a million wrong items before it refuses the list.
    stop: Annotated[
        list[str], FailFast(), Field(default_factory=list, max_length=MAX_STOP_STRINGS), BeforeValidator(_list_of)
    ]
    stop_token_ids: Annotated[
        list[int], FailFast(), Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS), BeforeValidator(_list_of)
    ]

    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_LOGIT_BIASES)] = None
    bad_words: Annotated[list[str] | None, FailFast(), Field(max_length=MAX_BAD_WORDS)] = None
    structured_outputs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    skip_special_tokens: Annotated[Any, only(None, True)] = None

    @field_validator("response_format")
    @classmethod
    def _one_form(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and info.data.get("structured_outputs") is not None:
            raise PydanticCustomError("unsupported_value", "says what structured_outputs says too; send one of them")
        return value

    def names(self) -> dict[str, str]:
        """What the body calls fields of ours, where that differs."""
        names = {"prompt": self.prompt_field}
        return names | {"structured_outputs": "response_format"} if self.response_format is not None else names

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in SamplingParams.model_fields if name not in _LOGPROBS}
        if self.response_format is not None:
            values["structured_outputs"] = self.response_format.structured_outputs()
        return {name: value for name, value in values.items() if value is not None}


class ChatBody(_Generation):
    """What a body for `/v1/chat/completions` says about its answer."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast(), BeforeValidator(few_calls)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None

    store: Annotated[Any, only(None, False)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[OfferedTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only(None, [])] = None
    function_call: Annotated[Any, only(None, "none", "auto")] = None
    modalities: Annotated[Any, only(None, ["text"])] = None
    service_tier: Annotated[Any, only(None, "auto", "default")] = None
    audio: Annotated[Any, only(None)] = None
    moderation: Annotated[Any, only(None)] = None
    prediction: Annotated[Any, only(None)] = None
    prompt_cache_options: Annotated[Any, only(None)] = None
    prompt_cache_retention: Annotated[Any, only(None)] = None
    reasoning_effort: Annotated[Any, only(None)] = None
    verbosity: Annotated[Any, only(None)] = None
    web_search_options: Annotated[Any, only(None)] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens") not in (None, value):
            raise PydanticCustomError("unsupported_value", "differs from max_tokens, its older name; send one of them")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _of_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("unsupported_value", "only allowed when logprobs is true")
        return value

    def names(self) -> dict[str, str]:
        """What the body calls fields of ours, where that differs."""
        is_renamed = self.max_completion_tokens is not None and self.max_tokens is None
        return super().names() | ({"max_tokens": "max_completion_tokens"} if is_renamed else {})

    @property
    def echoes(self) -> bool:
        """A chat never begins with the prompt."""
        return False

    def prompts(self) -> list[list[dict[str, Any]]]:
        """The conversation, as the one prompt of the request."""
        return [[message.turn() for message in self.messages]]

    def tool_use(self) -> ToolUse:
        """What the assistant may call, and must. The choice is checked where it meets the tools and the model."""
        choice = "auto" if self.tool_choice is None else self.tool_choice
        parallel = self.parallel_tool_calls is not False
        if not self.tools or choice == "none":
            return ToolUse(None, choice, parallel)
        return ToolUse(json.dumps([tool.offer() for tool in self.tools]), choice, parallel)

    def params(self) -> SamplingParams:
        """The sampling options. Raises pydantic's ValidationError."""
        given = self._given()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**given)


def _prompts_of(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _wrong_prompt()
    if isinstance(value[0], int):
        return [_token_ids_of(value)]
    if len(value) > MAX_PROMPTS:
        raise _wrong_prompt()
    return [p if isinstance(p, str) else _token_ids_of(p) for p in value]


def _token_ids_of(value: object) -> list[int]:
    try:
        return _TOKEN_IDS.validate_python(value)
    except ValidationError:
        raise _wrong_prompt() from None


def _wrong_prompt() -> PydanticCustomError:
    return PydanticCustomError(
        "prompt_type",
        "must be a text, a non-empty list of token ids (0 to 2147483647), or a list of 1 to {max} of either",
        {"max": MAX_PROMPTS},
    )


class CompletionBody(_Generation):
    """What a body for `/v1/completions` says about its answer."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts_of)]

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[Any, only(None)] = None
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def _no_search(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, 1, info.data.get("n")):
            raise PydanticCustomError("unsupported_value", "not supported; leave it out or send the value of n")
        return value

    @field_validator("echo")
    @classmethod
    def _prompt_once(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("prompt_logprobs") is not None:
            raise PydanticCustomError("unsupported_value", "shows the prompt's logprobs in place of prompt_logprobs")
        return value

    def names(self) -> dict[str, str]:
        """What the body calls fields of ours, where that differs."""
        return super().names() | ({"prompt_logprobs": "echo"} if self.echo else {})

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return bool(self.echo)

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts; each becomes a job."""
        return self.prompt

    def tool_use(self) -> ToolUse:
        """Only a chat has any tools."""
        return NO_TOOLS

    def params(self) -> SamplingParams:
        """The sampling options. Raises pydantic's ValidationError."""
        # An echo is made of what the node says of the prompt's tokens.
        of_prompt = (self.logprobs or 0) if self.echo else self.prompt_logprobs
        likely = {"logprobs": self.logprobs, "prompt_logprobs": of_prompt}
        return SamplingParams(**{"max_tokens": DEFAULT_COMPLETION_TOKENS, **self._given(), **likely})
