"""Tools, and what a request gives to the chat template and to schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, StringConstraints
from pydantic_core import from_json

from penstock.contract.errors import RequestError
from penstock.contract.fields import Named
from penstock.contract.tool_formats import ToolFormat

# Variables that a request sets in the model's chat template, such as `enable_thinking`.

MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_CHARS = 1 << 14
"""Characters of a request's template variables as JSON text."""
CONTINUES = "continue_final_message"
"""Whether the answer continues the last message instead of beginning a new one."""
GENERATION_PROMPT = "add_generation_prompt"
"""Whether the rendered chat ends with the beginning of an assistant message."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which requests turn the reasoning of a model on or off. A template uses one of them, or none."""
_OPPOSITES = {"think": "think_open", "think_open": "think"}
_OF_THE_CHAT = ("messages", "tools", "documents")
"""Variables that the request sets through other fields, or that no request may set."""


def _as_text(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value)


def _variables(text: str) -> str:
    variables = json_of(text)
    if not isinstance(variables, dict):
        raise ValueError("must be an object")
    if len(variables) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"must have at most {MAX_TEMPLATE_KWARGS} members")
    for name in variables:
        if not name.isidentifier():
            raise ValueError("each name must be one that a template can use: letters, digits and underscores")
        if name in _OF_THE_CHAT:
            raise ValueError(f"must not set {name}")
    for name in (CONTINUES, GENERATION_PROMPT):
        if not isinstance(variables.get(name, False), bool):
            raise ValueError(f"{name} must be true or false")
    if variables.get(CONTINUES) and variables.get(GENERATION_PROMPT):
        raise ValueError(f"{CONTINUES} and {GENERATION_PROMPT} exclude each other")
    return text


TemplateKwargs = Annotated[
    str, BeforeValidator(_as_text), StringConstraints(max_length=MAX_TEMPLATE_KWARGS_CHARS), AfterValidator(_variables)
]
"""The variables as the text of a JSON object."""


def thinking_setting(name: str, value: bool) -> str:
    """Return how a pool's record names the setting of a thinking variable."""
    return f"{name}={json.dumps(value)}"


def reasoning_parser_for(parser: str, thinking_switches: Collection[str], template_kwargs: str | None) -> str:
    """Return the reasoning parser of an answer whose request sets these variables.

    `parser` is that of requests without variables. With a setting of `thinking_switches`, the template does the
    opposite: it opens the reasoning, or leaves it closed.
    """
    if parser not in _OPPOSITES or template_kwargs is None:
        return parser
    variables = json.loads(template_kwargs)
    if variables.get(CONTINUES) or variables.get(GENERATION_PROMPT) is False:
        return "think"  # The prompt ends before the place where the template opens the reasoning.
    settings = {thinking_setting(name, value) for name, value in variables.items() if isinstance(value, bool)}
    return parser if settings.isdisjoint(thinking_switches) else _OPPOSITES[parser]


# Tools of a chat: the offered functions, calls made in earlier messages, and the calls that the output may contain.

_CHOICES = ("auto", "none", "required")
MAX_TOOLS = 512
MAX_TOOLS_CHARS = 1 << 20
MAX_CALLS = 128
"""Calls in one message."""
MAX_CALLS_OF_CHAT = 4096
"""Calls in all messages of a chat."""
MAX_CALL_ID_CHARS = 256
MAX_FUNCTION_NAME_CHARS = 256
MAX_ARGUMENTS_CHARS = 1 << 20

ReasoningParserName = Literal["none", "think", "think_open"]
"""`think_open`: the chat template itself opens the reasoning block, so the output begins inside it."""

ToolChoice = str | Mapping[str, Any]
"""`auto`, `none`, `required`, or one of OpenAI's forms: {"type": "function", "function": {"name": …}} for one function,
{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}} for some of the tools."""

CallId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CALL_ID_CHARS)]
FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS)]


def chosen_function(choice: object) -> str | None:
    """Return the function that a `tool_choice` names, or None for a word. Raises ValueError for any other value."""
    if (isinstance(choice, str) and choice in _CHOICES) or allowed_names(choice) is not None:
        return None
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    # Responses have the name without an object around it.
    forms = {"type": "function", "function": {"name": name}}, {"type": "function", "name": name}
    if not isinstance(name, str) or choice not in forms:
        shown = '{"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …}'
        raise ValueError(f"must be {', '.join(_CHOICES)}, {shown}")
    return name


def allowed_names(choice: object) -> tuple[str, list[str]] | None:
    """Return the mode and the functions of a `tool_choice` that allows some of the tools; None for another choice.

    Takes the form of chats, and that of responses without the inner object. Raises ValueError for a wrong one.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    inner = choice.get("allowed_tools", choice)
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
    if mode not in ("auto", "required"):
        raise ValueError("allowed_tools.mode must be auto or required")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise ValueError(f"allowed_tools.tools must be a list of 1 to {MAX_TOOLS} tools")
    names = [_allowed_name(tool) for tool in tools]
    if not all(names):
        raise ValueError('each of allowed_tools.tools must be {"type": "function", "function": {"name": …}}')
    return mode, names


def _allowed_name(tool: object) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def narrowed(tools: Sequence[Mapping[str, Any]], choice: Any) -> tuple[list[Mapping[str, Any]], ToolChoice]:
    """Return the tools that a valid `tool_choice` allows, in OpenAI's form, and the choice among these.

    Raises ValueError for a function that the tools do not have.
    """
    allowed = allowed_names(choice)
    if allowed is None:
        return [*tools], "auto" if choice is None else choice
    mode, names = allowed
    offered = {tool["function"]["name"] for tool in tools}
    if missing := next((name for name in names if name not in offered), None):
        raise ValueError(f"the tools have no function {missing[:100]!r}")
    return [tool for tool in tools if tool["function"]["name"] in names], mode


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a chat request offers and how the model may use them."""

    tools: str | None = None
    """The offered tools as JSON text, or None."""
    choice: ToolChoice = "auto"
    """OpenAI's `tool_choice`."""
    parallel: bool = True
    """Whether one answer may hold several calls."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool | None) -> ToolUse:
        """Return the use of a body's tools in the form of chats. `choice`: a valid one, or None.

        Raises RequestError for an allowed tool that is not offered.
        """
        is_parallel = parallel is not False
        if not tools or choice == "none":
            return cls(None, "auto" if choice is None else choice, is_parallel)
        try:
            offered, chosen = narrowed(tools, choice)
        except ValueError as error:
            raise RequestError(f"tool_choice: {error}", param="tool_choice") from None
        return cls(json.dumps(offered), chosen, is_parallel)

    @property
    def is_named(self) -> bool:
        """Whether the caller chose the function that the model must call."""
        return not isinstance(self.choice, str)


NO_TOOLS = ToolUse()


def json_of(text: str) -> Any:
    """Parse JSON. Raises ValueError also for numbers beyond doubles, NaN, lone surrogates and too deep nesting."""
    try:
        value = json.loads(text)
        json_text(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("text must be valid Unicode, without lone surrogates") from None
    return value


_SHOWN_CHARS = 200


class JsonNumberError(ValueError):
    """A number that readers of JSON cannot hold. The message names its place by a JSON pointer."""

    def __init__(self, number: float, path: str) -> None:
        shown = path if len(path) <= _SHOWN_CHARS else f"{path[:_SHOWN_CHARS]}…"
        found = "is NaN, which JSON does not have" if math.isnan(number) else "is beyond the range of a double"
        super().__init__(f"the number at #{shown} {found}; give it as a string")


def json_text(value: Any, *, ensure_ascii: bool = True) -> str:
    """Return a value as JSON. Raises JsonNumberError for a number that is infinite, as 1e400 is, or NaN."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=ensure_ascii)
    except ValueError:
        waiting: list[tuple[str, Any]] = [("", value)]
        while waiting:
            path, one = waiting.pop()
            if isinstance(one, float) and not math.isfinite(one):
                raise JsonNumberError(one, path) from None
            if isinstance(one, Mapping):
                waiting += [(f"{path}/{name}", member) for name, member in one.items()]
            elif isinstance(one, list | tuple):
                waiting += [(f"{path}/{i}", member) for i, member in enumerate(one)]
        raise


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


def _object(text: str) -> str:
    if not isinstance(json_of(text), dict):
        raise ValueError("must be the text of a JSON object")
    return text


def _object_so_far(text: str) -> str:
    """Return a call's arguments. Those that `max_tokens` cut off end with what was written of them.

    A chat template gets them as an object. Some servers write a call without arguments as "" or null.
    """
    if text.strip() in ("", "null"):
        return "{}"
    try:
        return _object(text)
    except ValueError:
        if not text.lstrip().startswith("{") or _has_whole_value(text):
            raise
        try:
            whole = json.dumps(from_json(text, allow_partial="trailing-strings", allow_inf_nan=False))
        except ValueError:
            raise ValueError("must be the text of a JSON object, or its beginning") from None
        return _object(whole)


def _has_whole_value(text: str) -> bool:
    """Return whether a text begins with a whole JSON value. What follows it was not cut off."""
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return False
    return True


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
Arguments = Annotated[str, StringConstraints(max_length=MAX_ARGUMENTS_CHARS), AfterValidator(_object_so_far)]


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
    """A call that the assistant made in an earlier message; `arguments` is the text of a JSON object, or a cut one."""

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

    form: ToolFormat
    reasoning: ReasoningParserName = "none"
    functions: Annotated[tuple[WantedFunction, ...], FailFast()] = Field(min_length=1, max_length=MAX_TOOLS)
    required: bool = True
    answer: Annotated[str, StringConstraints(max_length=MAX_TOOLS_CHARS), AfterValidator(_object)] | None = None
    parallel: bool = True
    """Whether the output may contain more than one call, up to MAX_CALLS."""


# Closing of objects in a JSON schema that a caller sends for tools or a response format.
#
# JSON Schema allows properties that a schema does not name. Callers who describe a function's arguments mean exactly
# the named ones, and a small model that may write others writes nothing else. So an object that names its properties
# is closed, as OpenAI's strict mode demands it, unless the schema itself says what else the object may hold.

_LISTS = ("allOf", "anyOf", "oneOf")
_OWN = ("properties", "patternProperties", "additionalProperties")
_CONDITIONS = ("if", "then", "else", "not")
_OPEN_BESIDE = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "dependencies"),
        *_CONDITIONS,
    )
)
"""Keywords that say what else an object may hold. An object with one of them stays as it is."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
"""Keywords with schemas by name."""
_VALUES = frozenset(("enum", "const", "default", "examples"))
"""Keywords with values, in which nothing is a schema."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` in each object that names its properties.

    Open stay: objects without properties (maps), objects that say what else they hold, and the parts of a composition,
    because each part would forbid the properties of the others. The alternatives of an `anyOf` or `oneOf` that stands
    alone are no such parts.
    """
    parts = _parts_of_compositions(schema)
    changed = {id(one): one | {"additionalProperties": False} for one in _schemas(schema) if _may_close(one, parts)}
    try:
        whole: dict[str, Any] = _replaced(schema, changed) if changed else schema
    except RecursionError:
        return schema  # It is refused later, by the limit of depth.
    return whole


def _may_close(one: dict[str, Any], parts: set[int]) -> bool:
    properties, kinds = one.get("properties"), one.get("type", "object")
    if id(one) in parts or not isinstance(properties, dict) or _OPEN_BESIDE & one.keys():
        return False
    required, least = one.get("required", []), one.get("minProperties", 0)
    is_possible = isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return is_possible and is_object and isinstance(least, int) and least <= len(properties)


def _parts_of_compositions(root: dict[str, Any]) -> set[int]:
    """Return the ids of the schemas that apply to the same object as another schema, references included."""
    parts: set[int] = set()
    for one in _schemas(root):
        groups = list(_applied_with(one, root))
        is_alone = len(groups) == 1 and not any(name in one for name in _OWN)
        if is_alone and (groups[0][0] in ("anyOf", "oneOf", "$ref") or len(groups[0][1]) == 1):
            continue
        waiting = [member for _, members in groups for member in members]
        while waiting:
            member = waiting.pop()
            if id(member) not in parts:
                parts.add(id(member))
                waiting += [part for _, members in _applied_with(member, root) for part in members]
    return parts


def _applied_with(one: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the schemas that apply to the same value as this one, by keyword."""
    for keyword in _LISTS:
        if isinstance(one.get(keyword), list):
            yield keyword, [member for member in one[keyword] if isinstance(member, dict)]
    conditions = [one[name] for name in _CONDITIONS if isinstance(one.get(name), dict)]
    if conditions:
        # A condition alone is a composition too: closed, it would hold in other cases.
        yield "if", [*conditions, {}]
    dependent = one.get("dependentSchemas", one.get("dependencies"))
    if isinstance(dependent, dict):
        yield "dependentSchemas", [*(member for member in dependent.values() if isinstance(member, dict)), {}]
    target = _resolved(one.get("$ref"), root)
    if target is not None:
        yield "$ref", [target]


def _resolved(reference: object, root: dict[str, Any]) -> dict[str, Any] | None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        found = found.get(unquote(part).replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every schema of the document. The walk needs no stack of calls."""
    waiting: list[Any] = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            for name, one in value.items():
                if name in _MAPS and isinstance(one, dict):
                    waiting += one.values()
                elif name not in _VALUES:
                    waiting.append(one)
        elif isinstance(value, list):
            waiting += value


def _replaced(value: Any, changed: dict[int, dict[str, Any]]) -> Any:
    if isinstance(value, dict):
        own, result = changed.get(id(value), value), {}
        for name, one in own.items():
            if name in _MAPS and isinstance(one, dict):
                result[name] = {key: _replaced(member, changed) for key, member in one.items()}
            else:
                result[name] = one if name in _VALUES else _replaced(one, changed)
        return result
    return [_replaced(one, changed) for one in value] if isinstance(value, list) else value
