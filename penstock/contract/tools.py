"""Tools of a chat: the offered functions, calls made in earlier messages, and the calls that the output may contain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, StringConstraints

from penstock.contract.named import Named

_CHOICES = ("auto", "none", "required")
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 18
MAX_CALLS = 128
"""Calls in one message."""
MAX_CALLS_OF_CHAT = 4096
"""Calls in all messages of a chat."""
MAX_CALL_ID_CHARS = 256
MAX_FUNCTION_NAME_CHARS = 256
MAX_ARGUMENTS_CHARS = 1 << 20

CallFormName = Literal["hermes", "llama3_json", "mistral"]
ToolParserName = Literal["none", "hermes", "llama3_json", "mistral"]
ReasoningParserName = Literal["none", "think", "think_open"]
"""`think_open`: the chat template itself opens the reasoning block, so the output begins inside it."""

ToolChoice = str | Mapping[str, Any]
"""`auto`, `none`, `required`, or OpenAI's form of one function: {"type": "function", "function": {"name": …}}."""

CallId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CALL_ID_CHARS)]
FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS)]


def chosen_function(choice: object) -> str | None:
    """Return the function that a `tool_choice` names, or None for a word. Raises ValueError for any other value."""
    if isinstance(choice, str) and choice in _CHOICES:
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice != {"type": "function", "function": {"name": name}}:
        words = ", ".join(_CHOICES)
        raise ValueError(f'must be {words} or {{"type": "function", "function": {{"name": …}}}}')
    return name


def json_of(text: str) -> Any:
    """Parse JSON. Raises ValueError also for NaN, infinity, lone surrogates and too deep nesting."""
    try:
        value = json.loads(text, parse_constant=_not_json)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("text must be valid Unicode, without lone surrogates") from None
    return value


def count_calls(messages: Any) -> int:
    """Return the number of tool calls in all messages of a chat that is not validated yet."""
    given = messages if isinstance(messages, list | tuple) else ()
    calls = [one.get("tool_calls") if isinstance(one, dict) else getattr(one, "tool_calls", None) for one in given]
    return sum(len(of_message) for of_message in calls if isinstance(of_message, list | tuple))


def few_calls(messages: Any) -> Any:
    """Return `messages` unchanged. Raises ValueError for too many tool calls, before any of them is validated."""
    num_calls = count_calls(messages)
    if num_calls > MAX_CALLS_OF_CHAT:
        raise ValueError(f"the messages have {num_calls} tool calls together; the limit is {MAX_CALLS_OF_CHAT}")
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
"""OpenAI's list of tools as JSON text."""
Arguments = Annotated[str, StringConstraints(max_length=MAX_ARGUMENTS_CHARS), AfterValidator(_object)]


TEXT_ARGUMENT = "input"
"""The only argument of a function that stands for a tool with a text as its input."""
GRAMMAR_KEYWORD = "x-grammar"
"""The keyword in that argument's schema with the grammar of the text. A node enforces it."""


def text_parameters(grammar: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the parameters of a function that takes a text. grammar: its syntax, lark or regex, and its definition."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        text[GRAMMAR_KEYWORD] = {"syntax": grammar[0], "definition": grammar[1]}
    closed = {"required": [TEXT_ARGUMENT], "additionalProperties": False}
    return {"type": "object", "properties": {TEXT_ARGUMENT: text}, **closed}


def text_grammar_of(parameters: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the grammar in the parameters of a function that takes a text, or None. See `text_parameters`."""
    properties = parameters.get("properties")
    text = properties.get(TEXT_ARGUMENT) if isinstance(properties, dict) and len(properties) == 1 else None
    given = text.get(GRAMMAR_KEYWORD) if isinstance(text, dict) else None
    if not isinstance(given, dict) or given.get("syntax") not in ("lark", "regex"):
        return None
    return given["syntax"], str(given.get("definition"))


class ToolCall(Named):
    """A call that the assistant made in an earlier message; `arguments` is the text of a JSON object."""

    id: CallId
    name: FunctionName
    arguments: Arguments


class WantedFunction(Named):
    """A function that the output may call; `parameters` is the JSON schema, as text, that constrains its arguments."""

    name: FunctionName
    parameters: Annotated[str, StringConstraints(max_length=MAX_TOOLS_CHARS), AfterValidator(_object)]


class WantedCalls(Named):
    """The tool calls that the output may contain, and how the model writes them.

    With `required`, the output after the reasoning consists of one or more calls. Otherwise it may also contain plain
    text, but any text that begins like a call must be a valid call. With `answer`, a JSON schema as text, the output is
    either calls alone or a JSON value of that schema.
    """

    form: CallFormName
    reasoning: ReasoningParserName = "none"
    functions: Annotated[tuple[WantedFunction, ...], FailFast()] = Field(min_length=1, max_length=MAX_TOOLS)
    required: bool = True
    answer: Annotated[str, StringConstraints(max_length=MAX_TOOLS_CHARS), AfterValidator(_object)] | None = None
    parallel: bool = True
    """Whether the output may contain more than one call, up to MAX_CALLS."""
