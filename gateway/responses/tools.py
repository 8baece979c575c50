"""Tools and the choice of tools in a response's body, and their translation into those of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from penstock.contract.tools import MAX_TOOLS, FunctionName
from penstock.producer.openai.fields import Wire
from penstock.producer.openai.messages import ToolUse


class FunctionTool(Wire):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether calls must match `parameters` even if the model may also answer without a call."""

    def offer(self) -> dict[str, Any]:
        """Return the tool in the form of a chat, without unset members."""
        members = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        return {"type": "function", "function": {name: value for name, value in members.items() if value is not None}}


def _only_functions(tool: object) -> object:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(tool, dict) and kind != "function":
        message = "tools of type {kind} are not supported; only function tools are"
        raise PydanticCustomError("unsupported_value", message, {"kind": repr(kind)[:64]})
    return tool


AnyTool = Annotated[FunctionTool, BeforeValidator(_only_functions)]


class _NamedTool(Wire):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(Wire):
    """A choice that offers the model only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


def _known_choice(choice: object) -> object:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind not in ("function", "allowed_tools"):
        message = "a choice of type {kind} is not supported; only function and allowed_tools are"
        raise PydanticCustomError("unsupported_value", message, {"kind": repr(kind)[:64]})
    return choice


class NamedChoice(_NamedTool):
    """A choice of one function that the model must call."""


Choice = Annotated[
    Literal["auto", "none", "required"] | Annotated[NamedChoice | AllowedTools, Field(discriminator="type")],
    BeforeValidator(_known_choice),
]


def tool_use_of(tools: Sequence[FunctionTool], choice: Choice | None, *, parallel: bool) -> ToolUse:
    """Return the tools that the model may call, as a chat offers them."""
    if isinstance(choice, AllowedTools):
        allowed = {tool.name for tool in choice.tools}
        tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
    wanted: Any = choice or "auto"
    if isinstance(choice, NamedChoice):
        wanted = {"type": "function", "function": {"name": choice.name}}
    if not tools or wanted == "none":
        return ToolUse(None, wanted, parallel)
    return ToolUse(json.dumps([tool.offer() for tool in tools]), wanted, parallel)


def shown_tools(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """Return the tools as the response shows them."""
    return [{name: getattr(tool, name) for name in FunctionTool.model_fields} for tool in tools]


def shown_choice(choice: Choice | None) -> Any:
    """Return the choice as the response shows it."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump()
