"""The tools of a request in Anthropic's form, and their translation to OpenAI's form, which penstock uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.tools import FunctionName, ToolChoice
from penstock.gateway.anthropic.blocks import Nested
from penstock.producer.openai.messages import ToolUse

_WORDS = {"auto": "auto", "any": "required", "none": "none"}
"""Types of Anthropic's `tool_choice` to OpenAI's words."""
_MAX_SHOWN_CHARS = 64
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
