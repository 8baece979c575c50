"""Schemas of a chat's messages, of the tools that it offers, and of earlier tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.tools import (
    MAX_CALLS,
    MAX_CALLS_OF_CHAT,
    Arguments,
    CallId,
    FunctionName,
    ToolChoice,
    count_calls,
)
from penstock.producer.openai.fields import Wire, only


def _text_of(content: object) -> object:
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise PydanticCustomError("unsupported_value", "only parts with exactly type (text) and text are supported")
        if not isinstance(part["text"], str):
            raise PydanticCustomError("string_type", "the text of a part must be a string")
        texts.append(part["text"])
    return "".join(texts)


def few_calls(value: object) -> object:
    """Refuse a conversation with too many tool calls before pydantic validates each of them."""
    if count_calls(value) > MAX_CALLS_OF_CHAT:
        message = "must have at most {limit} tool calls in all messages together"
        raise PydanticCustomError("too_long", message, {"limit": MAX_CALLS_OF_CHAT})
    return value


class _CalledFunction(Wire):
    name: FunctionName
    arguments: Arguments


class AskedCall(Wire):
    """A tool call in OpenAI's form, which a client copies from an answer into the next request."""

    id: CallId
    type: Literal["function"]
    function: _CalledFunction

    def call(self) -> dict[str, str]:
        """Return the fields of a penstock `ToolCall`."""
        return {"id": self.id, "name": self.function.name, "arguments": self.function.arguments}


class _OfferedFunction(Wire):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether calls must match `parameters` even if the model may also answer without a call."""


class OfferedTool(Wire):
    """A function that the assistant may call."""

    type: Literal["function"]
    function: _OfferedFunction

    def offer(self) -> dict[str, Any]:
        """Return the tool as a dictionary without unset fields.

        This avoids pydantic's `model_dump`, which would visit every value in `parameters` again.
        """
        function = {name: value for name, value in self.function if value is not None}
        return {"type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a chat request offers and how the model may use them."""

    tools: str | None = None
    """The offered tools as JSON text, or None."""
    choice: ToolChoice = "auto"
    """OpenAI's `tool_choice`."""
    parallel: bool = True
    """Whether one answer may hold several calls."""

    @property
    def is_named(self) -> bool:
        """Whether the caller chose the function that the model must call."""
        return not isinstance(self.choice, str)


NO_TOOLS = ToolUse()


class ChatMessage(Wire):
    """One message of a chat.

    Most fields after `content` exist because clients send an assistant's answer back unchanged.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    name: Annotated[Any, only(None)] = None
    refusal: Annotated[Any, only(None)] = None
    audio: Annotated[Any, only(None)] = None
    annotations: Annotated[Any, only(None, [])] = None
    function_call: Annotated[Any, only(None)] = None
    tool_calls: Annotated[list[AskedCall] | None, FailFast(), Field(max_length=MAX_CALLS)] = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    """Accepted but not passed to the model, which does not need its reasoning from earlier messages."""

    @model_validator(mode="after")
    def _goes_with_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "content is required unless the message has tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("unsupported_value", "tool_calls are allowed only with role assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError(
                "unsupported_value", "tool_call_id is required with role tool and only allowed there"
            )
        return self

    def message(self) -> dict[str, Any]:
        """Return the fields of a penstock `Message`."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.call() for call in self.tool_calls]
        return message if self.tool_call_id is None else {**message, "tool_call_id": self.tool_call_id}
