"""Tools that a chat offers, calls that were made or are wanted of them, and the forms in which models write calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, StringConstraints

from penstock.contract.named import Named

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 18
MAX_CALLS = 128
"""Calls in one turn."""
MAX_CALLS_OF_CHAT = 4096
"""Calls in all turns of a chat."""
MAX_CALL_ID_CHARS = 256
MAX_FUNCTION_NAME_CHARS = 256
MAX_ARGUMENTS_CHARS = 1 << 20

CallFormName = Literal["hermes", "llama3_json", "mistral"]
ToolParserName = Literal["none", "hermes", "llama3_json", "mistral"]
ReasoningParserName = Literal["none", "think", "think_open"]
"""think_open: the chat template itself opens the reasoning, so that a text begins inside it."""

ToolChoice = str | Mapping[str, Any]
"""`auto`, `none`, `required`, or a function as OpenAI names it: {"type": "function", "function": {"name": …}}."""

CallId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CALL_ID_CHARS)]
FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS)]


def json_of(text: str) -> Any:
    """A JSON value that JSON can write again, and as UTF-8; raises ValueError."""
    try:
        value = json.loads(text, parse_constant=_not_json)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("text must be valid Unicode, without lone surrogates") from None
    return value


def count_calls(messages: Any) -> int:
    """Count the tool calls in all turns of a chat that is not checked yet."""
    turns = messages if isinstance(messages, list | tuple) else ()
    calls = [turn.get("tool_calls") if isinstance(turn, dict) else getattr(turn, "tool_calls", None) for turn in turns]
    return sum(len(one) for one in calls if isinstance(one, list | tuple))


def few_calls(messages: Any) -> Any:
    """A chat's turns as they were given. Raises ValueError for too many calls, before looking at any of them."""
    num_calls = count_calls(messages)
    if num_calls > MAX_CALLS_OF_CHAT:
        raise ValueError(f"the turns have {num_calls} tool calls together; the limit is {MAX_CALLS_OF_CHAT}")
    return messages


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(text: str) -> str:
    if not isinstance(json_of(text), dict):
        raise ValueError("must be the text of a JSON object")
    return text


def _as_text(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value)


def _offers(text: str) -> str:
    tools = json_of(text)
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise ValueError(f"must be a list of 1 to {MAX_TOOLS} tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError('each tool must be {"type": "function", "function": {"name": …}}')
    return text


Tools = Annotated[
    str, BeforeValidator(_as_text), StringConstraints(max_length=MAX_TOOLS_CHARS), AfterValidator(_offers)
]
"""OpenAI's list of tools, kept as JSON text."""
Arguments = Annotated[str, StringConstraints(max_length=MAX_ARGUMENTS_CHARS), AfterValidator(_object)]


class ToolCall(Named):
    """A call that an assistant made in an earlier turn; `arguments` is the text of a JSON object."""

    id: CallId
    name: FunctionName
    arguments: Arguments


class WantedFunction(Named):
    """A function that may be called; `parameters` is the text of the JSON schema that its arguments are kept to."""

    name: FunctionName
    parameters: Annotated[str, StringConstraints(max_length=MAX_TOOLS_CHARS), AfterValidator(_object)]


class WantedCalls(Named):
    """A text with calls of these functions: `required`, nothing but calls behind the reasoning, at least one.

    Otherwise there may be other text too, or nothing else; what begins as a call is one. With an `answer`, the text of
    a JSON schema, it is calls alone or a JSON value of that schema.
    """

    form: CallFormName
    reasoning: ReasoningParserName = "none"
    functions: Annotated[tuple[WantedFunction, ...], FailFast()] = Field(min_length=1, max_length=MAX_TOOLS)
    required: bool = True
    answer: Annotated[str, StringConstraints(max_length=MAX_TOOLS_CHARS), AfterValidator(_object)] | None = None
    parallel: bool = True
    """More than one call, up to MAX_CALLS."""
