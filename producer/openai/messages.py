"""The turns of a chat as a body carries them, the tools that it offers, and the calls that were made."""

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
            raise PydanticCustomError("unsupported_value", "only parts of type text, with nothing else, are supported")
        if not isinstance(part["text"], str):
            raise PydanticCustomError("string_type", "text of a part must be a string")
        texts.append(part["text"])
    return "".join(texts)


def few_calls(value: object) -> object:
    """Count a conversation's calls before any of them is looked at."""
    if count_calls(value) > MAX_CALLS_OF_CHAT:
        said = "must have at most {limit} tool calls in all turns together"
        raise PydanticCustomError("too_long", said, {"limit": MAX_CALLS_OF_CHAT})
    return value


class _CalledFunction(Wire):
    name: FunctionName
    arguments: Arguments


class AskedCall(Wire):
    """A call as an answer carries it."""

    id: CallId
    type: Literal["function"]
    function: _CalledFunction

    def call(self) -> dict[str, str]:
        """The same as our own `ToolCall` has it."""
        return {"id": self.id, "name": self.function.name, "arguments": self.function.arguments}


class _OfferedFunction(Wire):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Calls keep to `parameters` even where the model is free to call or not."""


class OfferedTool(Wire):
    """A function that the assistant may call."""

    type: Literal["function"]
    function: _OfferedFunction

    def offer(self) -> dict[str, Any]:
        """The same without what was not said. pydantic would look at every value of `parameters` once more."""
        function = {name: value for name, value in self.function if value is not None}
        return {"type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat says of tools: those that are shown to the model, as JSON text, and what it is to do with them."""

    tools: str | None = None
    choice: ToolChoice = "auto"
    parallel: bool = True

    @property
    def is_named(self) -> bool:
        """Whether the caller says which function is called."""
        return not isinstance(self.choice, str)


NO_TOOLS = ToolUse()


class ChatMessage(Wire):
    """One turn. The fields below `content` are what a client sends back when it returns an answer as it came."""

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
    """Accepted and not told to the model: what it thought of an earlier turn is of no use in the next."""

    @model_validator(mode="after")
    def _goes_with_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "content must be given; only a turn with tool_calls may do without")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("unsupported_value", "tool_calls go with role assistant only")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError("unsupported_value", "tool_call_id goes with role tool, which needs it")
        return self

    def turn(self) -> dict[str, Any]:
        """The same as our own `Message` has it."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.tool_calls:
            turn["tool_calls"] = [call.call() for call in self.tool_calls]
        return turn if self.tool_call_id is None else {**turn, "tool_call_id": self.tool_call_id}
