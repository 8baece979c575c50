"""Schemas of the bodies of `/v1/messages` and `/v1/messages/count_tokens`, translated to penstock's messages.

An unknown field is refused by name. Unknown members inside a field are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.contract.job import MAX_MESSAGES, MAX_STOP_STRINGS, MAX_TOKENS_LIMIT, SamplingParams
from penstock.contract.problems import MAX_NAME_CHARS
from penstock.contract.tenant import ClassName
from penstock.contract.tools import MAX_TOOLS, CallId, FunctionName, ToolChoice, closed
from penstock.producer.openai.fields import NO_EFFECT, Hint, Wire, only
from penstock.producer.openai.messages import ToolUse, placeholder_of

# Content blocks of a conversation in Anthropic's form. Block types that penstock cannot serve are refused by name.

_MAX_SHOWN_CHARS = 64
_BILLING = "x-anthropic-billing-header:"
_NEEDED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": (),
    "redacted_thinking": (),
    "tool_addition": ("tool",),
    "tool_removal": ("tool",),
}
"""The members that a block of each type must have."""
_OF_SERVER = frozenset(("server_tool_use", "mcp_tool_use", "mcp_tool_result"))
_RESULT_OF_SERVER = "_tool_result"
"""The end of the types of other results that a server's tool gave, as in `web_search_tool_result`."""


class Nested(BaseModel):
    """Base of the records inside a body. Unknown members are ignored, because clients add new ones often."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


def system_text(content: object) -> object:
    """Return the text of a system prompt without the block that Claude Code sends for Anthropic's billing.

    That block differs from session to session and comes first, so with it no two sessions would share a cached prefix.
    """
    if not isinstance(content, list):
        return content
    return "\n".join(_text_of(block) for block in content if not _is_for_billing(block))


def _is_for_billing(block: object) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(_BILLING)


def result_text(content: object) -> object:
    """Return the text of a tool's result. Parts that are no text become a marked text.

    An agent sends a tool's result again in every later turn, so one screenshot would otherwise end its session.
    """
    return "\n".join(map(_text_of_part, content)) if isinstance(content, list) else content


def referenced_tools(content: object) -> tuple[str, ...]:
    """Return the names of the tools that a tool's result refers to."""
    parts = content if isinstance(content, list) else ()
    references = [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_reference"]
    return tuple(name for part in references if isinstance(name := part.get("tool_name"), str))


def as_blocks(content: object) -> object:
    """Return the content of a message as a list of blocks. A string is one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text_of(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise _unsupported(kind, "only text blocks are supported here")
    text = block.get("text") if isinstance(block, dict) else None
    if not isinstance(text, str):
        raise PydanticCustomError("block_text", "the text of a text block must be a string")
    return text


def _text_of_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind == "text":
        return _text_of(part)
    if kind == "tool_reference" and isinstance(name := part.get("tool_name"), str):
        return name
    if kind == "search_result" and isinstance(content := part.get("content"), list):
        about = [text for name in ("title", "source") if isinstance(text := part.get(name), str)]
        return "\n".join((*about, *map(_text_of_part, content)))
    return placeholder_of(kind)


def is_of_server(kind: str) -> bool:
    """Return whether blocks of this type are calls of tools that a server ran, or their results."""
    return kind in _OF_SERVER or (kind.endswith(_RESULT_OF_SERVER) and kind != "tool_result")


def _known_type(kind: str) -> str:
    if kind not in _NEEDED and not is_of_server(kind):
        raise _unsupported(kind, "supported: text, tool_use, tool_result and thinking")
    return kind


def _unsupported(kind: object, instead: str) -> PydanticCustomError:
    shown = json.dumps(kind[:_MAX_SHOWN_CHARS]) if isinstance(kind, str) else "no name"
    message = "blocks of type {shown} are not supported; {instead}"
    return PydanticCustomError("unsupported_value", message, {"shown": shown, "instead": instead})


class _ChangedTool(Nested):
    type: Literal["tool_reference"]
    name: FunctionName


class ContentBlock(Nested):
    """One block of a message: a text, a tool call, its result, earlier reasoning, or a change of the tools.

    A block about a tool that a server ran is accepted and not passed to the model, as the tool itself is not offered.
    """

    type: Annotated[str, AfterValidator(_known_type)]
    text: str | None = None
    id: CallId | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: Annotated[str | None, BeforeValidator(result_text)] = None
    references: Annotated[tuple[str, ...], BeforeValidator(referenced_tools), Field(validation_alias="content")] = ()
    tool: _ChangedTool | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_type_of_server(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        return {"type": kind} if isinstance(kind, str) and is_of_server(kind) else data

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        for name in _NEEDED.get(self.type, ()):
            if getattr(self, name) is None:
                message = "{name} is required in a block of type {type}"
                raise PydanticCustomError("block_incomplete", message, {"name": name, "type": self.type})
        return self

    def call(self) -> dict[str, Any]:
        """Return a `tool_use` block as the fields of a penstock `ToolCall`."""
        return {"id": self.id, "name": self.name, "arguments": json.dumps(self.input)}


# The tools of a request in Anthropic's form, and their translation to OpenAI's form, which penstock uses.

_WORDS = {"auto": "auto", "any": "required", "none": "none"}
"""Types of Anthropic's `tool_choice` to OpenAI's words."""
_SEARCHES = "tool_search_tool_"
"""The start of the types of Anthropic's own search for deferred tools."""

_KNOWN_TO_CLAUDE = ("bash_", "computer_", "memory_", "text_editor_")
"""Types of tools that the client runs, but whose schema only Anthropic's models know."""


class OfferedTool(Nested):
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


def tool_use_of(tools: Sequence[OfferedTool], wanted: WantedToolChoice | None, changes: Mapping[str, bool]) -> ToolUse:
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
    if not offers or choice == "none":
        return ToolUse(None, choice, parallel)
    return ToolUse(json.dumps(offers), choice, parallel)


def dropped_tools(tools: Sequence[OfferedTool]) -> list[str]:
    """Return the names under which the answer lists the tools that were not offered to the model."""
    return [f"tools.{tool.type}" for tool in tools if not tool.is_custom]


# The messages of a conversation in Anthropic's form, and their translation to penstock's messages.
#
# Anthropic's user message may hold tool results beside text. penstock has one message with role `tool` for each result.
# Earlier reasoning is not passed to the model. System messages at the start belong to the system prompt. Coding agents
# also send later ones, which many chat templates refuse, so these become marked texts of the user.

MAX_BLOCKS = 4096
"""Most blocks of one message."""
_TYPES_OF_ROLE = {
    "user": frozenset(("text", "tool_result")),
    "assistant": frozenset(("text", "tool_use", "thinking", "redacted_thinking")),
    "system": frozenset(("text", "tool_addition", "tool_removal")),
}


class ConversationMessage(Nested):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], FailFast(), Field(max_length=MAX_BLOCKS), BeforeValidator(as_blocks)]

    @model_validator(mode="after")
    def _types_fit_role(self) -> Self:
        for block in self.content:
            is_known = block.type in _TYPES_OF_ROLE[self.role]
            if not is_known and not (self.role == "assistant" and is_of_server(block.type)):
                message = "a message with role {role} must not have blocks of type {type}"
                raise PydanticCustomError("unsupported_value", message, {"role": self.role, "type": block.type})
        return self

    @property
    def ignored(self) -> list[str]:
        """The names under which the answer lists the blocks about tools that a server ran."""
        return [f"messages.{block.type}" for block in self.content if is_of_server(block.type)]

    @property
    def text(self) -> str:
        """The text of all its text blocks."""
        # The text blocks of an answer are pieces of one text, so no separator is added.
        between = "" if self.role == "assistant" else "\n"
        return between.join(block.text or "" for block in self.content if block.type == "text")

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the message as penstock's messages, except that a user's `content` is a list of texts."""
        if self.role == "assistant":
            yield self._of_assistant()
            return
        if self.role == "system":
            if self.text:
                yield {"role": "user", "content": [f"<system>\n{self.text}\n</system>"]}
            return
        texts: list[str] = []
        for block in self.content:
            if block.type == "text":
                texts.append(block.text or "")
                continue
            if texts:
                yield {"role": "user", "content": texts}
                texts = []
            yield {"role": "tool", "content": block.content or "", "tool_call_id": block.tool_use_id}
        if texts:
            yield {"role": "user", "content": texts}

    def _of_assistant(self) -> dict[str, Any]:
        calls = [block.call() for block in self.content if block.type == "tool_use"]
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": calls} if calls else message


def tool_changes(conversation: Sequence[ConversationMessage]) -> dict[str, bool]:
    """Return the tools that the conversation adds or removes, and whether each is there at its end."""
    changes: dict[str, bool] = {}
    for block in (block for message in conversation for block in message.content):
        changes |= dict.fromkeys(block.references, True)
        if block.tool is not None:
            changes[block.tool.name] = block.type == "tool_addition"
    return changes


def messages_of(system: str | None, conversation: Sequence[ConversationMessage]) -> list[dict[str, Any]]:
    """Return penstock's messages. Consecutive texts of the user become one message, as in Anthropic's API.

    Some chat templates refuse two messages of the user in a row.
    """
    messages: list[dict[str, Any]] = []
    leading = [*takewhile(lambda message: message.role == "system", conversation)]
    for message in conversation[len(leading) :]:
        for part in message.parts():
            if messages and part["role"] == messages[-1]["role"] == "user":
                messages[-1]["content"] += part["content"]
            else:
                messages.append(part)
    for one in messages:
        if one["role"] == "user":
            one["content"] = "\n".join(one["content"])
    instructions = "\n".join(text for text in (system, *(message.text for message in leading)) if text)
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


# Schemas of the bodies of `/v1/messages` and `/v1/messages/count_tokens`.
#
# An unknown field is refused by name. Unknown members inside a field are ignored.

MAX_EDITS = 64
"""Most context edits of one request."""
SHOWS_THINKING = "shows_thinking"
"""The option of an answer whose reasoning is returned as thinking blocks."""
_APPLIED = "clear_thinking"
"""The start of the context edits that are always applied: penstock never passes earlier reasoning to the model."""


class Thinking(Nested):
    """Whether the answer has thinking blocks. The model decides how long it reasons; `budget_tokens` has no effect."""

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
    """The form of the answer. `effort` has no effect."""

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


class _ConversationBody(Wire):
    """The fields that determine the prompt."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[ConversationMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[str | None, BeforeValidator(system_text)] = None
    tools: Annotated[list[OfferedTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: WantedToolChoice | None = None
    thinking: Thinking | None = None
    priority: ClassName | None = None
    cache_salt: str | None = None

    cache_control: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    context_management: Annotated[ContextManagement | None, NO_EFFECT] = None
    mcp_servers: Annotated[Any, only(None, [])] = None
    thread: Annotated[Any, only(None)] = None
    speed: Annotated[Any, only(None, "standard")] = None
    user_profile_id: Hint = None
    workspace_id: Hint = None

    @field_validator("messages")
    @classmethod
    def _no_prefill(cls, value: list[ConversationMessage]) -> list[ConversationMessage]:
        if value[-1].role == "assistant":
            message = "the last message must have role user; an answer cannot continue a message of the assistant"
            raise PydanticCustomError("unsupported_value", message)
        return value

    @property
    def dropped(self) -> list[str]:
        """The names of the tools, edits and blocks that have no effect."""
        edits = [] if self.context_management is None else self.context_management.ignored()
        blocks = [name for message in self.messages for name in message.ignored]
        return [*dict.fromkeys(edits + dropped_tools(self.tools or []) + blocks)]

    @property
    def asked_class(self) -> ClassName | None:
        """The class that the body asks for."""
        return self.priority

    @property
    def template_kwargs(self) -> str | None:
        """The variables for the chat template as JSON text, or None: whether the model reasons, if the body says so."""
        if self.thinking is None:
            return None
        thinks = self.thinking.type != "disabled"
        return json.dumps({"enable_thinking": thinks, "thinking": thinks})

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt, which it never does."""
        return False

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "messages", "stop": "stop_sequences", "structured_outputs": "output_config.format"}

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return a list with the conversation, which is the request's only prompt."""
        return [messages_of(self.system, self.messages)]


class MessagesRequest(_ConversationBody):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Annotated[list[str] | None, FailFast(), Field(max_length=MAX_STOP_STRINGS)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    metadata: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    diagnostics: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    service_tier: Annotated[Any, only(None, "auto", "standard_only")] = None
    container: Annotated[Any, only(None)] = None
    inference_geo: Annotated[Any, only(None)] = None

    def tool_use(self) -> ToolUse:
        """Return the tools that the assistant may or must call."""
        return tool_use_of(self.tools or [], self.tool_choice, tool_changes(self.messages))

    def params(self) -> SamplingParams:
        """Return the sampling options. Raises pydantic's ValidationError.

        The text keeps its stop string, because only its end tells which one matched. The answer does not show it.
        """
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given |= {"max_tokens": self.max_tokens, "cache_salt": self.cache_salt}
        if self.stop_sequences:
            given |= {"stop": tuple(self.stop_sequences), "include_stop_str_in_output": True}
        if self.output_config is not None and self.output_config.format is not None:
            given["structured_outputs"] = {"json_schema": closed(self.output_config.format.schema_)}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def options(self) -> dict[str, Any]:
        """Return the options of the answer that no other API has."""
        return {SHOWS_THINKING: self.thinking is not None and self.thinking.is_shown}


class CountTokensRequest(_ConversationBody):
    """Body of `POST /v1/messages/count_tokens`."""

    output_config: Annotated[OutputConfig | None, NO_EFFECT] = None

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream, which it never is."""
        return False

    def tool_use(self) -> ToolUse:
        """Return the tools that the prompt shows. Nothing is generated, so no call is forced or constrained."""
        shown = [tool.model_copy(update={"strict": None}) for tool in self.tools or []]
        wanted = self.tool_choice if self.tool_choice is not None and self.tool_choice.type == "none" else None
        return tool_use_of(shown, wanted, tool_changes(self.messages))

    def params(self) -> SamplingParams:
        """Return the sampling options of a job that ends after its prompt."""
        return SamplingParams(max_tokens=1, temperature=0.0, cache_salt=self.cache_salt)

    def options(self) -> dict[str, Any]:
        """Return that the answer has no options."""
        return {}
