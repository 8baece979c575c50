"""Schemas of request bodies, shared by batch files and HTTP. Unknown and unsupported fields are refused by name.

An unsupported field is accepted with a value that changes nothing, such as null. Fields with the mark NO_EFFECT are
accepted and have no effect. `SamplingParams` alone checks the ranges of sampling options.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

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
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.contract.fields import (
    NO_EFFECT,
    OPENAI,
    WRONG_MEMBER,
    Hint,
    Whole,
    Wire,
    at_most,
    given_options,
    only,
    with_option_fields,
)
from penstock.contract.job import MAX_MESSAGES, MAX_METADATA, MAX_TOKENS_LIMIT, Metadata, TokenId
from penstock.contract.output import MAX_LOGPROBS
from penstock.contract.priority import ClassName
from penstock.contract.problems import problem_of
from penstock.contract.sampling import MAX_ALTERNATIVES, SamplingParams
from penstock.contract.tools import CONTINUES, GENERATION_PROMPT, MAX_TOOLS, NO_TOOLS, TemplateKwargs, ToolUse, closed
from penstock.producer.openai.messages import ChatMessage, GivenToolChoice, OfferedTool, named_calls, offers_of

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
"""Older names of vLLM, and names of llama.cpp and SGLang → the members of `structured_outputs`."""

_BUDGETS = ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
"""Names of a chat's field for the budget of its reasoning."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

ECHO_ALONE = "echo_alone"
"""The option of an answer that is the prompt alone."""
CLASS_OF_TIER: dict[str, ClassName] = {"flex": "batch", "priority": "interactive"}
"""OpenAI's service tiers that ask for a class. The other tiers ask for the caller's usual class."""


class _NamedSchema(Wire):
    """A JSON schema with a name and description. It is enforced whether or not `strict` is set.

    With `strict: false`, its objects may have properties that it does not name.
    """

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def enforced(self) -> dict[str, Any]:
        """Return the schema that the text must match."""
        return self.schema_ if self.strict is False else closed(self.schema_)


class ResponseFormat(Wire):
    """OpenAI's `response_format`: plain text, any JSON object, or JSON that matches a schema.

    llama.cpp and others take the schema in `schema` beside `json_object`.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "unsupported_value", "json_schema is required with type json_schema and only there"
            )
        if self.schema_ is not None and self.type != "json_object":
            raise PydanticCustomError("unsupported_value", "schema is allowed with type json_object only")
        return self

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return the equivalent value of penstock's `structured_outputs` field."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.enforced()}
        if self.schema_ is not None:
            return {"json_schema": closed(self.schema_)}
        return {"json_object": True} if self.type == "json_object" else None


class VllmFields(Wire):
    """Fields of vLLM's bodies that are accepted only with the value that changes nothing."""

    request_id: Hint = None
    session_id: Hint = None
    skip_special_tokens: Annotated[Any, only(None, True)] = None
    spaces_between_special_tokens: Annotated[Any, only(None, True)] = None
    truncation_side: Annotated[Any, only(None, "left")] = None
    allowed_token_ids: Annotated[Any, only(None)] = None
    logprob_token_ids: Annotated[Any, only(None)] = None
    return_tokens_as_token_ids: Annotated[Any, only(None, False)] = None
    logits_processors: Annotated[Any, only(None, [])] = None
    thinking_token_budget: Annotated[Any, only(None, -1)] = None
    include_reasoning: Annotated[Any, only(None, True)] = None
    repetition_detection: Annotated[Any, only(None)] = None
    watermarking: Annotated[Any, only(None, False)] = None
    kv_transfer_params: Annotated[Any, only(None)] = None
    vllm_xargs: Annotated[Any, only(None, {})] = None
    mm_processor_kwargs: Annotated[Any, only(None, {})] = None
    media_io_kwargs: Annotated[Any, only(None, {})] = None
    guided_decoding_backend: Annotated[Any, only(None)] = None


if TYPE_CHECKING:
    _SampledBody = VllmFields
else:
    _SampledBody = with_option_fields(VllmFields, OPENAI, SamplingParams, lenient=True)


class GenerationBody(_SampledBody):
    """Fields that chats and completions share: the sampling options, and these."""

    prompt_field: ClassVar[str]

    response_format: ResponseFormat | None = None
    # Older names of vLLM for the members of `structured_outputs`, and those of llama.cpp and SGLang.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, FailFast(), Field(max_length=MAX_ALTERNATIVES)] = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None

    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """`flex` is the class `batch`, `priority` the class `interactive`. Each answer names the tier that it got."""

    user: Hint = None
    metadata: Annotated[Metadata | None, at_most(MAX_METADATA)] = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None

    @field_validator("response_format")
    @classmethod
    def _one_schema(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and info.data.get("structured_outputs") is not None:
            raise PydanticCustomError("unsupported_value", "conflicts with structured_outputs; send one of them")
        return value

    @field_validator(*_GUIDED)
    @classmethod
    def _one_constraint(cls, value: object, info: ValidationInfo) -> object:
        others = ("structured_outputs", "response_format", *_GUIDED)
        if value is not None and (other := next((one for one in others if info.data.get(one) is not None), None)):
            message = "conflicts with {other}; send one of them"
            raise PydanticCustomError("unsupported_value", message, {"other": other})
        return value

    @property
    def _guided(self) -> str | None:
        """The name of another server by which the body constrains the text, or None."""
        return next((name for name in _GUIDED if getattr(self, name) is not None), None)

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        names = {"prompt": self.prompt_field}
        constraint = "response_format" if self.response_format is not None else self._guided
        return names if constraint is None else names | {"structured_outputs": constraint}

    @property
    def template_kwargs(self) -> str | None:
        """The variables for the chat template as JSON text, or None."""
        return None

    def options(self) -> dict[str, Any]:
        """Return the options of the answer that no other API has."""
        return {}

    def _given(self) -> dict[str, Any]:
        values = given_options(self, SamplingParams, OPENAI)
        values.pop("reasoning_budget", None)  # A completion does not reason; a chat has further names for it.
        if self.response_format is not None and (wanted := self.response_format.structured_outputs()) is not None:
            values["structured_outputs"] = wanted
        elif (guided := self._guided) is not None:
            values["structured_outputs"] = {_GUIDED[guided]: getattr(self, guided)}
        return values


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


class ChatReasoning(Wire):
    """OpenRouter's options of the reasoning: an effort, or a budget."""

    effort: ReasoningEffort | None = None
    max_tokens: Whole | None = None
    enabled: bool | None = None


class ChatBody(GenerationBody):
    """The fields of a `/v1/chat/completions` body that determine its answer."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast(), BeforeValidator(named_calls)
    ]
    max_tokens: Whole | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None

    reasoning_effort: ReasoningEffort | None = None
    reasoning: ChatReasoning | None = None
    # Names of vLLM and llama.cpp for the budget of the reasoning.
    thinking_token_budget: Whole | None = None
    thinking_budget_tokens: Whole | None = None
    reasoning_budget_tokens: Whole | None = None
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

    @field_validator(*_BUDGETS)
    @classmethod
    def _one_budget(cls, value: int | None, info: ValidationInfo) -> int | None:
        others = [name for name in _BUDGETS if value is not None and info.data.get(name) not in (None, value)]
        if others:
            message = "conflicts with {other}; send one of them"
            raise PydanticCustomError("unsupported_value", message, {"other": others[0]})
        return value

    @model_validator(mode="after")
    def _one_reasoning(self) -> Self:
        given = self.reasoning or ChatReasoning()
        pairs = ((self.reasoning_effort, given.effort, "effort"), (self._budget[1], given.max_tokens, "max_tokens"))
        for beside, inside, name in pairs:
            if None not in (beside, inside) and beside != inside:
                message = f"{name} conflicts with {'reasoning_effort' if name == 'effort' else self._budget[0]}"
                raise PydanticCustomError(
                    "unsupported_value", "{message}", {"message": message, WRONG_MEMBER: "reasoning"}
                )
        return self

    @property
    def _budget(self) -> tuple[str, int | None]:
        """The field that has the budget of the reasoning, and that budget; None: no field has one."""
        if (name := next((one for one in _BUDGETS if getattr(self, one) is not None), None)) is not None:
            return name, getattr(self, name)
        return "reasoning.max_tokens", None if self.reasoning is None else self.reasoning.max_tokens

    @property
    def _effort(self) -> ReasoningEffort | None:
        given = self.reasoning or ChatReasoning()
        return self.reasoning_effort or given.effort or ("none" if given.enabled is False else None)

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
        given = effort_variables(self._effort) | (self.chat_template_kwargs or {})
        if self.continue_final_message:
            given[CONTINUES] = True
        elif self.add_generation_prompt is False:
            given[GENERATION_PROMPT] = False
        return json.dumps(given) if given else None

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        is_renamed = self.max_completion_tokens is not None and self.max_tokens is None
        names = super().names() | {"reasoning_budget": self._budget[0]}
        return names | ({"max_tokens": "max_completion_tokens"} if is_renamed else {})

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt, which a chat's answer never does."""
        return False

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return a list with the conversation, which is the request's only prompt."""
        return [[message.message() for message in self.messages]]

    def tool_use(self) -> ToolUse:
        """Return the tools that the assistant may or must call."""
        return ToolUse.of(offers_of(self.tools), self.tool_choice, self.parallel_tool_calls)

    def params(self) -> SamplingParams:
        """Return the sampling options. Raises pydantic's ValidationError."""
        given = self._given()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self._budget[1] is not None:
            given["reasoning_budget"] = self._budget[1]
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

    @property
    def echoes_alone(self) -> bool:
        """Whether the answer is the prompt alone, with its log-probabilities."""
        return self.echoes and self._given().get("max_tokens") == 0

    def options(self) -> dict[str, Any]:
        """Return the options of the answer that no other API has."""
        return super().options() | ({ECHO_ALONE: True} if self.echoes_alone else {})

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
        wanted = {"logprobs": self.logprobs, "prompt_logprobs": of_prompt}
        if self.echoes_alone:
            wanted["max_tokens"] = 1  # The answer does not show it.
        return SamplingParams(**{"max_tokens": DEFAULT_COMPLETION_TOKENS, **self._given(), **wanted})
