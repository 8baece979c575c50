"""Grammars for arguments between tags: each value is held to its own schema, and texts stand without quotes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.contract.calls.tagged_arguments import types_in
from penstock.contract.errors import RequestError
from penstock.contract.tool_formats import ToolFormat
from penstock.contract.tools import TEXT_ARGUMENT, text_grammar_of
from penstock.gpu_node.engine.structured.quoted_grammar import QuotingError, quoted_grammar

OF_OBJECTS = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$schema",
        "$defs",
        "definitions",
    )
)
"""The keywords of a function's schema that a grammar of tags can hold."""
ONLY_SAID = frozenset(("type", "title", "description", "default", "examples", "deprecated", "$comment"))
"""The keywords of a value's schema that do not limit a text."""
DEFINITIONS = ("$defs", "definitions")


def quoted(text: str) -> str:
    """Return a text as a rule has it."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the rest of a rule for JSON. The worker finds it by this form and rewrites the schema.

    Characters outside ASCII stay as they are, because escapes would take up to three times as many bytes.
    """
    return ": %json " + json.dumps(schema, ensure_ascii=False)


class TaggedGrammar:
    """Writes the rules for one function's arguments. Rules of a function have its number in their names."""

    def __init__(self, form: ToolFormat, mark: Callable[[str], str], text_value: str) -> None:
        """mark: returns what stands for a mark in a rule. text_value: the rule for any text and its closing mark."""
        self._form, self._mark, self._text_value = form, mark, text_value

    def rules(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        """Return the rule `a{i}` and those that it uses. Raises RequestError for a schema that no grammar can hold."""
        padding = quoted(self._form.padding) if self._form.padding else ""
        unknown = sorted(schema.keys() - OF_OBJECTS)
        if unknown:
            raise unheld(name, f"{unknown[0]} beside the properties")
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not properties and schema.get("additionalProperties", True) is not False:
            return f"a{i}: {padding} ({self._argument('KEY', self._any_value())} {padding})*"
        if missing := [key for key in required if key not in properties]:
            raise unheld(name, f"the required property {missing[0]!r} without a schema")
        parts, rules = [padding], list[str]()
        grammar = text_grammar_of(schema)
        types = types_in(schema)
        for j, (key, value) in enumerate(properties.items()):
            if self._form.key_end in key or key != key.strip() or not key:
                raise unheld(name, f"the property {key!r}, whose name holds a mark of this model's calls")
            if grammar is not None and key == TEXT_ARGUMENT:
                held = self._text_of_grammar(f"v{i}_{j}", name, *grammar, rules)
            else:
                held = self._value(f"v{i}_{j}", name, key, value, schema, types.get(key, frozenset()), rules)
            part = f"{self._argument(quoted(key), held)} {padding}"
            parts.append(part if key in required else f"({part})?")
        return "\n".join([f"a{i}: {' '.join(parts)}", *rules])

    def _argument(self, key: str, value: str) -> str:
        end = f"KEY {self._mark(self._form.key_end)}" if self._form.ends_with_key else ""
        return f"{self._mark(self._form.argument)} {key} {self._mark(self._form.key_end)} {value} {end}"

    def _opened(self, *, is_text: bool, kinds: frozenset[str] = frozenset()) -> str:
        """Return what stands between the mark behind a key and the value."""
        form = self._form
        told = quoted("true" if is_text else "false") if form.tells_text else ""
        if form.tells_type:
            words = ["string"] if is_text else sorted({"number" if one == "integer" else one for one in kinds})
            told = f"({' | '.join(map(quoted, words))})"
        newline = quoted("\n") if form.has_newlines else ""
        return f"{told} {self._mark(form.value)} {newline}"

    def _closed(self) -> str:
        newline = quoted("\n") if self._form.has_newlines else ""
        return f"{newline} {self._mark(self._form.value_end)}"

    def _any_value(self) -> str:
        return f"{self._opened(is_text=True)} {self._text_value}"

    def _value(
        self,
        rule: str,
        name: str,
        key: str,
        schema: Any,
        root: Mapping[str, Any],
        types: frozenset[str],
        rules: list[str],
    ) -> str:
        """Return the rule for a value between its marks. Add to `rules` what it needs."""
        own = schema if isinstance(schema, dict) else {}
        texts = own.get("enum", [own["const"]] if "const" in own else None)
        if types == {"string"} and isinstance(texts, list) and all(isinstance(one, str) for one in texts):
            if any(self._form.value_end in one for one in texts):
                raise unheld(name, f"a value of {key!r} that holds a mark of this model's calls")
            listed = " | ".join(quoted(one) if one else '""' for one in texts)
            return f"{self._opened(is_text=True)} ({listed}) {self._closed()}"
        if "string" in types or not types:
            if not is_any_text(own):
                raise unheld(name, f"the limits of the text {key!r}")
            return self._any_value()
        definitions = {one: root[one] for one in DEFINITIONS if one in root}
        if '"$ref": "#' in json.dumps(own) and not definitions:
            raise unheld(name, f"the reference in {key!r}")
        rules.append(rule + json_rule(own | definitions))
        return f"{self._opened(is_text=False, kinds=types)} {rule} {self._closed()}"

    def _text_of_grammar(self, rule: str, name: str, syntax: str, definition: str, rules: list[str]) -> str:
        try:
            quoted_grammar(syntax, definition)
        except QuotingError as error:
            raise RequestError(f"tools: the grammar of {name!r} cannot be enforced: {error}", param="tools") from None
        if syntax == "regex":
            escaped = definition.replace("/", "\\/")
            rules.append(f"{rule}: /{escaped}/")
        else:
            rules.append(f"{rule}: %lark {{\n{definition}\n}}")
        return f"{self._opened(is_text=True)} {rule} {self._closed()}"


def is_any_text(schema: Mapping[str, Any]) -> bool:
    """Whether any text satisfies a schema, or is read as another type that satisfies it."""
    if not schema.keys() <= ONLY_SAID | {"anyOf", "oneOf"}:
        return False
    members = schema.get("anyOf", schema.get("oneOf", []))
    return all(isinstance(one, dict) and one.keys() <= ONLY_SAID for one in members)


def unheld(name: str, what: str) -> RequestError:
    message = f"tools: in this model's format of calls no grammar can hold {what} of function {name[:100]!r}"
    return RequestError(message, param="tools")
