"""Grammars for arguments of calls that are expressions: `f(city="Bern")`, or values with marks around their texts.

In the notation of Python, values are JSON, which the reader takes too, so a schema holds as in any JSON. Only `True`,
`False` and `None` as arguments are written as in Python. A format with marks of its own gets rules for each schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.contract.calls.writing import literal
from penstock.contract.errors import RequestError
from penstock.contract.tool_formats import ToolFormat
from penstock.contract.tools import TEXT_ARGUMENT, text_grammar_of
from penstock.gpu_node.engine.structured.quoted_grammar import QuotingError, quoted_grammar
from penstock.gpu_node.engine.structured.tagged_grammar import (
    DEFINITIONS,
    OF_OBJECTS,
    ONLY_SAID,
    is_any_text,
    json_rule,
    quoted,
    unheld,
)

_MAX_DEPTH = 32
_NAME = re.compile(r"[^\W\d]\w*")
_OF_ARRAYS = ONLY_SAID | {"items", "minItems", "maxItems"}
_OF_NUMBERS = ONLY_SAID | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


class ExpressionGrammar:
    """Writes the rules for one function's arguments. Rules of a function have its number in their names."""

    def __init__(self, form: ToolFormat, mark: Callable[[str], str], text_value: str) -> None:
        """mark: returns what stands for a mark in a rule. text_value: the rule for any text and its closing mark."""
        self._form, self._mark, self._text_value = form, mark, text_value
        self._rules: list[str] = []
        self._prefix = self._name = ""
        self._root: Mapping[str, Any] = {}
        # Of one request.
        self._of_references: dict[str, str] = {}

    def common_rules(self) -> list[str]:
        """Return the rules that the arguments of all functions share."""
        comma = 'comma: "," " "?' if self._form.comma != "," else 'comma: ","'
        if not self._form.text_mark:
            return [comma, f"any_value{json_rule({})}", "any_key: NAME", r"NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/"]
        text = f"{self._mark(self._form.text_mark)} {self._text_value}"
        pair = f"any_key {quoted(self._form.assigns)} any_value"
        return [
            comma,
            f'any_value: {text} | any_number | "true" | "false" | "null" | "[" (any_value (comma any_value)*)? "]"'
            f' | "{{" ({pair} (comma {pair})*)? "}}"',
            f"any_number{json_rule({'type': 'number'})}",
            "any_key: NAME",
            r"NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
        ]

    def rules(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        """Return the rule `a{i}` and those that it uses. Raises RequestError for a schema that no grammar can hold."""
        self._rules, self._prefix, self._name, self._root = [], f"e{i}", name, schema
        # Of one request.
        self._of_references = {}
        grammar = text_grammar_of(schema)
        members = self._members(schema, self._form.assigns, 0, grammar)
        return "\n".join([f"a{i}: {members} {quoted(self._form.arguments_end)}", *self._rules])

    def _rule(self, body: str) -> str:
        """Add a rule. Return its name."""
        rule = f"{self._prefix}_{len(self._rules)}"
        self._rules.append(f"{rule}{body}" if body.startswith(": %") else f"{rule}: {body}")
        return rule

    def _members(
        self, schema: Mapping[str, Any], assigns: str, depth: int, grammar: tuple[str, str] | None = None
    ) -> str:
        """Return what stands between the brackets of an object or a call."""
        if unknown := sorted(schema.keys() - OF_OBJECTS):
            raise unheld(self._name, f"{unknown[0]} beside the properties")
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not properties and schema.get("additionalProperties", True) is not False:
            pair = f"any_key {quoted(assigns)} any_value"
            return f"({pair} (comma {pair})*)?"
        if missing := [key for key in required if key not in properties]:
            raise unheld(self._name, f"the required property {missing[0]!r} without a schema")
        # From the last member on, since the rule of each names those of the next.
        begun, fresh = '""', '""'
        for key, value in reversed(properties.items()):
            if _NAME.fullmatch(key) is None:
                raise unheld(self._name, f"the property {key!r}, whose name holds a mark of this model's calls")
            if grammar is not None and key == TEXT_ARGUMENT:
                held = self._text_of_grammar(*grammar)
            else:
                held = self._value(key, value, depth + 1)
            pair = f"{quoted(key + assigns)} {held}"
            if key in required:
                begun, fresh = self._rule(f"comma {pair} {begun}"), self._rule(f"{pair} {begun}")
            else:
                begun, fresh = (self._rule(f"comma {pair} {begun} | {begun}"), self._rule(f"{pair} {begun} | {fresh}"))
        return fresh

    def _value(self, key: str, schema: Any, depth: int) -> str:
        """Return the rule for one value."""
        if depth > _MAX_DEPTH:
            raise unheld(self._name, f"the depth of {key!r}")
        own = schema if isinstance(schema, dict) else {}
        if not self._form.text_mark:
            return self._json_value(own, key)
        if isinstance(reference := own.get("$ref"), str):
            return self._referred(key, reference, depth)
        values = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(values, list):
            return f"({' | '.join(self._constant(key, value) for value in values)})"
        for choice in ("anyOf", "oneOf"):
            if isinstance(members := own.get(choice), list) and own.keys() <= ONLY_SAID | {choice}:
                return f"({' | '.join(self._value(key, one, depth + 1) for one in members)})"
        kinds = own.get("type")
        if isinstance(kinds, list):
            return f"({' | '.join(self._value(key, own | {'type': kind}, depth + 1) for kind in kinds)})"
        return self._of_type(key, own, kinds, depth)

    def _of_type(self, key: str, own: Mapping[str, Any], kind: Any, depth: int) -> str:
        if kind == "string" and is_any_text(own):
            return f"{self._mark(self._form.text_mark)} {self._text_value}"
        if kind in ("integer", "number") and own.keys() <= _OF_NUMBERS:
            return self._rule(json_rule(own))
        if kind == "boolean" and own.keys() <= ONLY_SAID:
            return '("true" | "false")'
        if kind == "null":
            return '"null"'
        if kind == "array" and own.keys() <= _OF_ARRAYS:
            return self._array(key, own, depth)
        if kind == "object":
            return f'"{{" {self._members(own, ":", depth)} "}}"'
        if kind is None and own.keys() <= ONLY_SAID:
            return "any_value"
        raise unheld(self._name, f"the limits of {key!r}")

    def _array(self, key: str, own: Mapping[str, Any], depth: int) -> str:
        item = self._value(key, own.get("items", {}), depth + 1)
        least, most = own.get("minItems", 0), own.get("maxItems")
        if not isinstance(least, int) or not (most is None or (isinstance(most, int) and most >= max(1, least))):
            raise unheld(self._name, f"the length of {key!r}")
        more = f"(comma {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _json_value(self, own: Mapping[str, Any], key: str) -> str:
        if own.keys() <= ONLY_SAID and own.get("type") == "boolean":
            return '("True" | "False")'
        if own.keys() <= ONLY_SAID and own.get("type") == "null":
            return '"None"'
        definitions = {one: self._root[one] for one in DEFINITIONS if one in self._root}
        if '"$ref": "#' in json.dumps(own) and not definitions:
            raise unheld(self._name, f"the reference in {key!r}")
        return self._rule(json_rule({**own, **definitions}))

    def _constant(self, key: str, value: Any) -> str:
        if isinstance(value, dict | list):
            raise unheld(self._name, f"a value of {key!r} that is an object or a list")
        if not isinstance(value, str):
            return quoted(literal(self._form, value))
        if self._form.text_mark in value:
            raise unheld(self._name, f"a value of {key!r} that holds a mark of this model's calls")
        mark = self._mark(self._form.text_mark)
        return f"{mark} {quoted(value)} {mark}" if value else f"{mark} {mark}"

    def _referred(self, key: str, reference: str, depth: int) -> str:
        """Return the rule of a referred schema. A schema may refer to itself."""
        if reference not in self._of_references:
            found: Any = self._root if reference.startswith("#/") else None
            for part in reference[2:].split("/"):
                found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
            if found is None:
                raise unheld(self._name, f"the reference in {key!r}")
            rule = f"{self._prefix}_r{len(self._of_references)}"
            self._of_references[reference] = rule
            body = self._value(key, found, depth + 1)
            self._rules.append(f"{rule}: {body}")
        return self._of_references[reference]

    def _text_of_grammar(self, syntax: str, definition: str) -> str:
        try:
            text = quoted_grammar(syntax, definition)
        except QuotingError as error:
            message = f"tools: the grammar of {self._name!r} cannot be enforced: {error}"
            raise RequestError(message, param="tools") from None
        if not self._form.text_mark:
            inner = self._rule(f": %lark {{\n{text}\n}}")
            return f'"\\"" {inner} "\\""'
        if syntax == "regex":
            escaped = definition.replace("/", "\\/")
            inner = self._rule(f"/{escaped}/")
        else:
            inner = self._rule(f": %lark {{\n{definition}\n}}")
        mark = self._mark(self._form.text_mark)
        return f"{mark} {inner} {mark}"
