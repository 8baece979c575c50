"""The schema of the body of `POST /v1/jobs`: the arguments of Python's `submit`, or a line of a batch file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.fields import (
    JOBS,
    UNKNOWN_FIELD,
    WRONG_MEMBER,
    Endpoint,
    given_options,
    max_items,
    with_option_fields,
)
from penstock.contract.job import MAX_CUSTOM_ID_CHARS, MAX_MESSAGES, QueueFields, QueueOptions
from penstock.contract.sampling import SamplingParams, TokenId
from penstock.contract.tools import MAX_TOOLS, ToolUse
from penstock.gateway.request.generation import HeldBody, QueuedBody
from penstock.gateway.route_doc import EXAMPLE_MODEL
from penstock.producer.openai.messages import ChatMessage, GivenToolChoice, OfferedTool, named_calls, offers_of

_FORMS = ("prompt", "tokens", "messages")
_MAX_ITEMS = {name: limit for name, field in SamplingParams.model_fields.items() if (limit := max_items(field))}
"""Lengths are checked first, because pydantic would validate a million items before it refuses the list."""
_MAX_TOKEN_DIGITS = 10
"""Digits of the largest token id. Python refuses to convert texts of thousands of digits."""


if TYPE_CHECKING:
    _QueuedBody = QueuedBody
else:
    _QueuedBody = with_option_fields(QueuedBody, JOBS, QueueFields, SamplingParams, lenient=True)


class JobRequest(_QueuedBody):
    """Body of `POST /v1/jobs`: a prompt in one of three forms, or the `url` and the `body` of another endpoint."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": EXAMPLE_MODEL, "prompt": "Once upon a time", "params": {"max_tokens": 16}}]
        }
    )
    endpoint: ClassVar[Endpoint] = JOBS

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    prompt: str | None = None
    tokens: Annotated[list[TokenId] | None, FailFast(), Field(min_length=1)] = None
    messages: Annotated[
        list[ChatMessage] | None, Field(min_length=1, max_length=MAX_MESSAGES), FailFast(), BeforeValidator(named_calls)
    ] = None
    tools: Annotated[list[OfferedTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: GivenToolChoice = None
    parallel_tool_calls: bool | None = None
    sampling: Annotated[dict[str, Any], Field(default_factory=dict, alias="params")]

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)] | None = None
    method: Literal["POST"] | None = None
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] | None = None
    body: dict[str, Any] | None = None

    @field_validator("sampling")
    @classmethod
    def _known_and_short(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            if name not in SamplingParams.model_fields:
                raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {UNKNOWN_FIELD: name})
            limit = _MAX_ITEMS.get(name)
            if limit is not None and isinstance(given, list | dict) and len(given) > limit:
                raise PydanticCustomError(
                    "too_many", "must have at most {limit} items", {WRONG_MEMBER: name, "limit": limit}
                )
        return value

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.url is not None or self.body is not None:
            return self._only_of_line()
        if sum(getattr(self, name) is not None for name in _FORMS) != 1:
            raise PydanticCustomError("one_prompt", f"exactly one of {', '.join(_FORMS)} must be given")
        if self.tools and self.messages is None:
            raise PydanticCustomError("unsupported_value", "tools: allowed only together with messages")
        return self

    def _only_of_line(self) -> Self:
        if self.url is None or self.body is None:
            missing, given = ("url", "body") if self.url is None else ("body", "url")
            context = {WRONG_MEMBER: missing, "given": given}
            raise PydanticCustomError("missing_of_line", "is required with {given}", context)
        beside = (*_FORMS, "tools", "tool_choice", "parallel_tool_calls", "sampling", *SamplingParams.model_fields)
        found = next((name for name in beside if getattr(self, name) not in (None, [], {})), None)
        if found is not None:
            shown = {"sampling": "params"}.get(found, found)
            context = {WRONG_MEMBER: shown, "shown": shown}
            raise PydanticCustomError("unsupported_value", "belongs into body, as body.{shown}", context)
        return self

    @model_validator(mode="after")
    def _one_value(self) -> Self:
        for name, value in self._beside_params().items():
            given = self.sampling.get(name, value)
            if (given if isinstance(given, type(value)) or not isinstance(value, list) else [given]) != value:
                context = {WRONG_MEMBER: name, "name": name}
                raise PydanticCustomError(
                    "unsupported_value", "conflicts with params.{name}; send one of them", context
                )
        return self

    def _beside_params(self) -> dict[str, Any]:
        """Return the sampling options that are members of the body itself."""
        return {name: value for name, value in given_options(self, SamplingParams, JOBS).items() if value != []}

    @property
    def stream(self) -> bool:
        """Whether the answer is streamed. A job's stream has a path of its own."""
        return False

    @property
    def template_kwargs(self) -> str | None:
        """The variables for the chat template, of which a job has none."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        form = next(name for name in _FORMS if getattr(self, name) is not None)
        return {"prompt": form} | {
            name: f"params.{name}" for name in self.sampling if name not in self._beside_params()
        }

    def prompts(self) -> list[Any]:
        """Return a list with the only prompt: a text, token ids or messages."""
        if self.messages is not None:
            return [[message.message() for message in self.messages]]
        return [self.prompt if self.tokens is None else self.tokens]

    def tool_use(self) -> ToolUse:
        """Return the tools that the assistant may or must call."""
        return ToolUse.of(offers_of(self.tools), self.tool_choice, self.parallel_tool_calls)

    def params(self) -> SamplingParams:
        """Return the sampling options. Raises pydantic's ValidationError."""
        given = _frozen({**self.sampling, **self._beside_params()})
        if isinstance(biases := given.get("logit_bias"), dict):
            # JSON has only texts as names.
            given["logit_bias"] = {_token_id(name): bias for name, bias in biases.items()}
        return SamplingParams.model_validate(given, strict=True)

    def queueing(self) -> QueueOptions:
        """Return how to queue the job. By default it goes on without a reader, because it has none yet."""
        return {"background": True, **super().queueing()}

    def held_body(self) -> HeldBody | None:
        """Return the body of the endpoint that `url` names."""
        if self.url is None or self.body is None:
            return None
        beside = {**super().queueing(), **({} if self.priority is None else {"priority": self.priority})}
        if self.model is not None:
            beside["model"] = self.model
        return HeldBody("body", self.url, self.body, beside)

    def options(self) -> dict[str, Any]:
        """Return what the answer repeats of the body."""
        return {name: value for name in ("custom_id", "url") if (value := getattr(self, name)) is not None}


def _token_id(name: str) -> int | str:
    """Return the token id that a name of `logit_bias` means, or the name, which is refused, if it means none."""
    return int(name) if len(name) <= _MAX_TOKEN_DIGITS and name.isdecimal() else name


def _frozen(value: Any) -> Any:
    """Return the value with tuples in place of lists, which a strict check of records requires."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {name: _frozen(member) for name, member in value.items()}
    return value
