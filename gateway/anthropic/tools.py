"""The tools of a request in Anthropic's form, and their translation to OpenAI's form, which penstock uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.tools import FunctionName, ToolChoice
from penstock.gateway.anthropic.blocks import Nested
from penstock.producer.openai.messages import ToolUse

_WORDS = {"auto": "auto", "any": "required", "none": "none"}
"""Types of Anthropic's `tool_choice` to OpenAI's words."""
_MAX_SHOWN_CHARS = 64


def _custom(kind: str | None) -> str | None:
    if kind not in (None, "custom"):
        message = "tools of type {type} are not supported; only custom tools, which the client runs itself, are"
        raise PydanticCustomError("unsupported_value", message, {"type": json.dumps(str(kind)[:_MAX_SHOWN_CHARS])})
    return kind


class OfferedTool(Nested):
    """A function that the assistant may call."""

    type: Annotated[str | None, AfterValidator(_custom)] = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Whether calls must match `input_schema` even if the model may also answer without a call."""

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


def tool_use_of(tools: Sequence[OfferedTool], wanted: WantedToolChoice | None) -> ToolUse:
    """Return the tools that the assistant may or must call."""
    choice = "auto" if wanted is None else wanted.choice()
    parallel = wanted is None or not wanted.disable_parallel_tool_use
    if not tools or choice == "none":
        return ToolUse(None, choice, parallel)
    return ToolUse(json.dumps([tool.offer() for tool in tools]), choice, parallel)
