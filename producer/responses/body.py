"""The fields of a body of `POST /v1/responses`, for HTTP and for rows of batches.

Unknown and unsupported fields are refused by name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.contract.fields import (
    NO_EFFECT,
    RESPONSES,
    Whole,
    Wire,
    given_options,
    only,
    renamed_options,
    with_option_fields,
)
from penstock.contract.job import MAX_METADATA, Metadata
from penstock.contract.output import MAX_LOGPROBS
from penstock.contract.sampling import SamplingParams
from penstock.contract.tools import CONTINUES, MAX_TOOLS, ToolUse, closed
from penstock.producer.openai.bodies import effort_variables
from penstock.producer.openai.seals import THOUGHTS
from penstock.producer.responses.conversation import Messages, messages_of
from penstock.producer.responses.items import AnyItem, items_of, tools_in
from penstock.producer.responses.tools import (
    AnyTool,
    Choice,
    OfferedTools,
    dropped_names,
    shown_choice,
    shown_tools,
    tool_of,
)

MAX_RESPONSE_ID_CHARS = 256
MAX_EFFORT_CHARS = 64
LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
INCLUDABLE = (LOGPROBS, _SEALED)
"""What `include` may name. Reasoning is never hidden: its text is also in the item's content."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_EFFORTS: tuple[str, ...] = get_args(Effort)


def _includable(value: object) -> object:
    for name in value if isinstance(value, list) else ():
        if name not in INCLUDABLE:
            context = {"name": repr(name)[:80], "known": ", ".join(INCLUDABLE)}
            raise PydanticCustomError("unsupported_value", "{name} is not supported; supported: {known}", context)
    return value


class TextFormat(Wire):
    """The format of the text: plain text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError("unsupported_value", "schema is required with type json_schema and only there")
        return self

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return the equivalent value of penstock's `structured_outputs`."""
        if self.schema_ is not None:
            return {"json_schema": self.schema_ if self.strict is False else closed(self.schema_)}
        return {"json_object": True} if self.type == "json_object" else None

    def shown(self) -> dict[str, Any]:
        """Return the format as the response shows it."""
        if self.schema_ is None:
            return {"type": self.type}
        members = {"name": self.name or "", "description": self.description, "schema": self.schema_}
        return {"type": self.type, **members, "strict": bool(self.strict)}


class _Options(Wire):
    """Options of a part of the answer. Unknown ones are ignored, because new models bring new ones."""

    model_config = ConfigDict(extra="allow")

    @property
    def ignored(self) -> list[str]:
        """The names of the unknown options."""
        return list(self.model_extra or ())


class TextConfig(_Options):
    """Options of the text. `verbosity` is accepted without effect."""

    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(_Options):
    """Options of the reasoning. A summary is never made.

    The effort sets variables of the chat template. `max_tokens` is the budget: OpenRouter's name, not OpenAI's.
    """

    effort: Annotated[str, StringConstraints(max_length=MAX_EFFORT_CHARS)] | None = None
    max_tokens: Whole | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def known_effort(self) -> str | None:
        """The effort. An unknown one is one that only newer models have, and stands for the highest known."""
        return self.effort if self.effort is None or self.effort in _EFFORTS else _EFFORTS[-1]

    @property
    def ignored(self) -> list[str]:
        """The names of the unknown options, and the unknown effort."""
        return [*super().ignored, *(["effort"] if self.effort != self.known_effort else ())]


class ResponseStreamOptions(_Options):
    """Options of the stream."""

    include_obfuscation: Annotated[Any, only(None, False)] = None


class AnyResponseFields(Wire):
    """The fields that `/v1/responses` and `/v1/responses/compact` share. Fields without a comment are OpenAI's."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_RESPONSE_ID_CHARS)] | None = None
    cache_salt: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    prompt_cache_key: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "in-memory", "24h"] | None, NO_EFFECT] = None
    prompt_cache_options: Annotated[Any, only(None)] = None
    image: Annotated[Any, only(None)] = None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt, which a response never does."""
        return False

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "input", "messages": "input", **renamed_options(SamplingParams, RESPONSES)}


if TYPE_CHECKING:
    _SampledFields = AnyResponseFields
else:
    _SampledFields = with_option_fields(AnyResponseFields, RESPONSES, SamplingParams)


class ResponseFields(_SampledFields):
    """The fields of a `/v1/responses` body. Those without a comment are of OpenAI's API."""

    input: Annotated[list[AnyItem], PlainValidator(items_of)]
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    max_output_tokens: int | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str] | None, BeforeValidator(_includable)] = None
    text: TextConfig | None = None
    tools: Annotated[
        list[Annotated[AnyTool, PlainValidator(tool_of)]] | None,
        FailFast(),
        Field(max_length=MAX_TOOLS, validate_default=True),
    ] = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    # As in chats: the answer goes on where the last message ended.
    continue_final_message: bool | None = None
    truncation: Annotated[Any, only(None, "disabled")] = None

    metadata: Annotated[Metadata | None, Field(max_length=MAX_METADATA)] = None
    user: Annotated[str | None, NO_EFFECT] = None
    safety_identifier: Annotated[str | None, NO_EFFECT] = None
    client_metadata: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    # Limits the calls of hosted tools, of which there are none.
    max_tool_calls: Annotated[int | None, Field(ge=1), NO_EFFECT] = None

    conversation: Annotated[Any, only(None)] = None
    prompt: Annotated[Any, only(None)] = None
    context_management: Annotated[Any, only(None)] = None
    moderation: Annotated[Any, only(None)] = None
    access_programs: Annotated[Any, only(None)] = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.background and self.store is False:
            raise PydanticCustomError("unsupported_value", "background requires store to be true")
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("unsupported_value", "stream_options are allowed only when stream is true")
        return self

    @field_validator("tools")
    @classmethod
    def _can_be_offered(cls, value: list[AnyTool] | None, info: ValidationInfo) -> list[AnyTool] | None:
        OfferedTools.of([*(value or ()), *tools_in(info.data.get("input", ()))])
        return value

    @property
    def _given_tools(self) -> list[AnyTool]:
        return [*(self.tools or ()), *tools_in(self.input)]

    @property
    def dropped(self) -> list[str]:
        """The names of the parts that are ignored under every setting, for a header of the answer."""
        options = {"text": self.text, "reasoning": self.reasoning, "stream_options": self.stream_options}
        names = [f"{name}.{one}" for name, part in options.items() if part is not None for one in part.ignored]
        names += [] if self.client_metadata is None else ["client_metadata"]
        names += dropped_names(self._given_tools)
        return list(dict.fromkeys([*names, *(name for item in self.input for name in item.ignored)]))

    @property
    def template_kwargs(self) -> str | None:
        """The variables for the chat template as JSON text, or None: the reasoning effort's, and what begins it."""
        variables = effort_variables(None if self.reasoning is None else self.reasoning.known_effort)
        if self.continue_final_message:
            variables[CONTINUES] = True
        return json.dumps(variables) if variables else None

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return a list with the messages of the input, without instructions and earlier responses."""
        return [messages_of(self.input).messages]

    def tool_use(self) -> ToolUse:
        """Return the tools that the model may or must call."""
        return OfferedTools.of(self._given_tools).use(self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def params(self) -> SamplingParams:
        """Return the sampling options. Raises pydantic's ValidationError."""
        given = given_options(self, SamplingParams, RESPONSES)
        if self.text is not None and (wanted := self.text.format.structured_outputs()) is not None:
            given["structured_outputs"] = wanted
        if self.reasoning is not None and self.reasoning.max_tokens is not None:
            given["reasoning_budget"] = self.reasoning.max_tokens
        # Without include, a top_logprobs of 0 asks for nothing.
        given["logprobs"] = self.top_logprobs or (0 if LOGPROBS in (self.include or ()) else None)
        return SamplingParams(**given)

    def options(self) -> dict[str, Any]:
        """Return what only this API needs: how to run, store and show the response."""
        found = messages_of(self.input)
        return {
            "background": bool(self.background),
            "store": self.store is not False,
            "echo": json.dumps(self.echo()).encode(),
            "items": [[item.id or "", json.dumps(item.stored(), ensure_ascii=False)] for item in self.input],
            **conversation_options(self, found),
            "called": self.called(),
            "truncates": self.truncation == "auto",
            "seals_reasoning": _SEALED in (self.include or ()),
        }

    def called(self) -> list[list[str]]:
        """Return what calls come back as, if they are not plain functions. As plain values."""
        return OfferedTools.of(self._given_tools).called()

    def echo(self) -> dict[str, Any]:
        """Return the members of the response that repeat the request, as plain values, without the sampling."""
        tier = self.service_tier
        text, reasoning = self.text or TextConfig(), self.reasoning or Reasoning()
        return {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "background": bool(self.background),
            "store": self.store is not False,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "top_logprobs": self.top_logprobs or 0,
            "text": {"format": text.format.shown(), "verbosity": text.verbosity or "medium"},
            "tools": shown_tools(self.tools or ()),
            "tool_choice": shown_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.known_effort, "summary": reasoning.summary or reasoning.generate_summary},
            "truncation": self.truncation or "disabled",
            "service_tier": "default" if tier in (None, "auto") else tier,
            "metadata": self.metadata or {},
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }


def conversation_options(body: AnyResponseFields, found: Messages) -> dict[str, Any]:
    """Return what a gateway needs, beside the messages of the input, to build the conversation. As plain values."""
    return {
        "instructions": body.instructions,
        "previous": body.previous_response_id,
        "references": [[at, item_ids] for at, item_ids in found.references],
        "seals": [[at, *seal] for at, seal in found.seals],
        "num_calls": found.num_calls,
        THOUGHTS: [[at, *seal] for at, seal in found.thoughts],
    }
