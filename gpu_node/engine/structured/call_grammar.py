"""Grammars for texts with tool calls, in llguidance's notation (docs/syntax.md of github.com/guidance-ai/llguidance).

Such a grammar derives what models of each call format write unprompted, and what the gateways parse as calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from penstock.contract.calls.expressions import EXPRESSION_NAME
from penstock.contract.calls.reading import name_ends_of
from penstock.contract.errors import RequestError
from penstock.contract.tool_formats import CDATA, ToolFormat, tokens_in
from penstock.contract.tools import MAX_CALLS, TEXT_ARGUMENT, WantedCalls, WantedFunction, text_grammar_of
from penstock.gpu_node.engine.structured.expression_grammar import ExpressionGrammar
from penstock.gpu_node.engine.structured.quoted_grammar import QuotingError, quoted_grammar
from penstock.gpu_node.engine.structured.tagged_grammar import TaggedGrammar, json_rule, quoted

MAX_TOLD_CALLS = 8
"""Calls of an answer that a grammar lets a told model write. Small ones repeat a call as long as they may."""
_ANY = r"(.|\n)"
_BLANK = r"BLANK: /\n{1,2}/"
_BARE_LIST_BEGINS = rf"\s*(<\|python_start\|>|\[\s*[^\s,:=\[\](){{}}<>\"'|]+\(){_ANY}*"
_BARE_BEGINS = r'\s*(<\|python_tag\|>|\{\s*"name"\s*:|\{\s*"type"\s*:\s*"function")' + _ANY + "*"
"""The start of a text that the readers take for calls without a mark."""


class CallGrammar:
    """Writes one grammar. `token_of` returns the special token of a mark, or None if the mark is ordinary text."""

    def __init__(self, wanted: WantedCalls, token_of: Callable[[str], int | None]) -> None:
        self._wanted, self._token_of = wanted, token_of
        self._format = wanted.form
        self._opening = "" if self._format.is_bare else self._format.section or self._format.call
        self._first = self._opening.removeprefix(self._format.begun)
        self._parallel = wanted.parallel and not self._format.is_single
        self._max_calls = MAX_TOLD_CALLS if self._format.is_told else MAX_CALLS
        self._expressions = ExpressionGrammar(self._format, self.mark, self.text_value())

    def lark(self) -> str:
        """Return the grammar. Raises RequestError for a function whose arguments cannot be held to their schema."""
        functions = [self._function(i, function) for i, function in enumerate(self._wanted.functions)]
        rules = [f"start: {self._reasoning()} {self._body()}", *self._lexemes(), *functions]
        if self._wanted.answer is not None:
            rules.append(f"answer{json_rule(json.loads(self._wanted.answer))}")
        rules.append("function: " + " | ".join(f"f{i}" for i in range(len(functions))))
        if self._format.is_bare and self._format.is_list:
            rules.append("opened: " + " | ".join(f"o{i}" for i in range(len(functions))))
        return "\n".join(rules)

    def _reasoning(self) -> str:
        """Return the rule for the reasoning before the answer, as the model's template expects it."""
        if self._wanted.reasoning == "none":
            return ""
        opening, closing = self._format.reasoning
        thought = self._up_to(closing, "THOUGHT", "thought")
        if self._wanted.required or self._wanted.answer is not None:
            thought += " BLANK?"
        thought += f" {self.mark(self._format.turn)}"
        return thought if self._wanted.reasoning == "think_open" else f"({self.mark(opening)} {thought})?"

    def _body(self) -> str:
        wanted, form = self._wanted, self._format
        begin = f"({self.mark(form.text_opening)} {self.mark(form.text_end)})?" if form.text_end else ""
        if wanted.required:
            return f"{begin} {self._calls(self.mark(self._first))}"
        text_opening = self.mark(form.text_opening.removeprefix(form.begun))
        if wanted.answer is not None:
            return f"({begin} {self._calls(self.mark(self._first))} | {text_opening} answer {self.mark(form.text_end)})"
        if form.text_end:
            said = self._up_to(form.text_end, "TEXT", "said")
            return f"({text_opening} {said})? ({self._calls(self.mark(self._first))})?"
        if form.text_opening:
            return f"({self._calls(self.mark(self._first))} | {text_opening} TEXT?)"
        opening = self._up_to(self._opening, "TEXT", "opening")
        if not (form.is_single or form.is_bare) and (form.section_end or (form.call_end and not form.section)):
            # Text may follow what has an end.
            return f"({opening} {self._rest()}){{0,{self._max_calls if self._parallel else 1}}} TEXT?"
        return f"({self._calls(opening)} | TEXT?)"

    def _calls(self, opening: str) -> str:
        """Return the rule for calls after their first mark: one list of calls, or several with a mark each."""
        form = self._format
        if form.is_bare:
            return f'{self._several("function", "opened")} "]"' if form.is_list else self._several("function")
        before, after = form.recipient
        opening = f"{quoted(before)} RECEIVER {self.mark(after)} {opening}" if before else opening
        if not self._parallel or (form.section and not form.section_per_call):
            return f"{opening} {self._rest()}"
        again = f"{self.separator()} {self.mark(self._opening)} {self._rest()}"
        return f"{opening} {self._rest()} ({again}){{0,{self._max_calls - 1}}}"

    def _rest(self) -> str:
        """Return the rule for what follows the mark of a list of calls, or that of a call without a list."""
        form = self._format
        padding = quoted(form.padding) if form.padding else ""
        if not form.section:
            return f"{padding} function {padding} {self.mark(form.call_end)}" if form.kind == "json" else "function"
        call = f"{self.mark(form.call)} function"
        if form.kind == "json":
            call = (
                f"{self.mark(form.call)} {padding} function {padding} {self.mark(form.call_end)}"
                if form.call
                else "function"
            )
        calls = call if form.section_per_call else self._several(call)
        inner = f'" "? "[" {calls} "]"' if form.is_list else f"{padding} {calls} {padding}"
        inner = f'("\\n" | " ") "```json\\n" {inner} "\\n```"' if form.is_fenced else inner
        return f"{inner} {self.mark(form.section_end)}"

    def _several(self, call: str, first: str = "") -> str:
        first = first or call
        return f"{first} ({self.separator()} {call}){{0,{self._max_calls - 1}}}" if self._parallel else first

    def separator(self) -> str:
        """Return what stands between two calls."""
        return quoted(self._format.between) if self._format.between else ""

    def _lexemes(self) -> list[str]:
        form = self._format
        marks = "|".join(map(_escaped, form.beginnings))
        call = f"{_ANY}*({marks}){_ANY}*"
        if form.is_bare:
            call = _BARE_LIST_BEGINS if form.is_list else _BARE_BEGINS
        lexemes = [_without("TEXT", call), _without("THOUGHT", f"{_ANY}*{_escaped(form.reasoning[1])}{_ANY}*"), _BLANK]
        value_end = form.value_end or form.text_mark
        ends = (
            ("thought", form.reasoning[1]),
            ("opening", self._opening),
            ("value", value_end),
            ("said", form.text_end),
        )
        # A value that begins like CDATA is one.
        begin = {"value": "([^<]" if form.has_cdata else ""}
        lexemes += [
            f"{name}[lazy]: /{begin.get(name) or ''}{_ANY}*{')?' if begin.get(name) else ''}{_escaped(end)}/"
            for name, end in ends
            if end
        ]
        if form.has_cdata:
            lexemes.append(f"cdata[lazy]: /{_ANY}*{_escaped(CDATA[1] + value_end)}/")
        if value_end:
            lexemes.append(_without("VALUE", f"{_ANY}*{_escaped(value_end)}{_ANY}*"))
        if form.kind == "expressions":
            lexemes += self._expressions.common_rules()
        elif value_end:
            lexemes.append(r"KEY: /[^<>\"\n]{1,64}/")
        return [*lexemes, "ID: /[A-Za-z0-9]{1,32}/", "NUMBER: /[0-9]{1,3}/", r"RECEIVER: /[^\s<>]{1,64}/"]

    def _up_to(self, mark: str, text: str, whole: str) -> str:
        """Return a rule for any text up to and including the first mark."""
        first = next(iter(self._parts(mark)), "")
        return whole if self._token_of(first) is None else f"{text}? {self.mark(mark)}"

    def _parts(self, mark: str) -> list[str]:
        """Return the special tokens in a mark and the texts between them."""
        if self._token_of(mark) is not None or all(self._token_of(part) is None for part in tokens_in(mark)):
            return [mark] if mark else []
        return tokens_in(mark)

    def mark(self, mark: str) -> str:
        """Return what stands for a mark in a rule; nothing for an empty one."""
        found = [(part, self._token_of(part)) for part in self._parts(mark)]
        return " ".join(quoted(part) if token_id is None else f"<[{token_id}]>" for part, token_id in found)

    def text_value(self) -> str:
        """Return the rule for the value of a text argument, up to and including its closing mark."""
        value = self._up_to(self._format.value_end or self._format.text_mark, "VALUE", "value")
        return f"({quoted(CDATA[0])} cdata | {value})" if self._format.has_cdata else value

    def _function(self, i: int, function: WantedFunction) -> str:
        form, schema = self._format, _of_objects(function)
        if form.kind == "tagged":
            arguments = TaggedGrammar(form, self.mark, self.text_value()).rules(i, function.name, schema)
            return f"f{i}: {self._head(function.name)} a{i} {self.mark(form.call_end)}\n{arguments}"
        if form.kind == "expressions":
            arguments = self._expressions.rules(i, function.name, schema)
            rule = f"f{i}: {self._head(function.name)} a{i} {self.mark(form.call_end)}\n{arguments}"
            # One terminal up to where the call can be told from text.
            opened = f"\no{i}: {quoted(f'[{function.name}{form.name_end}')} a{i}"
            return rule + opened if form.is_bare else rule
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
        ends = name_ends_of(form)
        if (
            any(mark in name for mark in (*ends, form.id_mark or ends[0], "\n"))
            or name != name.strip()
            or not _may_be_called(form, name)
        ):
            message = f"tools: the name {name[:100]!r} has a mark of this model's calls in it; choose another name"
            raise RequestError(message, param="tools")
        number = f"{self.mark(form.number_mark)} NUMBER" if form.number_mark else ""
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


def _may_be_called(form: ToolFormat, name: str) -> bool:
    return form.kind != "expressions" or EXPRESSION_NAME.match(name) is not None


def _without(name: str, call: str) -> str:
    return f"{name}: /{_ANY}+/ & ~/{call}/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
