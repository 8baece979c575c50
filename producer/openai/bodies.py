"""Schemas of request bodies, shared by batch files and HTTP. Unknown and unsupported fields are refused by name.

An unsupported field is accepted with a value that changes nothing, such as null. Fields that identify the caller
(`user`, `metadata`) are accepted and have no effect. `SamplingParams` alone checks the ranges of sampling options.
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

from penstock.contract.job import MAX_MESSAGES
from penstock.contract.logprobs import MAX_LOGPROBS
from penstock.contract.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS_LIMIT,
    SamplingParams,
    TokenId,
)
from penstock.contract.tools import MAX_TOOLS
from penstock.producer.openai.fields import Wire, at_most, only
from penstock.producer.openai.messages import NO_TOOLS, ChatMessage, OfferedTool, ToolUse, few_calls

MAX_PROMPTS = 64
"""Most prompts of one completion request. Each prompt is a job, and one response header lists all job ids."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. A chat without `max_tokens` may fill the model's context."""

_LOGPROBS = {"logprobs", "prompt_logprobs"}
"""Options that chats and completions express differently."""

_TOKEN_IDS: TypeAdapter[list[int]] = TypeAdapter(
    Annotated[list[TokenId], Field(min_length=1), FailFast()], config=ConfigDict(strict=True)
)


def _list_of(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


class _NamedSchema(Wire):
    """A JSON schema with a name and description. The schema is enforced whatever `strict` says."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Wire):
    """OpenAI's `response_format`: plain text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "unsupported_value", "json_schema is required with type json_schema and only there"
            )
        return self

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return the equivalent value of penstock's `structured_outputs` field."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class _Generation(Wire):
    """Fields that chats and completions share. Fields without a comment are those of `SamplingParams`."""

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
    # Lengths are checked here too, because pydantic would validate a million items before refusing the list.
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
    def _one_schema(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and info.data.get("structured_outputs") is not None:
            raise PydanticCustomError("unsupported_value", "conflicts with structured_outputs; send one of them")
        return value

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        names = {"prompt": self.prompt_field}
        return names | {"structured_outputs": "response_format"} if self.response_format is not None else names

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in SamplingParams.model_fields if name not in _LOGPROBS}
        if self.response_format is not None:
            values["structured_outputs"] = self.response_format.structured_outputs()
        return {name: value for name, value in values.items() if value is not None}


class ChatBody(_Generation):
    """The fields of a `/v1/chat/completions` body that determine its answer."""

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
            raise PydanticCustomError(
                "unsupported_value", "conflicts with max_tokens, its older name; send one of them"
            )
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _of_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("unsupported_value", "allowed only when logprobs is true")
        return value

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        is_renamed = self.max_completion_tokens is not None and self.max_tokens is None
        return super().names() | ({"max_tokens": "max_completion_tokens"} if is_renamed else {})

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt, which a chat's answer never does."""
        return False

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return a list with the conversation, which is the request's only prompt."""
        return [[message.message() for message in self.messages]]

    def tool_use(self) -> ToolUse:
        """Return the tools that the assistant may or must call. `tool_choice` is not checked here."""
        choice = "auto" if self.tool_choice is None else self.tool_choice
        parallel = self.parallel_tool_calls is not False
        if not self.tools or choice == "none":
            return ToolUse(None, choice, parallel)
        return ToolUse(json.dumps([tool.offer() for tool in self.tools]), choice, parallel)

    def params(self) -> SamplingParams:
        """Return the sampling options. Raises pydantic's ValidationError."""
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
        "must be a string, a non-empty list of token ids (0 to 2147483647), or a list of 1 to {max} of either",
        {"max": MAX_PROMPTS},
    )


class CompletionBody(_Generation):
    """The fields of a `/v1/completions` body that determine its answer."""

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
            raise PydanticCustomError("unsupported_value", "not supported; omit it or send the value of n")
        return value

    @field_validator("echo")
    @classmethod
    def _prompt_once(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("prompt_logprobs") is not None:
            raise PydanticCustomError("unsupported_value", "conflicts with prompt_logprobs; send logprobs with echo")
        return value

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return super().names() | ({"prompt_logprobs": "echo"} if self.echo else {})

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return bool(self.echo)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Each becomes one job."""
        return self.prompt

    def tool_use(self) -> ToolUse:
        """Return that there are no tools, because only chats offer them."""
        return NO_TOOLS

    def params(self) -> SamplingParams:
        """Return the sampling options. Raises pydantic's ValidationError."""
        # An echo is built from the prompt's log-probabilities, which also hold the text of the prompt's tokens.
        of_prompt = (self.logprobs or 0) if self.echo else self.prompt_logprobs
        logprobs = {"logprobs": self.logprobs, "prompt_logprobs": of_prompt}
        return SamplingParams(**{"max_tokens": DEFAULT_COMPLETION_TOKENS, **self._given(), **logprobs})
