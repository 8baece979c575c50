"""Grammars for texts with tool calls, in llguidance's notation (docs/syntax.md of github.com/guidance-ai/llguidance).

Such a grammar derives what models of each call format write unprompted, and what the gateways parse as calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import RequestError
from penstock.contract.tools import MAX_CALLS, TEXT_ARGUMENT, CallFormName, WantedCalls, WantedFunction, text_grammar_of
from penstock.gpu_node.engine.structured.quoted_grammar import QuotingError, quoted_grammar

_ANY = r"(.|\n)"
_BLANK = r"BLANK: /\n{1,2}/"
_THINK, _THOUGHT = "<think>", "</think>"
_LLAMA_BEGINS = r'\s*(<\|python_tag\|>|\{\s*"name"\s*:|\{\s*"type"\s*:\s*"function")' + _ANY + "*"
"""The start of a text that the parsers of this format take for calls."""


@dataclass(frozen=True, slots=True)
class _CallFormat:
    """How one model family writes calls. `mark` starts each call if there is a `close`, else the list of all calls."""

    mark: str
    close: str
    arguments: str
    """The JSON key of a call's arguments."""
    between: str


_FORMATS: dict[CallFormName, _CallFormat] = {
    "hermes": _CallFormat("<tool_call>", "</tool_call>", "arguments", "\n"),
    "llama3_json": _CallFormat("", "", "parameters", "; "),
    "mistral": _CallFormat("[TOOL_CALLS]", "", "arguments", ", "),
}


class CallGrammar:
    """Writes one grammar. `token_of` returns the special token of a mark, or None if the mark is ordinary text."""

    def __init__(self, wanted: WantedCalls, token_of: Callable[[str], int | None]) -> None:
        self._wanted = wanted
        self._format = _FORMATS[wanted.form]
        self._token_of = token_of

    def lark(self) -> str:
        """Return the grammar. Raises RequestError for a function with parameters that are not an object."""
        functions = [self._function(i, function) for i, function in enumerate(self._wanted.functions)]
        rules = [f"start: {self._reasoning()} {self._body()}", *self._lexemes(), *functions]
        if self._wanted.answer is not None:
            rules.append(f"answer{_json(json.loads(self._wanted.answer))}")
        return "\n".join([*rules, "function: " + " | ".join(f"f{i}" for i in range(len(functions)))])

    def _reasoning(self) -> str:
        """Return the rule for the reasoning before the answer, as the model's template expects it."""
        if self._wanted.reasoning == "none":
            return ""
        thought = self._up_to(_THOUGHT, "THOUGHT", "thought")
        if self._wanted.required or self._wanted.answer is not None:
            thought += " BLANK?"
        return thought if self._wanted.reasoning == "think_open" else f"({self._mark(_THINK)} {thought})?"

    def _body(self) -> str:
        wanted, mark = self._wanted, self._format.mark
        if wanted.required:
            return self._calls(self._mark(mark))
        if wanted.answer is not None:
            return f"({self._calls(self._mark(mark))} | answer)"
        opening = self._up_to(mark, "TEXT", "opening")
        if self._format.close:
            return f"({self._marked(opening)}){{0,{MAX_CALLS if wanted.parallel else 1}}} TEXT?"
        return f"({self._calls(opening)} | TEXT?)"

    def _calls(self, opening: str) -> str:
        form = self._format
        if form.close:
            return self._several(self._marked(opening), form.between)
        calls = self._several("function", form.between)
        return f'{opening} " "? "[" {calls} "]"' if form.mark else calls

    def _marked(self, opening: str) -> str:
        return f'{opening} "\\n" function "\\n" {self._mark(self._format.close)}'

    def _several(self, call: str, between: str) -> str:
        return f"{call} ({_quoted(between)} {call}){{0,{MAX_CALLS - 1}}}" if self._wanted.parallel else call

    def _lexemes(self) -> list[str]:
        mark = self._format.mark
        call = f"{_ANY}*{_escaped(mark)}{_ANY}*" if mark else _LLAMA_BEGINS
        lexemes = [_without("TEXT", call), _without("THOUGHT", f"{_ANY}*{_escaped(_THOUGHT)}{_ANY}*"), _BLANK]
        ends = (("thought", _THOUGHT), ("opening", mark))
        return lexemes + [f"{name}[lazy]: /{_ANY}*{_escaped(end)}/" for name, end in ends if end]

    def _up_to(self, mark: str, text: str, whole: str) -> str:
        """Return a rule for any text up to and including the first mark."""
        return whole if self._token_of(mark) is None else f"{text}? {self._mark(mark)}"

    def _mark(self, mark: str) -> str:
        token_id = self._token_of(mark)
        return _quoted(mark) if token_id is None else f"<[{token_id}]>"

    def _function(self, i: int, function: WantedFunction) -> str:
        head = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{self._format.arguments}": '
        schema = _of_objects(function)
        grammar = text_grammar_of(schema)
        parameters = f"p{i}{_json(schema)}" if grammar is None else _text_rules(i, function.name, *grammar)
        return f'f{i}: {_quoted(head)} p{i} "}}"\n{parameters}'


def _text_rules(i: int, name: str, syntax: str, definition: str) -> str:
    """Return the rules for the arguments of a function whose only argument is a text with a grammar."""
    try:
        text = quoted_grammar(syntax, definition)
    except QuotingError as error:
        raise RequestError(f"tools: the grammar of {name!r} cannot be enforced: {error}", param="tools") from None
    opening = f'{{"{TEXT_ARGUMENT}": "'
    return f'p{i}: {_quoted(opening)} g{i} "\\"}}"\ng{i}: %lark {{\n{text}\n}}'


def _json(schema: dict[str, Any]) -> str:
    """Return the rest of a rule for JSON. The worker finds it by this form and rewrites the schema.

    Characters outside ASCII stay as they are, because escapes would take up to three times as many bytes.
    """
    return ": %json " + json.dumps(schema, ensure_ascii=False)


def _of_objects(function: WantedFunction) -> dict[str, Any]:
    """Return the schema of a function's parameters, restricted to objects."""
    schema: dict[str, Any] = json.loads(function.parameters)
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise RequestError(f"tools: the parameters of {function.name!r} must be an object", param="tools")
    return schema | {"type": "object"}


def _without(name: str, call: str) -> str:
    return f"{name}: /{_ANY}+/ & ~/{call}/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
