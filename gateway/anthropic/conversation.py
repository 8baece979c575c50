"""The messages of a conversation in Anthropic's form, and their translation to penstock's messages.

Anthropic's user message may hold tool results beside text. penstock has one message with role `tool` for each result.
Earlier reasoning is not passed to the model. System messages at the start belong to the system prompt. Coding agents
also send later ones, which many chat templates refuse, so these become marked texts of the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from penstock.gateway.anthropic.blocks import ContentBlock, Nested, as_blocks, is_of_server

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
