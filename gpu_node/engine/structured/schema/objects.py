"""Objects of schemas: the names of their properties, how many they have, and the patterns of names and strings."""

from __future__ import annotations

import re
from typing import Any

from penstock.gpu_node.engine.structured.schema.document import SchemaDocument, UnenforceableError
from penstock.gpu_node.engine.structured.schema.facts import declared_types

_ANNOTATIONS = frozenset(("$comment", "title", "description", "default", "examples", "deprecated"))
_MAX_REFERENCES = 8
_MAX_OPTIONAL = 32
"""Most optional properties of which at least one can be required."""
_META = frozenset("\\.+*?()|[]{}^$#&-~")


def with_names(document: SchemaDocument, given: dict[str, Any], path: str) -> dict[str, Any]:
    """Return an equal schema without `propertyNames`. Raises UnenforceableError if there is none."""
    rest = {keyword: value for keyword, value in given.items() if keyword != "propertyNames"}
    names = _Names(document, given["propertyNames"], path)
    if names.allows_all:
        return rest
    properties = rest.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    others = rest.get("additionalProperties", True)
    if rest.get("patternProperties"):
        raise UnenforceableError("propertyNames", path, "it cannot be enforced beside patternProperties")
    kept = {name: own if names.allows(name) else False for name, own in properties.items()}
    rest |= {"properties": kept, "additionalProperties": False}
    pattern = names.pattern_besides(properties)
    if others is False or pattern is None:
        return rest
    if names.literals is None and others not in (True, {}) and any(own is not False for own in kept.values()):
        reason = "it cannot be enforced beside properties and a schema in additionalProperties"
        raise UnenforceableError("propertyNames", path, reason)
    return rest | {"patternProperties": {pattern: others}}


def without_size(given: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return an equal schema with its size limits in a form that llguidance has, and what must hold besides."""
    rest = dict(given)
    properties = given.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    listed = given.get("required")
    required = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set[str]()
    is_closed = given.get("additionalProperties") is False and not given.get("patternProperties")
    least, most = given.get("minProperties"), given.get("maxProperties")
    if isinstance(most, int) and is_closed and len(required | properties.keys()) <= most:
        del rest["maxProperties"]
    if not isinstance(least, int) or isinstance(least, bool):
        return rest, []
    if least <= len(required):
        del rest["minProperties"]
        return rest, []
    optional = [name for name in properties if name not in required]
    if is_closed or least - len(required) != 1 or not 0 < len(optional) <= _MAX_OPTIONAL or "maxProperties" in rest:
        return rest, []
    del rest["minProperties"]
    ways: list[Any] = [{"required": [name]} for name in optional]
    ways.append({"properties": dict.fromkeys(optional, False), "required": sorted(required), "minProperties": least})
    return rest, [{"anyOf": ways}]


class _Names:
    """The names that a `propertyNames` allows."""

    def __init__(self, document: SchemaDocument, schema: Any, path: str) -> None:
        self._path = path
        for _ in range(_MAX_REFERENCES):
            if isinstance(schema, dict) and schema.keys() - _ANNOTATIONS == {"$ref"}:
                schema = document.resolve(schema["$ref"])
        if not isinstance(schema, dict | bool):
            raise UnenforceableError("propertyNames", path, "its schema is not in the document")
        own = {} if isinstance(schema, bool) else schema
        self._allows_none = schema is False or "string" not in declared_types(own)
        low, high, pattern = own.get("minLength", 0), own.get("maxLength"), own.get("pattern")
        if not isinstance(low, int) or not isinstance(high, int | None) or not isinstance(pattern, str | None):
            raise UnenforceableError("propertyNames", path, "its minLength, maxLength or pattern has the wrong type")
        self._low, self._high, self._pattern = low, high, pattern
        self.literals: list[str] | None = None
        """The allowed names, if the schema lists them."""
        known = {"type", "enum", "const", "pattern", "minLength", "maxLength", *_ANNOTATIONS}
        if unknown := sorted(own.keys() - known):
            raise UnenforceableError("propertyNames", path, f"{unknown[0]} in it cannot be enforced")
        listed = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(listed, list):
            self.literals = [name for name in listed if isinstance(name, str) and self._fits(name)]

    @property
    def allows_all(self) -> bool:
        """Whether any name is allowed."""
        has_limit = self._low > 0 or self._high is not None or self._pattern is not None or self.literals is not None
        return not self._allows_none and not has_limit

    def allows(self, name: str) -> bool:
        """Whether a name is allowed."""
        return not self._allows_none and (name in self.literals if self.literals is not None else self._fits(name))

    def pattern_besides(self, properties: dict[str, Any]) -> str | None:
        """Return a pattern of the allowed names, without listed ones that `properties` has; None if none is left."""
        if self._allows_none:
            return None
        if self.literals is not None:
            left = [name for name in self.literals if name not in properties]
            return f"^(?:{'|'.join(map(_escaped, left))})$" if left else None
        if self._pattern is None:
            return f"^[\\s\\S]{{{self._low},{'' if self._high is None else self._high}}}$"
        if self._low > 0 or self._high is not None:
            raise UnenforceableError("propertyNames", self._path, "a pattern with a length in it cannot be enforced")
        return self._pattern

    def _fits(self, name: str) -> bool:
        if len(name) < self._low or (self._high is not None and len(name) > self._high):
            return False
        if self._pattern is None:
            return True
        try:
            return re.search(rust_pattern(self._pattern), name, re.ASCII) is not None and "\n" not in name
        except (re.error, RecursionError):
            raise UnenforceableError("propertyNames", self._path, "its pattern is not understood") from None


def _escaped(name: str) -> str:
    return "".join(f"\\{char}" if char in _META else char for char in name)


_ANY_BUT_LINE_ENDS = r"[^\n\r\u2028\u2029]"
"""ECMA-262's `.`; Rust's excludes only the line feed."""
_NOTHING, _ANYTHING = r"[^\s\S]", r"[\s\S]"
_META_OF_CLASS = frozenset("[]^&-~")
"""Rust reads doubled signs as operations on sets of characters, and a bracket inside a class as another class."""
_SETS = frozenset(("\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\p", "\\P"))
"""Escapes that stand for a set of characters, so no range begins or ends with them."""
_ESCAPE = re.compile(r"\\(?:[pPux]\{[^}\\]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
"""It looks no further than the next backslash; otherwise many unclosed braces would take quadratic time."""
_FLAGS = re.compile(r"\(\?([a-zA-Z]*(?:-[a-zA-Z]*)?)[:)]")
_ALLOWED_FLAGS = frozenset("i-")
_SHOWN_CHARS = 200


def rust_pattern(pattern: str) -> str:
    """Return a schema's pattern, in ECMA-262's notation, with the same meaning in Rust's, which llguidance reads.

    Raises ValueError for a pattern that has none there.

    ECMA-262 decides: `[]` matches nothing, `[^]` matches any character, and `.` any but the four line ends.
    """
    parts, i = list[str](), 0
    while i < len(pattern):
        part, end = pattern[i], i + 1
        if part == "\\":
            part, end = _escape_at(pattern, i)
        elif part == ".":
            part = _ANY_BUT_LINE_ENDS
        elif part == "[":
            part, end = _class_at(pattern, i)
        elif part == "(":
            _check_flags(pattern, i)
        parts.append(part)
        i = end
    return "".join(parts)


def rust_patterns(schemas: Any) -> Any:
    """Return schemas by pattern, with the patterns in Rust's notation. Names that match equal ones satisfy all."""
    if not isinstance(schemas, dict):
        return schemas
    by_pattern: dict[str, list[Any]] = {}
    for pattern, schema in schemas.items():
        by_pattern.setdefault(rust_pattern(pattern), []).append(schema)
    return {pattern: found[0] if len(found) == 1 else {"allOf": found} for pattern, found in by_pattern.items()}


def _check_flags(pattern: str, i: int) -> None:
    """Refuse flags that change the meaning of what this module translates. Flag `i` means the same to both."""
    found = _FLAGS.match(pattern, i)
    if found is not None and (refused := sorted({*found[1]} - _ALLOWED_FLAGS)):
        shown = pattern if len(pattern) <= _SHOWN_CHARS else f"{pattern[:_SHOWN_CHARS]}…"
        raise ValueError(f"the flag {refused[0]} in the pattern {shown!r} cannot be enforced")


def _escape_at(pattern: str, i: int) -> tuple[str, int]:
    """Return the escape at a position, and where it ends."""
    found = _ESCAPE.match(pattern, i)
    return (found[0], found.end()) if found is not None else (pattern[i:], len(pattern))


def _class_at(pattern: str, i: int) -> tuple[str, int]:
    """Return the translated class at a position, and where it ends. A class without an end stays without one."""
    is_negated = pattern.startswith("[^", i)
    i += 2 if is_negated else 1
    if pattern.startswith("]", i):
        return _ANYTHING if is_negated else _NOTHING, i + 1
    parts = ["[^" if is_negated else "["]
    while i < len(pattern) and pattern[i] != "]":
        low, i = _atom_at(pattern, i)
        parts.append(low)
        if low[:2] in _SETS or not pattern.startswith("-", i) or i + 1 >= len(pattern) or pattern[i + 1] == "]":
            continue
        high, end = _atom_at(pattern, i + 1)
        if high[:2] not in _SETS:
            parts.append(f"-{high}")
            i = end
    return "".join(parts) + pattern[i : i + 1], i + 1


def _atom_at(pattern: str, i: int) -> tuple[str, int]:
    """Return a character or an escape of a class in Rust's notation, and where it ends."""
    char = pattern[i]
    if char == "\\":
        atom, end = _escape_at(pattern, i)
        return ("\\x08" if atom == "\\b" else atom), end
    return (f"\\{char}" if char in _META_OF_CLASS else char), i + 1
