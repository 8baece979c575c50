"""Schemas of request bodies, shared by batch files and HTTP. Unknown and unsupported fields are refused by name.

An unsupported field is accepted with a value that changes nothing, such as null. Fields with the mark NO_EFFECT are
accepted and have no effect. `SamplingParams` alone checks the ranges of sampling options.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from penstock.contract.job import MAX_MESSAGES, MAX_TOKENS_LIMIT, SamplingParams, TokenId
from penstock.contract.logprobs import MAX_LOGPROBS
from penstock.contract.problems import problem_of
from penstock.contract.tools import CONTINUES, GENERATION_PROMPT, MAX_TOOLS, TemplateKwargs
from penstock.producer.openai.fields import NO_EFFECT, Whole, only
from penstock.producer.openai.generation_body import GenerationBody
from penstock.producer.openai.messages import NO_TOOLS, ChatMessage, GivenToolChoice, OfferedTool, ToolUse, few_calls

MAX_PROMPTS = 64
"""Most prompts of one completion request. Each prompt is a job, and one response header lists all job ids."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. A chat without `max_tokens` may fill the model's context."""

_TOKEN_IDS: TypeAdapter[list[int]] = TypeAdapter(
    Annotated[list[TokenId], Field(min_length=1), FailFast()], config=ConfigDict(strict=True)
)
_TEMPLATE_KWARGS: TypeAdapter[str] = TypeAdapter(TemplateKwargs)


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables for the chat template that a reasoning effort stands for."""
    if effort is None:
        return {}
    # Templates have different names for the switch.
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def _template_variables(value: dict[str, Any]) -> dict[str, Any]:
    try:
        _TEMPLATE_KWARGS.validate_python(json.dumps(value))
    except ValidationError as error:
        raise ValueError(problem_of(error).message) from None
    return value


class ChatBody(GenerationBody):
    """The fields of a `/v1/chat/completions` body that determine its answer."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast(), BeforeValidator(few_calls)
    ]
    max_tokens: Whole | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[OfferedTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: GivenToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only(None, [])] = None
    function_call: Annotated[Any, only(None, "none", "auto")] = None
    modalities: Annotated[Any, only(None, ["text"])] = None
    audio: Annotated[Any, only(None)] = None
    moderation: Annotated[Any, only(None)] = None
    prediction: Annotated[Any, only(None)] = None
    prompt_cache_options: Annotated[Any, only(None)] = None
    web_search_options: Annotated[Any, only(None)] = None
    chat_template: Annotated[Any, only(None)] = None
    documents: Annotated[Any, only(None, [])] = None
    echo: Annotated[Any, only(None, False)] = None
    prompt_logprobs: Annotated[Any, only(None)] = None
    add_special_tokens: Annotated[Any, only(None, False)] = None

    store: Annotated[bool | None, NO_EFFECT] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, NO_EFFECT] = None

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

    @field_validator("continue_final_message")
    @classmethod
    def _no_new_message(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise PydanticCustomError("unsupported_value", "conflicts with add_generation_prompt; send one of them")
        return value

    @property
    def template_kwargs(self) -> str | None:
        """The variables for the chat template as JSON text, or None. Those of `chat_template_kwargs` come first."""
        given = effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})
        if self.continue_final_message:
            given[CONTINUES] = True
        elif self.add_generation_prompt is False:
            given[GENERATION_PROMPT] = False
        return json.dumps(given) if given else None

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
        """Return the tools that the assistant may or must call."""
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


def prompts_of(value: object, max_prompts: int = MAX_PROMPTS) -> list[str | list[int]]:
    """Return the prompts of a field that holds one text, one list of token ids, or several of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _wrong_prompt(max_prompts)
    try:
        if isinstance(value[0], int):
            return [_TOKEN_IDS.validate_python(value)]
        if len(value) > max_prompts:
            raise _wrong_prompt(max_prompts)
    except ValidationError:
        raise _wrong_prompt(max_prompts) from None
    return [prompt if isinstance(prompt, str) else _token_ids(prompt, at) for at, prompt in enumerate(value)]


def _token_ids(prompt: object, at: int) -> list[int]:
    try:
        return _TOKEN_IDS.validate_python(prompt)
    except ValidationError:
        message = "item {at} must be a string or a non-empty list of token ids (0 to 2147483647)"
        raise PydanticCustomError("prompt_type", message, {"at": at}) from None


def _prompts_of_completion(value: object) -> list[str | list[int]]:
    return prompts_of(value)


def _wrong_prompt(max_prompts: int) -> PydanticCustomError:
    return PydanticCustomError(
        "prompt_type",
        "must be a string, a non-empty list of token ids (0 to 2147483647), or a list of 1 to {max} of either",
        {"max": max_prompts},
    )


class CompletionBody(GenerationBody):
    """The fields of a `/v1/completions` body that determine its answer."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts_of_completion)]

    logprobs: Whole | None = None
    prompt_logprobs: Whole | None = None
    echo: bool | None = None
    suffix: Annotated[Any, only(None)] = None
    prompt_embeds: Annotated[Any, only(None)] = None
    add_special_tokens: Annotated[Any, only(None, True)] = None

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
