"""Regular expressions of schemas, which are ECMA-262's, in the notation of llguidance, which is Rust's."""

from __future__ import annotations

import re
from typing import Any

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
    """Return a pattern with the same meaning in Rust. Raises ValueError for one that has none there.

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
