"""Grammars for texts with tool calls, in llguidance's notation (docs/syntax.md of github.com/guidance-ai/llguidance).

Such a grammar derives what models of each call format write unprompted, and what the gateways parse as calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from penstock.contract.errors import RequestError
from penstock.contract.tools import MAX_CALLS, TEXT_ARGUMENT, WantedCalls, WantedFunction, text_grammar_of
from penstock.gpu_node.engine.structured.quoted_grammar import QuotingError, quoted_grammar
from penstock.gpu_node.engine.structured.tagged_grammar import TaggedGrammar, json_rule, quoted

_ANY = r"(.|\n)"
_BLANK = r"BLANK: /\n{1,2}/"
_BARE_BEGINS = r'\s*(<\|python_tag\|>|\{\s*"name"\s*:|\{\s*"type"\s*:\s*"function")' + _ANY + "*"
"""The start of a text that the readers take for calls without a mark."""


class CallGrammar:
    """Writes one grammar. `token_of` returns the special token of a mark, or None if the mark is ordinary text."""

    def __init__(self, wanted: WantedCalls, token_of: Callable[[str], int | None]) -> None:
        self._wanted = wanted
        self._format = wanted.form
        self._opening = self._format.section or ("" if self._format.is_bare else self._format.call)
        self._token_of = token_of

    def lark(self) -> str:
        """Return the grammar. Raises RequestError for a function whose arguments cannot be held to their schema."""
        functions = [self._function(i, function) for i, function in enumerate(self._wanted.functions)]
        rules = [f"start: {self._reasoning()} {self._body()}", *self._lexemes(), *functions]
        if self._wanted.answer is not None:
            rules.append(f"answer{json_rule(json.loads(self._wanted.answer))}")
        return "\n".join([*rules, "function: " + " | ".join(f"f{i}" for i in range(len(functions)))])

    def _reasoning(self) -> str:
        """Return the rule for the reasoning before the answer, as the model's template expects it."""
        if self._wanted.reasoning == "none":
            return ""
        opening, closing = self._format.reasoning
        thought = self._up_to(closing, "THOUGHT", "thought")
        if self._wanted.required or self._wanted.answer is not None:
            thought += " BLANK?"
        return thought if self._wanted.reasoning == "think_open" else f"({self.mark(opening)} {thought})?"

    def _body(self) -> str:
        wanted, form = self._wanted, self._format
        if wanted.required:
            return self._calls(self.mark(self._opening))
        if wanted.answer is not None:
            return f"({self._calls(self.mark(self._opening))} | answer)"
        opening = self._up_to(self._opening, "TEXT", "opening")
        if form.section_end or (form.call_end and not form.section):
            # Text may follow what has an end.
            return f"({opening} {self._rest()}){{0,{MAX_CALLS if wanted.parallel else 1}}} TEXT?"
        return f"({self._calls(opening)} | TEXT?)"

    def _calls(self, opening: str) -> str:
        """Return the rule for calls after their first mark: one list of calls, or several with a mark each."""
        form = self._format
        if form.is_bare:
            return self._several("function")
        if not self._wanted.parallel or (form.section and not form.section_per_call):
            return f"{opening} {self._rest()}"
        again = f"{self.separator()} {self.mark(self._opening)} {self._rest()}"
        return f"{opening} {self._rest()} ({again}){{0,{MAX_CALLS - 1}}}"

    def _rest(self) -> str:
        """Return the rule for what follows the mark of a list of calls, or that of a call without a list."""
        form = self._format
        padding = quoted(form.padding) if form.padding else ""
        if not form.section:
            return f"{padding} function {padding} {self.mark(form.call_end)}" if form.kind == "json" else "function"
        call = "function" if form.kind == "json" else f"{self.mark(form.call)} function"
        calls = call if form.section_per_call else self._several(call)
        inner = f'" "? "[" {calls} "]"' if form.is_list else f"{padding} {calls} {padding}"
        return f"{inner} {self.mark(form.section_end)}"

    def _several(self, call: str) -> str:
        return f"{call} ({self.separator()} {call}){{0,{MAX_CALLS - 1}}}" if self._wanted.parallel else call

    def separator(self) -> str:
        """Return what stands between two calls."""
        return quoted(self._format.between) if self._format.between else ""

    def _lexemes(self) -> list[str]:
        form = self._format
        marks = "|".join(map(_escaped, form.beginnings))
        call = _BARE_BEGINS if form.is_bare else f"{_ANY}*({marks}){_ANY}*"
        lexemes = [_without("TEXT", call), _without("THOUGHT", f"{_ANY}*{_escaped(form.reasoning[1])}{_ANY}*"), _BLANK]
        ends = (("thought", form.reasoning[1]), ("opening", self._opening), ("value", form.value_end))
        lexemes += [f"{name}[lazy]: /{_ANY}*{_escaped(end)}/" for name, end in ends if end]
        if form.value_end:
            lexemes.append(_without("VALUE", f"{_ANY}*{_escaped(form.value_end)}{_ANY}*"))
            lexemes.append(r"KEY: /[^<>\"\n]{1,64}/")
        return [*lexemes, "ID: /[A-Za-z0-9]{1,32}/", "NUMBER: /[0-9]{1,3}/"]

    def _up_to(self, mark: str, text: str, whole: str) -> str:
        """Return a rule for any text up to and including the first mark."""
        return whole if self._token_of(mark) is None else f"{text}? {self.mark(mark)}"

    def mark(self, mark: str) -> str:
        """Return what stands for a mark in a rule; nothing for an empty one."""
        if not mark:
            return ""
        token_id = self._token_of(mark)
        return quoted(mark) if token_id is None else f"<[{token_id}]>"

    def text_value(self) -> str:
        """Return the rule for the value of a text argument, up to and including its closing mark."""
        return self._up_to(self._format.value_end, "VALUE", "value")

    def _function(self, i: int, function: WantedFunction) -> str:
        form, schema = self._format, _of_objects(function)
        if form.kind == "tagged":
            arguments = TaggedGrammar(form, self.mark, self.text_value()).rules(i, function.name, schema)
            return f"f{i}: {self._head(function.name)} a{i} {self.mark(form.call_end)}\n{arguments}"
        grammar = text_grammar_of(schema)
        parameters = f"p{i}{json_rule(schema)}" if grammar is None else _text_rules(i, function.name, *grammar)
        if form.kind == "named":
            return f"f{i}: {self._head(function.name)} p{i} {self.mark(form.call_end)}\n{parameters}"
        name = json.dumps(function.name, ensure_ascii=False)
        head = f'{{"{form.name_key}": {name}, "{form.arguments_key}": '
        return f'f{i}: {quoted(head)} p{i} "}}"\n{parameters}'

    def _head(self, name: str) -> str:
        """Return the rule for a name between marks, without the mark before it."""
        form = self._format
        ends = [form.name_end] if form.name_end else [form.argument, form.call_end]
        if any(mark in name for mark in (*ends, form.id_mark or ends[0], "\n")) or name != name.strip():
            message = f"tools: the name {name[:100]!r} has a mark of this model's calls in it; choose another name"
            raise RequestError(message, param="tools")
        number = '":" NUMBER' if form.counts_calls else ""
        call_id = f"ID {self.mark(form.id_end)}" if form.id_end else ""
        return f"{call_id} {quoted(form.name_prefix + name)} {number} {self.mark(form.name_end)}"


def _text_rules(i: int, name: str, syntax: str, definition: str) -> str:
    """Return the rules for the arguments of a function whose only argument is a text with a grammar."""
    try:
        text = quoted_grammar(syntax, definition)
    except QuotingError as error:
        raise RequestError(f"tools: the grammar of {name!r} cannot be enforced: {error}", param="tools") from None
    opening = f'{{"{TEXT_ARGUMENT}": "'
    return f'p{i}: {quoted(opening)} g{i} "\\"}}"\ng{i}: %lark {{\n{text}\n}}'


def _of_objects(function: WantedFunction) -> dict[str, Any]:
    """Return the schema of a function's parameters, restricted to objects."""
    schema: dict[str, Any] = json.loads(function.parameters)
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise RequestError(f"tools: the parameters of {function.name!r} must be an object", param="tools")
    return schema | {"type": "object"}


def _without(name: str, call: str) -> str:
    return f"{name}: /{_ANY}+/ & ~/{call}/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
