"""Tools and the choice of tools in a response's body, and their translation into the functions of a chat.

`_TYPES` has the record of each type. docs/HTTP.md has the table of what the model gets and what its calls come back as.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, FailFast, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from penstock.contract.fields import OpenWire, Wire
from penstock.contract.problems import problem_of
from penstock.contract.sampling import MAX_GRAMMAR_CHARS
from penstock.contract.tools import (
    MAX_FUNCTION_NAME_CHARS,
    MAX_TOOLS,
    TEXT_ARGUMENT,
    FunctionName,
    ToolUse,
    text_parameters,
)

T = TypeVar("T", bound=BaseModel)
CallKind = Literal["function_call", "custom_tool_call", "tool_search_call"]
TOOL_SEARCH = "tool_search"
_DROPPED = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "image_generation",
)
"""Types of tools that a server would run itself. They are dropped, because a client works without them too."""
_BETWEEN = "__"
"""Stands between the name of a namespace and that of its tool."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class CalledTool(NamedTuple):
    """What a call of an offered function comes back as, if it is not a plain function_call."""

    kind: CallKind
    name: str
    namespace: str = ""


class Offer(NamedTuple):
    """A function that the model is offered, in the form of a chat, and the tool that it stands for."""

    function: dict[str, Any]
    called: CalledTool


def offered_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a tool."""
    return f"{namespace}{_BETWEEN}{name}" if namespace else name


def read_as(schema: type[T], value: object) -> T:
    """Return the value as a record. Raises PydanticCustomError that names the wrong member, without alternatives."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        problem = problem_of(error)
        kind: Any = "unsupported_value" if problem.code == "unsupported_value" else "wrong_member"
        raise PydanticCustomError(kind, "{problem}", {"problem": str(problem)}) from None


class FunctionTool(OpenWire):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether calls must match `parameters` even if the model may also answer without a call."""

    def offers(self, namespace: str = "") -> Iterator[Offer]:
        """Yield the tool in the form of a chat, without unset members."""
        members = {
            "name": offered_name(namespace, self.name),
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        function = {name: value for name, value in members.items() if value is not None}
        yield Offer(function, CalledTool("function_call", self.name, namespace))

    def shown(self) -> dict[str, Any]:
        """Return the tool as the response shows it."""
        return {name: getattr(self, name) for name in FunctionTool.model_fields}


class _TextFormat(OpenWire):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None

    def grammar(self) -> tuple[str, str] | None:
        if self.type == "text":
            return None
        if self.syntax is None or self.definition is None:
            raise PydanticCustomError("unsupported_value", "type grammar requires syntax and definition")
        return self.syntax, self.definition


class CustomTool(OpenWire):
    """A tool whose input is a text. A grammar may define the text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: _TextFormat = _TextFormat()

    def offers(self, namespace: str = "") -> Iterator[Offer]:
        """Yield the tool as a function with one text. A grammar is enforced like the schema of a strict function."""
        grammar = self.format.grammar()
        function: dict[str, Any] = {"name": offered_name(namespace, self.name)}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = text_parameters(grammar)
        if grammar is not None:
            function["strict"] = True
        yield Offer(function, CalledTool("custom_tool_call", self.name, namespace))

    def shown(self) -> dict[str, Any]:
        """Return the tool as the response shows it."""
        return self.model_dump(exclude_none=True)


_MEMBERS: Mapping[str, type[FunctionTool | CustomTool]] = {"function": FunctionTool, "custom": CustomTool}
"""Types of tools that a namespace may contain."""


def _member_of(value: object) -> FunctionTool | CustomTool:
    kind = value.get("type") if isinstance(value, dict) else None
    schema = _MEMBERS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        message = "a namespace may contain tools of type {known} only, not {kind}"
        context = {"known": " and ".join(_MEMBERS), "kind": repr(kind)[:64]}
        raise PydanticCustomError("unsupported_value", message, context)
    return read_as(schema, value)


class NamespaceTool(OpenWire):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, PlainValidator(_member_of)]], FailFast(), Field(max_length=MAX_TOOLS)
    ]

    def offers(self, namespace: str = "") -> Iterator[Offer]:
        """Yield the tools. The description of the namespace comes before that of the first one."""
        for number, tool in enumerate(self.tools):
            for function, called in tool.offers(self.name):
                described = "\n\n".join(filter(None, [self.description, tool.description]))
                yield Offer(function | {"description": described} if number == 0 and described else function, called)

    def shown(self) -> dict[str, Any]:
        """Return the tool as the response shows it."""
        return {**self.model_dump(exclude={"tools"}), "tools": [tool.shown() for tool in self.tools]}


class ToolSearchTool(OpenWire):
    """A search for further tools, which the client runs."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def offers(self, namespace: str = "") -> Iterator[Offer]:
        """Yield the search as a function."""
        function: dict[str, Any] = {"name": TOOL_SEARCH, "description": self.description or "Search for further tools."}
        called = CalledTool("tool_search_call", TOOL_SEARCH)
        yield Offer(function | {"parameters": self.parameters or _NO_PARAMETERS}, called)

    def shown(self) -> dict[str, Any]:
        """Return the tool as the response shows it."""
        return self.model_dump(exclude_none=True)


class DroppedTool(OpenWire):
    """A tool that the server would have to run. It is ignored, and the answer's header names it."""

    type: str

    def offers(self, namespace: str = "") -> Iterator[Offer]:
        """Yield nothing."""
        yield from ()

    def shown(self) -> None:
        """Return nothing: the response does not show the tool."""


AnyTool = FunctionTool | CustomTool | NamespaceTool | ToolSearchTool | DroppedTool
_TYPES: Mapping[str, type[AnyTool]] = {
    **_MEMBERS,
    "namespace": NamespaceTool,
    TOOL_SEARCH: ToolSearchTool,
    **dict.fromkeys(_DROPPED, DroppedTool),
}


def tool_of(value: object) -> AnyTool:
    """Check a tool. Raises PydanticCustomError."""
    kind = value.get("type") if isinstance(value, dict) else None
    schema = _TYPES.get(kind) if isinstance(kind, str) else None
    if not isinstance(value, dict) or schema is None:
        message = "tools of type {kind} are not supported; supported: {known}"
        context = {"kind": repr(kind)[:64], "known": ", ".join(_TYPES)}
        raise PydanticCustomError("unsupported_value", message, context)
    if schema is ToolSearchTool and value.get("execution", "server") == "server":
        schema = DroppedTool
    return read_as(schema, value)


class _NamedTool(Wire):
    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None

    @property
    def offered(self) -> str:
        return offered_name(self.namespace, self.name)


class AllowedTools(Wire):
    """A choice that offers the model only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class NamedChoice(_NamedTool):
    """A choice of one function or custom tool that the model must call."""


def _choice_of(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind not in ("function", "custom", "allowed_tools"):
        message = "a choice of type {kind} is not supported; only function, custom and allowed_tools are"
        raise PydanticCustomError("unsupported_value", message, {"kind": repr(kind)[:64]})
    given = _flat(choice, kind)
    tools = given.get("tools")
    return given | {"tools": [_flat(tool, "function") for tool in tools]} if isinstance(tools, list) else given


def _flat(value: Any, member: str) -> Any:
    """Return a choice or tool of a chat, whose members are in an object of this name, in the form of responses."""
    inner = value.get(member) if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        return value
    return {**{name: one for name, one in value.items() if name != member}, **inner}


Choice = Annotated[
    Literal["auto", "none", "required"] | Annotated[NamedChoice | AllowedTools, Field(discriminator="type")],
    BeforeValidator(_choice_of),
]


def _of_chat(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """All tools of a request as functions."""

    offers: Mapping[str, Offer]
    """By the names under which the model knows them."""

    @classmethod
    def of(cls, tools: Iterable[AnyTool]) -> OfferedTools:
        """Return the functions of these tools. A tool that comes again, as searches bring them, replaces the earlier.

        Raises PydanticCustomError for too many functions, and for two tools with one name.
        """
        offers: dict[str, Offer] = {}
        for tool in tools:
            for offer in tool.offers():
                name = offer.function["name"]
                if len(name) > MAX_FUNCTION_NAME_CHARS:
                    context: dict[str, Any] = {"name": name[:64], "max": MAX_FUNCTION_NAME_CHARS}
                    message = "the names of namespace and tool, as {name}…, must have at most {max} characters together"
                    raise PydanticCustomError("too_long_name", message, context)
                if name in offers and offers[name].called != offer.called:
                    raise PydanticCustomError("same_name", "two tools are named {name}", {"name": repr(name)[:80]})
                offers[name] = offer
        if len(offers) > MAX_TOOLS:
            message = "must have at most {max} functions, those in namespaces and of searches included"
            raise PydanticCustomError("too_many", message, {"max": MAX_TOOLS})
        return cls(offers)

    def use(self, choice: Choice | None, *, parallel: bool) -> ToolUse:
        """Return the tools that the model may call, as a chat offers them. Raises what `ToolUse.of` raises."""
        wanted: Any = choice
        if isinstance(choice, AllowedTools):
            allowed = [_of_chat({"name": tool.offered}) for tool in choice.tools]
            wanted = {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
        elif isinstance(choice, NamedChoice):
            wanted = _of_chat({"name": choice.offered})
        return ToolUse.of([_of_chat(offer.function) for offer in self.offers.values()], wanted, parallel)

    def called(self) -> list[list[str]]:
        """Return what calls come back as, by the offered name, without the plain functions. As plain values."""
        plain = {name: CalledTool("function_call", name) for name in self.offers}
        return [[name, *offer.called] for name, offer in self.offers.items() if offer.called != plain[name]]


def dropped_names(tools: Iterable[AnyTool]) -> list[str]:
    """Return how the answer's header names the tools that were dropped."""
    return [f"tools.{tool.type}" for tool in tools if isinstance(tool, DroppedTool)]


def shown_tools(tools: Sequence[AnyTool]) -> list[dict[str, Any]]:
    """Return the tools as the response shows them."""
    return [shown for tool in tools if (shown := tool.shown()) is not None]


def shown_choice(choice: Choice | None) -> Any:
    """Return the choice as the response shows it."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump(exclude_none=True)


# The text input of a custom tool, which the model writes as the only argument of a function.

_OPENING = re.compile(rf'\s*\{{\s*"{TEXT_ARGUMENT}"\s*:\s*"')
_COMPACT_OPENING = f'{{"{TEXT_ARGUMENT}":"'
_MAX_OPENING_CHARS = 64
"""Longer arguments without the opening have another form."""
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^u])")
_MAX_ESCAPE_CHARS = 12
"""Characters of the longest escape, a pair of surrogates."""
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]")


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this input."""
    return json.dumps({TEXT_ARGUMENT: text}, ensure_ascii=False)


class TextInputReader:
    """Reads the input from the arguments of one call, piece by piece. The result does not depend on the pieces.

    Arguments of another form, which a model may write if no grammar holds it, are the input as they are. But if an
    object has a text as its only member, that text is the input, whatever its name is.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state: Literal["opening", "text", "end", "other"] = "opening"

    def push(self, piece: str) -> str:
        """Add a piece of the arguments, and return the text that is certain now."""
        if self._state == "end":
            return ""
        self._held += piece
        if self._state == "opening":
            self._open()
        return self._decoded() if self._state == "text" else ""

    def end(self) -> str:
        """Return the rest of the text at the end of the arguments."""
        held, self._held = self._held, ""
        if self._state in ("text", "end"):
            return ""
        try:
            found = json.loads(held)
        except ValueError:
            return held
        values = list(found.values()) if isinstance(found, dict) else []
        return values[0] if len(values) == 1 and isinstance(values[0], str) else held

    def _open(self) -> None:
        opening = _OPENING.match(self._held)
        if opening is not None and opening.end() <= _MAX_OPENING_CHARS:
            self._held = self._held[opening.end() :]
            self._state = "text"
        elif len(self._held) > _MAX_OPENING_CHARS or not _COMPACT_OPENING.startswith("".join(self._held.split())):
            self._state = "other"

    def _decoded(self) -> str:
        text, at, parts = self._held, 0, list[str]()
        while at < len(text):
            if text[at] == '"':
                self._state, text = "end", ""
                break
            plain = _PLAIN.match(text, at)
            if plain is not None:
                parts.append(plain[0])
                at = plain.end()
                continue
            escape = _ESCAPE.match(text, at)
            waits = len(text) - at < _MAX_ESCAPE_CHARS and _HIGH_SURROGATE.match(text, at)
            if escape is None or (waits and len(escape[0]) < _MAX_ESCAPE_CHARS):
                break
            parts.append(json.loads(f'"{escape[0]}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            at = escape.end()
        self._held = text[at:]
        return "".join(parts)
