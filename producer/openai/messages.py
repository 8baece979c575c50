"""Schemas of a chat's messages, of the tools that it offers, and of earlier tool calls. Unknown names are ignored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.contract.fields import OpenWire, only
from penstock.contract.prompt import MAX_PARTICIPANT_NAME_CHARS
from penstock.contract.tools import (
    MAX_CALLS,
    MAX_CALLS_OF_CHAT,
    Arguments,
    CallId,
    FunctionName,
    chosen_function,
    count_calls,
)

_TEXT_OF_PART = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part → the member that holds its text."""
_REASONING_PARTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""Content parts that are not passed to the model. Its reasoning comes in `reasoning_content` beside the content."""
_MAX_SHOWN_CHARS = 32


def placeholder_of(kind: str) -> str:
    """Return the text that stands for a part of a tool's result that is no text. `kind` is the part's type."""
    shown = kind.removeprefix("input_").removesuffix("_url")[:_MAX_SHOWN_CHARS]
    return f"[{shown} left out: this model reads only text]"


def _text_of(content: object, info: ValidationInfo) -> object:
    # A user can send a message again without its image. A tool's result stays in the history of every later turn.
    of_tool = info.data.get("role") == "tool"
    return "".join(_text_of_part(part, of_tool=of_tool) for part in content) if isinstance(content, list) else content


def _text_of_part(part: object, *, of_tool: bool) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError("part_type", "each part must be an object with a type")
    if kind in _REASONING_PARTS:
        return ""
    if kind not in _TEXT_OF_PART and of_tool:
        return placeholder_of(kind)
    if kind not in _TEXT_OF_PART:
        message = "parts of type {kind} are not supported; only text is"
        raise PydanticCustomError("unsupported_value", message, {"kind": kind[:_MAX_SHOWN_CHARS]})
    text = part.get(_TEXT_OF_PART[kind])
    if not isinstance(text, str):
        raise PydanticCustomError("part_text", "the text of a part must be a string")
    return text


def named_calls(value: object) -> object:
    """Refuse a conversation with too many tool calls, before pydantic validates each; give each call an id.

    Some clients send calls and results without ids, or with null or "". Such a call gets an id of its place, and a
    result without one answers the first earlier call that has no result.
    """
    if count_calls(value) > MAX_CALLS_OF_CHAT:
        message = "must have at most {limit} tool calls in all messages together"
        raise PydanticCustomError("too_many", message, {"limit": MAX_CALLS_OF_CHAT})
    if not isinstance(value, list) or not any(_lacks_an_id(message) for message in value):
        return value
    unanswered = list[object]()
    return [_named(message, number, unanswered) for number, message in enumerate(value)]


def _calls_of(message: object) -> list[Any]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return calls if isinstance(calls, list) else []


def _is_nothing(call_id: object) -> bool:
    return call_id is None or call_id == ""


def _lacks_an_id(message: object) -> bool:
    if isinstance(message, dict) and message.get("role") == "tool":
        return _is_nothing(message.get("tool_call_id"))
    return any(isinstance(call, dict) and _is_nothing(call.get("id")) for call in _calls_of(message))


def _named(message: object, number: int, unanswered: list[object]) -> object:
    """Return a message whose calls have ids. `unanswered` has the ids of calls without a result; it is changed."""
    if not isinstance(message, dict):
        return message
    if message.get("role") == "tool":
        call_id = message.get("tool_call_id")
        if _is_nothing(call_id) and unanswered:
            return {**message, "tool_call_id": unanswered.pop(0)}
        if call_id in unanswered:
            unanswered.remove(call_id)
        return message
    calls = [
        {**call, "id": f"call_{number}_{i}"} if isinstance(call, dict) and _is_nothing(call.get("id")) else call
        for i, call in enumerate(_calls_of(message))
    ]
    unanswered += [call.get("id") for call in calls if isinstance(call, dict)]
    return {**message, "tool_calls": calls} if calls else message


def given_arguments(value: object) -> object:
    """Return a call's earlier arguments as text. Some servers write an object (Ollama), or "" and null for none."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return "{}" if value is None or (isinstance(value, str) and not value.strip()) else value


def text_or_none(value: object) -> object:
    """Return a text; None for anything else."""
    # Other servers and libraries have objects in members of this name.
    return value if isinstance(value, str) else None


def _function_type(value: object) -> object:
    return "function" if value is None else value


def _no_empty_name(value: object) -> object:
    return value or None


_FunctionType = Annotated[Literal["function"], BeforeValidator(_function_type)]


class _CalledFunction(OpenWire):
    name: FunctionName
    arguments: Annotated[Arguments, BeforeValidator(given_arguments)] = "{}"


class AskedCall(OpenWire):
    """A tool call in OpenAI's form, which a client copies from an answer into the next request."""

    id: CallId
    type: _FunctionType = "function"
    function: _CalledFunction

    def call(self) -> dict[str, str]:
        """Return the fields of a penstock `ToolCall`."""
        return {"id": self.id, "name": self.function.name, "arguments": self.function.arguments}


class _OfferedFunction(OpenWire):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether calls must match `parameters` even if the model may also answer without a call."""


class OfferedTool(OpenWire):
    """A function that the assistant may call."""

    type: Literal["function"]
    function: _OfferedFunction

    def offer(self) -> dict[str, Any]:
        """Return the tool as a dictionary without unset fields.

        This avoids pydantic's `model_dump`, which would visit every value in `parameters` again.
        """
        function = {name: value for name, value in self.function if value is not None}
        return {"type": self.type, "function": function}


def offers_of(tools: Sequence[OfferedTool] | None) -> list[dict[str, Any]]:
    """Return the tools of a body as dictionaries, none for None."""
    return [tool.offer() for tool in tools or ()]


def _valid_choice(value: object) -> object:
    if value is not None:
        chosen_function(value)
    return value


GivenToolChoice = Annotated[Any, AfterValidator(_valid_choice)]
"""A valid `tool_choice`, or None. Only the submission checks that the tools have the function."""


class ChatMessage(OpenWire):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    name: Annotated[
        Annotated[str, StringConstraints(max_length=MAX_PARTICIPANT_NAME_CHARS)] | None, BeforeValidator(_no_empty_name)
    ] = None
    """The participant's name. A chat template may use it."""
    reasoning_content: Annotated[str | None, BeforeValidator(text_or_none)] = None
    """What the assistant thought before the content. A chat template that takes earlier reasoning gets it."""
    reasoning: Annotated[str | None, BeforeValidator(text_or_none)] = None
    """The same, as newer servers name it."""
    refusal: str | None = None
    """The content of an assistant's message that has no other."""
    audio: Annotated[Any, only(None)] = None
    function_call: Annotated[Any, only(None)] = None
    tool_calls: Annotated[list[AskedCall] | None, FailFast(), Field(max_length=MAX_CALLS)] = None
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def _goes_with_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content is required; only an assistant's message may lack it")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("unsupported_value", "tool_calls are allowed only with role assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError(
                "unsupported_value", "tool_call_id is required with role tool and only allowed there"
            )
        return self

    def message(self) -> dict[str, Any]:
        """Return the fields of a penstock `Message`."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or self.refusal or ""}
        if self.role == "assistant" and (reasoning := self.reasoning_content or self.reasoning):
            message["reasoning"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.call() for call in self.tool_calls]
        if self.name is not None:
            message["name"] = self.name
        return message if self.tool_call_id is None else {**message, "tool_call_id": self.tool_call_id}
