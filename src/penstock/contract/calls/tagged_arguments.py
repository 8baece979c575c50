"""Reading of arguments that stand between tags, each on its own, and typing of their texts by the function's schema.

The values of text arguments come out while they are written. Others come out at their end, because only their whole
text tells whether it fits the type. A text that does not fit stays text, as in the models' own parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.contract.calls.checking import value_of
from penstock.contract.calls.python_values import json_of_python
from penstock.contract.calls.reading import (
    BLANK,
    FAIL,
    MAX_OPENING_CHARS,
    WAIT,
    Arguments,
    CallEnd,
    after_mark,
    num_held,
)
from penstock.contract.tool_formats import CDATA, ITEM, ToolFormat
from penstock.contract.tools import MAX_ARGUMENTS_CHARS

_MAX_KEY_CHARS = 1024
_NULLS = ("null", "none")
_TOLD_TYPES = ("string", "number", "boolean", "null", "object", "array")
_MAX_NULL_CHARS = 16
"""Characters at the start of a value that tell whether a text or null is being written."""
_TEXT = frozenset({"string"})
_ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
Types = Mapping[str, frozenset[str]]
"""The JSON types that each argument of a function may have."""


class TaggedArguments(Arguments):
    """Reads `<parameter=name>value</parameter>` and its relatives."""

    def __init__(self, form: ToolFormat, types: Types) -> None:
        self._form = form
        self._types = types
        self._untyped = _TEXT if form.untyped_is_text else _ANY
        self._key: str | None = None
        """The argument whose value is being read."""
        self._allowed = _TEXT
        self._is_streaming = False
        """Whether the value is text, so that it comes out while it is written."""
        self._pieces: list[str] = []
        """The value so far, if it comes out at its end."""
        self._start = ""
        self._num_chars = 0
        self._num_arguments = 0
        self._value_end = form.value_end
        self._depth = 0
        """Inner tags that are open in the value."""
        self._tag = re.compile(rf"{re.escape(form.argument)}(/?)([^<>]{{0,{_MAX_KEY_CHARS}}}){re.escape(form.key_end)}")

    def read(self, text: str, found: list[str]) -> tuple[int, CallEnd | None]:
        """Read on in a text. See `Arguments`."""
        at = 0
        while True:
            if self._key is None:
                at = _after_blank(text, at)
                after, end = self._read_key(text, at, found)
            else:
                after, end = self._read_value(text, at, found)
            if after == WAIT or end is not None:
                return max(at, after), end
            if after == len(text) and self._key is not None:
                return after, None
            if after == at:
                return at, None
            at = after

    def _read_key(self, text: str, at: int, found: list[str]) -> tuple[int, CallEnd | None]:
        """Read up to the value of the next argument, or the end of the call."""
        form = self._form
        ends = [after_mark(text, at, mark) for mark in (form.call_end, form.section_end) if mark]
        if max(ends) >= 0:
            found.append("}" if self._num_arguments else "{}")
            # A call may lack its own end before that of the list.
            return (max(ends) if text.startswith(form.call_end, at) else at), "whole"
        key_at = after_mark(text, at, form.argument)
        if key_at < 0:
            return (WAIT, None) if WAIT in (key_at, *ends) else (at, "broken")
        key_end = text.find(form.key_end, key_at, key_at + _MAX_KEY_CHARS)
        if key_end < 0:
            return (at, "broken") if len(text) >= key_at + _MAX_KEY_CHARS else (WAIT, None)
        value_at, is_text = self._after_value_mark(text, key_end + len(form.key_end))
        if value_at < 0:
            return (at, "broken") if value_at == FAIL else (WAIT, None)
        if form.has_newlines:
            if value_at == len(text):
                return WAIT, None
            value_at += text[value_at] == "\n"
        if form.has_cdata:
            cdata_at = after_mark(text, value_at, CDATA[0])
            if cdata_at == WAIT:
                return WAIT, None
            self._value_end = form.value_end if cdata_at == FAIL else CDATA[1] + form.value_end
            value_at = max(value_at, cdata_at)
        key = text[key_at:key_end].strip()
        if form.ends_with_key and key.startswith("/"):
            return at, "broken"
        self._open_value(key, is_text, found)
        return value_at, None

    def _after_value_mark(self, text: str, at: int) -> tuple[int, bool | None]:
        """Return the position of the value whose marks begin at `at`, and whether they say that it is text."""
        form = self._form
        if form.tells_text:
            places = [after_mark(text, at, word + form.value) for word in ("true", "false")]
            return max(places), places[0] >= 0
        if form.tells_type:
            places = [after_mark(text, at, word + form.value) for word in _TOLD_TYPES]
            return max(places), places[0] >= 0
        if not form.value:
            return at, None
        mark_at = _after_blank(text, at)
        return (FAIL if mark_at - at > MAX_OPENING_CHARS else after_mark(text, mark_at, form.value)), None

    def _open_value(self, key: str, is_text: bool | None, found: list[str]) -> None:
        self._key = key
        allowed = self._types.get(key, self._untyped)
        self._allowed = allowed if is_text is None else _TEXT if is_text else _ANY
        self._is_streaming, self._pieces, self._num_chars, self._start = False, [], 0, ""
        found.append(f"{', ' if self._num_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        if self._allowed == _TEXT:
            self._is_streaming = True
            found.append('"')

    def _read_value(self, text: str, at: int, found: list[str]) -> tuple[int, CallEnd | None]:
        """Read on in the value of an argument, up to its closing mark or to where that may have begun."""
        if self._form.ends_with_key:
            certain, end, after = self._end_by_tags(text, at)
        else:
            mark = self._value_end
            certain = end = text.find(mark, at)
            after = end + len(mark)
            if end < 0:
                certain = len(text) - num_held(text[max(at, len(text) - len(mark)) :], mark)
        if self._form.has_newlines and certain > at and text[certain - 1] == "\n":
            certain -= 1
        self._num_chars += certain - at
        if self._num_chars > MAX_ARGUMENTS_CHARS:
            return at, "broken"
        self._add(text[at:certain], found)
        if end < 0:
            return certain, None
        found.append('"' if self._is_streaming else self._typed("".join(self._pieces)))
        self._key = None
        return after, None

    def _end_by_tags(self, text: str, at: int) -> tuple[int, int, int]:
        """Return where the value is certain, where it ends or -1, and the position behind its closing tag."""
        last = at
        for tag in self._tag.finditer(text, at):
            if tag[1] and not self._depth:
                return tag.start(), tag.start(), tag.end()
            self._depth += -1 if tag[1] else 1
            last = tag.end()
        argument = self._form.argument
        begun = text.rfind(argument, last)
        if begun >= 0 and len(text) - begun <= _MAX_KEY_CHARS + len(argument):
            return begun, -1, -1
        return len(text) - num_held(text[max(last, len(text) - len(argument)) :], argument), -1, -1

    def _typed(self, text: str) -> str:
        if self._form.ends_with_key and text.lstrip().startswith(self._form.argument):
            return json.dumps(text if (inner := _inner_value(text, self._tag)) is None else inner, ensure_ascii=False)
        return typed(text, self._allowed)

    def _add(self, new: str, found: list[str]) -> None:
        """Add text to the value. It comes out as soon as it is certain that the value is text."""
        if not self._is_streaming:
            self._pieces.append(new)
            if len(self._start) == _MAX_NULL_CHARS:
                return
            self._start += new[: _MAX_NULL_CHARS - len(self._start)]
            word = self._start.strip().lower()
            if self._allowed != {"null", "string"} or any(null.startswith(word) for null in _NULLS):
                return
            self._is_streaming = True
            new = "".join(self._pieces)
            found.append('"')
        found.append(_inside(new))


_MAX_DEPTH = 200
"""Tags in tags. A text with more of them stays text."""
_OF_LEAVES = frozenset({"boolean", "integer", "number"})


def _inner_value(text: str, tag: re.Pattern[str]) -> Any:
    """Return the value whose members are tags; None if the tags do not fit. Takes linear time."""
    open_tags: list[tuple[str, list[tuple[str, Any]], list[str]]] = [("", [], [])]
    at = 0
    for one in tag.finditer(text):
        open_tags[-1][2].append(text[at : one.start()])
        at = one.end()
        name = one[2]
        if not one[1]:
            if len(open_tags) == _MAX_DEPTH:
                return None
            open_tags.append((name, [], []))
            continue
        own, members, texts = open_tags.pop()
        if not open_tags or own != name:
            return None
        open_tags[-1][1].append((own, _of_members(members, texts)))
    return _of_members(open_tags[0][1], []) if len(open_tags) == 1 else None


def _of_members(members: list[tuple[str, Any]], texts: list[str]) -> Any:
    if not members:
        return json.loads(typed("".join(texts), _OF_LEAVES))
    is_list = all(name == ITEM for name, _ in members)
    return [value for _, value in members] if is_list else dict(members)


def _after_blank(text: str, at: int) -> int:
    return BLANK.match(text, at).end()  # type: ignore[union-attr]


def _inside(text: str) -> str:
    """Return a text as it stands inside the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed(text: str, allowed: frozenset[str]) -> str:
    """Return the JSON of a value whose text a model wrote: of the first allowed type that it fits, else a string."""
    stripped = text.strip()
    for kind, read in _READERS.items():
        if kind in allowed and (value := read(stripped)) is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


_MAX_NUMBER_CHARS = 1 << 12
_MAX_PYTHON_CHARS = 1 << 15
"""Characters of a list or object in the words and quotes of Python. A longer one stays text, unless it is JSON."""


def _number_of(*kinds: type) -> Callable[[str], str | None]:
    def read(text: str) -> str | None:
        return _checked(text, kinds) if len(text) <= _MAX_NUMBER_CHARS else None

    return read


def _container_of(bracket: str, kind: type) -> Callable[[str], str | None]:
    def read(text: str) -> str | None:
        if not text.startswith(bracket):
            return None
        source = _checked(text, (kind,))
        if source is None and len(text) <= _MAX_PYTHON_CHARS:
            source = _checked(json_of_python(text) or "", (kind,))
        return source

    return read


def _checked(text: str, kinds: tuple[type, ...]) -> str | None:
    """Return a text that is JSON of one of these types, or None."""
    try:
        return text if type(value_of(text)) in kinds else None
    except ValueError:
        return None


_READERS: dict[str, Callable[[str], str | None]] = {
    "null": lambda text: "null" if text.lower() in _NULLS else None,
    "boolean": lambda text: text.lower() if text.lower() in ("true", "false") else None,
    "integer": _number_of(int),
    "number": _number_of(int, float),
    "object": _container_of("{", dict),
    "array": _container_of("[", list),
}


def types_of(tools: str | None) -> dict[str, dict[str, frozenset[str]]]:
    """Return the types of the arguments of each function. `tools`: OpenAI's list as JSON text."""
    functions = [tool["function"] for tool in json.loads(tools or "[]")]
    return {one["name"]: types_in(one.get("parameters")) for one in functions}


def types_in(schema: Any) -> dict[str, frozenset[str]]:
    """Return the types of a function's arguments by its schema, without those of which it does not say any."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    found = {key: _allowed_by(one, schema, 0) for key, one in properties.items()}
    return {key: types for key, types in found.items() if types}


_MAX_DEPTH = 8
_OF_VALUES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _allowed_by(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Return the types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return _allowed_by(_target(schema["$ref"], root), root, depth + 1)
    kinds = schema.get("type")
    if kinds is not None:
        return frozenset(kinds if isinstance(kinds, list) else [kinds]) & _ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_OF_VALUES.get(type(value), "null") for value in values)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(members := schema.get(name), list):
            return frozenset().union(*(_allowed_by(one, root, depth + 1) for one in members))
    return frozenset({"object"}) if isinstance(schema.get("properties"), dict) else frozenset()


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
