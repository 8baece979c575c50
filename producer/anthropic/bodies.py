"""The fields of Anthropic's bodies, shared by HTTP and message batches, and their translation to penstock's messages.

An unknown field is refused by name. Unknown members inside a field are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.fields import (
    MESSAGES,
    NO_EFFECT,
    Hint,
    Wire,
    at_most,
    given_options,
    only,
    renamed_options,
    with_option_fields,
)
from penstock.contract.job import MAX_MESSAGES, MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS, Metadata
from penstock.contract.problems import MAX_NAME_CHARS
from penstock.contract.sampling import MAX_TOKENS_LIMIT, SamplingParams
from penstock.contract.tools import CONTINUES, MAX_TOOLS, THINKING_VARIABLES, FunctionName, ToolChoice, ToolUse, closed
from penstock.producer.anthropic.conversation import (
    _MAX_SHOWN_CHARS,
    ConversationMessage,
    Nested,
    ends_with_assistant,
    messages_of,
    seals_of,
    system_text,
    tool_changes,
)
from penstock.producer.openai.seals import THOUGHTS

# The tools of a request in Anthropic's shape, and their translation to OpenAI's, which penstock uses.

_WORDS = {"auto": "auto", "any": "required", "none": "none"}
"""Types of Anthropic's `tool_choice` to OpenAI's words."""
_SEARCHES = "tool_search_tool_"
"""The start of the types of Anthropic's own search for deferred tools."""

_KNOWN_TO_CLAUDE = ("bash_", "computer_", "memory_", "text_editor_")
"""Types of tools that the client runs, but whose schema only Anthropic's models know."""


class MessagesTool(Nested):
    """A function that the assistant may call, or a tool that runs at Anthropic, which is not offered to the model."""

    type: str | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether calls must match `input_schema` even if the model may also answer without a call."""
    defer_loading: bool | None = None
    """Whether the tool is offered only once the conversation refers to it."""

    @model_validator(mode="after")
    def _can_be_offered(self) -> Self:
        if self.type is not None and self.type.startswith(_KNOWN_TO_CLAUDE):
            message = "tools of type {type} are not supported, because the model does not know their schema; send it "
            message += "as a custom tool"
            raise PydanticCustomError("unsupported_value", message, {"type": json.dumps(self.type[:_MAX_SHOWN_CHARS])})
        for name in ("name", "input_schema"):
            if self.is_custom and getattr(self, name) is None:
                raise PydanticCustomError("tool_incomplete", "{name} is required in a custom tool", {"name": name})
        return self

    @property
    def is_custom(self) -> bool:
        """Whether the client runs the tool. Tools of all other types run at Anthropic."""
        return self.type in (None, "custom")

    def offer(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, without unset members."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function |= {"parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


class WantedToolChoice(Nested):
    """Which tools the assistant may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_goes_with_type(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            message = "name is required with type tool and allowed only there"
            raise PydanticCustomError("unsupported_value", message)
        return self

    def choice(self) -> ToolChoice:
        """Return the value of OpenAI's `tool_choice`."""
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return _WORDS[self.type]


def tool_use_of(tools: Sequence[MessagesTool], wanted: WantedToolChoice | None, changes: Mapping[str, bool]) -> ToolUse:
    """Return the tools that the assistant may or must call. `changes` says which ones the conversation has."""
    choice = "auto" if wanted is None else wanted.choice()
    parallel = wanted is None or not wanted.disable_parallel_tool_use
    # Nothing here runs Anthropic's search, so the model would never get the tools that it defers.
    none_deferred = any((tool.type or "").startswith(_SEARCHES) for tool in tools)
    needed = None if wanted is None else wanted.name
    offers = [
        tool.offer()
        for tool in tools
        if tool.is_custom
        and (tool.name == needed or changes.get(str(tool.name), none_deferred or not tool.defer_loading))
    ]
    return ToolUse.of(offers, choice, parallel)


MAX_DEFERRED_TOOLS = 4096
"""Tools of a body together with those that it defers."""


def _few_offered(tools: list[MessagesTool] | None) -> list[MessagesTool] | None:
    """Return the tools unchanged. Raises if too many of them are offered at once: deferred ones count for nothing."""
    if sum(not tool.defer_loading for tool in tools or ()) > MAX_TOOLS:
        raise PydanticCustomError("too_many", "must have at most {max} tools that are not deferred", {"max": MAX_TOOLS})
    return tools


def dropped_tools(tools: Sequence[MessagesTool]) -> list[str]:
    """Return the names under which the answer lists the tools that were not offered to the model."""
    return [f"tools.{tool.type}" for tool in tools if not tool.is_custom]


# The bodies.

SHOWS_THINKING = "shows_thinking"
"""The option of an answer whose reasoning is returned as thinking blocks."""
MAX_EDITS = 64
"""Most context edits of one request."""
_APPLIED = "clear_thinking"
"""The start of the context edits that have no effect and need none: chat templates leave out what they do not need."""


class Thinking(Nested):
    """Whether the model reasons, whether the answer has thinking blocks, and after how many tokens they end."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_shown(self) -> bool:
        """Whether the answer has thinking blocks."""
        return self.type != "disabled" and self.display != "omitted"


class _OutputFormat(Nested):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Nested):
    """The form of the answer, and the effort of the reasoning, which the chat template gets."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _OutputFormat | None = None


class _ContextEdit(Nested):
    type: Annotated[str, Field(max_length=MAX_NAME_CHARS)]

    @property
    def is_applied(self) -> bool:
        return self.type.startswith(_APPLIED)


class ContextManagement(Nested):
    """Edits of the conversation. Those that penstock cannot make are ignored, because they only save tokens."""

    edits: Annotated[list[_ContextEdit] | None, FailFast(), Field(max_length=MAX_EDITS)] = None

    def ignored(self) -> list[str]:
        """Return the names under which the answer lists the ignored edits."""
        return [f"context_management.edits.{edit.type}" for edit in self.edits or () if not edit.is_applied]


class ConversationBody(Wire):
    """The fields that determine the prompt."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    messages: Annotated[list[ConversationMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[str | None, BeforeValidator(system_text)] = None
    tools: Annotated[
        list[MessagesTool] | None, FailFast(), Field(max_length=MAX_DEFERRED_TOOLS), AfterValidator(_few_offered)
    ] = None
    tool_choice: WantedToolChoice | None = None
    thinking: Thinking | None = None
    cache_salt: str | None = None

    cache_control: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    context_management: Annotated[ContextManagement | None, NO_EFFECT] = None
    mcp_servers: Annotated[Any, only(None, [])] = None
    thread: Annotated[Any, only(None)] = None
    speed: Annotated[Any, only(None, "standard")] = None
    user_profile_id: Hint = None
    workspace_id: Hint = None

    @property
    def dropped(self) -> list[str]:
        """The names of the tools, edits, blocks and members of messages that have no effect."""
        edits = [] if self.context_management is None else self.context_management.ignored()
        blocks = [name for message in self.messages for name in message.ignored]
        return [*dict.fromkeys(edits + dropped_tools(self.tools or []) + blocks)]

    @property
    def template_kwargs(self) -> str | None:
        """The variables for the chat template as JSON text, or None.

        They say whether the model reasons, if the body says so, and whether the answer continues the last turn.
        """
        given: dict[str, bool] = {}
        if self.thinking is not None:
            given = dict.fromkeys(THINKING_VARIABLES, self.thinking.type != "disabled")
        if ends_with_assistant(self.messages):
            given[CONTINUES] = True
        return json.dumps(given) if given else None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt, which it never does."""
        return False

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "messages", **renamed_options(SamplingParams, MESSAGES)}

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return a list with the conversation, which is the request's only prompt."""
        messages = messages_of(self.system, self.messages)
        seals_of(messages)
        return [messages]

    def tool_use(self) -> ToolUse:
        """Return the tools that the assistant may or must call, which are part of the prompt."""
        return tool_use_of(self.tools or [], self.tool_choice, tool_changes(self.messages))


if TYPE_CHECKING:
    _SampledConversation = ConversationBody
else:
    _SampledConversation = with_option_fields(ConversationBody, MESSAGES, SamplingParams)


def _short_texts(metadata: Any) -> Any:
    """Return the members that a job can keep. Anthropic knows `user_id` alone, but callers send others as well."""
    if not isinstance(metadata, dict):
        return metadata
    return {
        name: value
        for name, value in metadata.items()
        if isinstance(value, str) and len(value) <= MAX_METADATA_VALUE_CHARS and 0 < len(name) <= MAX_METADATA_KEY_CHARS
    }


class MessageBody(_SampledConversation):
    """The fields of a `/v1/messages` body that determine its answer."""

    max_tokens: int
    stream: bool | None = None
    output_config: OutputConfig | None = None
    # The name that `output_config.format` had in the beta of structured outputs.
    output_format: _OutputFormat | None = None

    metadata: Annotated[Metadata | None, at_most(MAX_METADATA), BeforeValidator(_short_texts)] = None
    diagnostics: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    service_tier: Annotated[Any, only(None, "auto", "standard_only")] = None
    container: Annotated[Any, only(None)] = None
    inference_geo: Annotated[Any, only(None)] = None

    @field_validator("output_format")
    @classmethod
    def _one_format(cls, value: _OutputFormat | None, info: ValidationInfo) -> _OutputFormat | None:
        config = info.data.get("output_config")
        if value is not None and config is not None and config.format is not None:
            message = "conflicts with output_config.format, its newer name; send one of them"
            raise PydanticCustomError("unsupported_value", message)
        return value

    @property
    def template_kwargs(self) -> str | None:
        """The variables for the chat template as JSON text, or None: those of the conversation, and the effort."""
        given = json.loads(super().template_kwargs or "{}")
        is_off = self.thinking is not None and self.thinking.type == "disabled"
        if self.output_config is not None and self.output_config.effort is not None and not is_off:
            given["reasoning_effort"] = self.output_config.effort
        return json.dumps(given) if given else None

    def params(self) -> SamplingParams:
        """Return the sampling options. Raises pydantic's ValidationError.

        The text keeps its stop string, because only its end tells which one matched. The answer does not show it.
        """
        given = given_options(self, SamplingParams, MESSAGES)
        if self.thinking is not None and self.thinking.type != "disabled" and self.thinking.budget_tokens is not None:
            given["reasoning_budget"] = self.thinking.budget_tokens
        if given.get("stop"):
            given["include_stop_str_in_output"] = True
        wanted = self.output_format or (self.output_config.format if self.output_config is not None else None)
        if wanted is not None:
            given["structured_outputs"] = {"json_schema": closed(wanted.schema_)}
        return SamplingParams(**given)

    def options(self) -> dict[str, Any]:
        """Return the options of the answer that no other API has."""
        shown = {SHOWS_THINKING: self.thinking is not None and self.thinking.is_shown}
        if not any(block.seal() for message in self.messages for block in message.content):
            return shown
        return shown | {THOUGHTS: seals_of(messages_of(self.system, self.messages))}
