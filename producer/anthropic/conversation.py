"""The messages of a conversation in Anthropic's shape, and their translation to penstock's messages.

Anthropic's user message may hold tool results beside text. penstock has one message with role `tool` for each result.
Earlier reasoning is passed to a chat template that takes it, if this service signed it. System messages at the start
belong to the system prompt. Coding agents also send later ones, which many chat templates refuse, so these become
marked texts of the user. Block types that penstock cannot serve are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from penstock.contract.tools import CallId, FunctionName
from penstock.producer.openai.messages import placeholder_of, text_or_none
from penstock.producer.openai.seals import Seal, signed

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
_SEALS = "seals"
"""The member of an unfinished message with the seals of its reasoning."""
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


def _given_input(value: object) -> object:
    # Proxies pass on the arguments of OpenAI's calls, which are text, and those of a call without any as "" or null.
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            return from_json(value)
        except ValueError:
            return value
    return value


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
    input: Annotated[dict[str, Any] | None, BeforeValidator(_given_input)] = None
    thinking: Annotated[str | None, BeforeValidator(text_or_none)] = None
    signature: Annotated[str | None, BeforeValidator(text_or_none)] = None
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

    @property
    def is_foreign(self) -> bool:
        """Whether it is reasoning that certainly another server wrote."""
        return self.type == "redacted_thinking" or (self.type == "thinking" and self.seal() is None)

    def seal(self) -> Seal | None:
        """Return the seal of earlier reasoning, not checked yet; None if this service certainly did not sign it."""
        if self.type != "thinking" or not self.thinking:
            return None
        try:
            return signed("reasoning", self.thinking, self.signature or "")
        except ValueError:
            return None

    def call(self) -> dict[str, Any]:
        """Return a `tool_use` block as the fields of a penstock `ToolCall`."""
        return {"id": self.id, "name": self.name, "arguments": json.dumps(self.input)}


MAX_BLOCKS = 4096
"""Most blocks of one message."""
_TYPES_OF_ROLE = {
    "user": frozenset(("text", "tool_result")),
    "assistant": frozenset(("text", "tool_use", "thinking", "redacted_thinking")),
    "system": frozenset(("text", "tool_addition", "tool_removal")),
}


class ConversationMessage(Nested):
    """One message of a conversation.

    A system message may have an `output_config` in place of a content. With `clear_at: next_user_message`, the model
    gets its text only until the next message of the user.
    """

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], FailFast(), Field(max_length=MAX_BLOCKS), BeforeValidator(as_blocks)]
    output_config: dict[str, Any] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _may_only_configure(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "system" and data.get("output_config"):
            return {"content": [], **data}
        return data

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
        """The names under which the answer lists the blocks that have no effect, and `output_config`.

        These are blocks about tools that a server ran, and reasoning that this service did not sign.
        """
        blocks = [f"messages.{block.type}" for block in self.content if is_of_server(block.type) or block.is_foreign]
        return blocks + [f"messages.output_config.{name}" for name in self.output_config or ()]

    def _reasoning(self) -> dict[str, Any]:
        """Return the member of a message with the reasoning that has a seal, and the seals."""
        found = [(block.thinking, seal) for block in self.content if (seal := block.seal()) is not None]
        if not found:
            return {}
        return {"reasoning": "\n".join(text or "" for text, _ in found), _SEALS: [seal for _, seal in found]}

    @property
    def text(self) -> str:
        """The text of all its text blocks."""
        # The text blocks of an answer are pieces of one text, so no separator is added.
        between = "" if self.role == "assistant" else "\n"
        return between.join(block.text or "" for block in self.content if block.type == "text")

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the message as penstock's messages, except that a user's `content` is a list of texts."""
        if self.role == "assistant":
            calls = [block.call() for block in self.content if block.type == "tool_use"]
            message = {"role": "assistant", "content": self.text, **self._reasoning()}
            yield {**message, "tool_calls": calls} if calls else message
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


def tool_changes(conversation: Sequence[ConversationMessage]) -> dict[str, bool]:
    """Return the tools that the conversation adds or removes, and whether each is there at its end."""
    changes: dict[str, bool] = {}
    for block in (block for message in conversation for block in message.content):
        changes |= dict.fromkeys(block.references, True)
        if block.tool is not None:
            changes[block.tool.name] = block.type == "tool_addition"
    return changes


def ends_with_assistant(conversation: Sequence[ConversationMessage]) -> bool:
    """Return whether the last turn is one of the assistant. The answer then continues its text, as in Anthropic's API.

    A system message that only configures comes after no turn.
    """
    shown = (message for message in reversed(conversation) if message.role != "system" or message.text)
    return next(shown, conversation[-1]).role == "assistant"


def _without_cleared(conversation: Sequence[ConversationMessage]) -> list[ConversationMessage]:
    """Leave out the system messages that the next message of the user clears."""
    last_of_user = max((at for at, message in enumerate(conversation) if message.role == "user"), default=-1)
    return [
        message
        for at, message in enumerate(conversation)
        if at > last_of_user or message.role != "system" or message.clear_at != "next_user_message"
    ]


def _join_turns(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    """Add a turn of the assistant to the one before it."""
    earlier["content"] = "\n".join(text for text in (earlier["content"], later["content"]) if text)
    if reasoning := [one["reasoning"] for one in (earlier, later) if one.get("reasoning")]:
        earlier["reasoning"] = "\n".join(reasoning)
        earlier[_SEALS] = [*earlier.get(_SEALS, ()), *later.get(_SEALS, ())]
    if calls := [*earlier.get("tool_calls", ()), *later.get("tool_calls", ())]:
        earlier["tool_calls"] = calls


def messages_of(system: str | None, conversation: Sequence[ConversationMessage]) -> list[dict[str, Any]]:
    """Return penstock's messages. Consecutive texts of the user become one message, as in Anthropic's API.

    So do consecutive turns of the assistant. Some chat templates refuse two messages of one role in a row.
    """
    messages: list[dict[str, Any]] = []
    conversation = _without_cleared(conversation)
    leading = [*takewhile(lambda message: message.role == "system", conversation)]
    for message in conversation[len(leading) :]:
        for part in message.parts():
            if messages and part["role"] == messages[-1]["role"] == "user":
                messages[-1]["content"] += part["content"]
            elif messages and part["role"] == messages[-1]["role"] == "assistant":
                _join_turns(messages[-1], part)
            else:
                messages.append(part)
    for one in messages:
        if one["role"] == "user":
            one["content"] = "\n".join(one["content"])
    instructions = "\n".join(text for text in (system, *(message.text for message in leading)) if text)
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def seals_of(messages: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Remove the seals of earlier reasoning from messages. Return the index, the digest and the tag of each."""
    found: list[list[Any]] = []
    for index, message in enumerate(messages):
        found += [[index, *seal] for seal in message.pop(_SEALS, ())]
    return found
