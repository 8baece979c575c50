"""Regular expressions of schemas, which are ECMAScript's, in the notation of llguidance, which is Rust's."""

from __future__ import annotations

from typing import Any

_SET_OPERATORS = ("&&", "--", "~~")
"""Rust reads them as operations on sets of characters, and a bracket inside a class as another class."""


def rust_pattern(pattern: str) -> str:
    """Return a pattern with the same meaning in Rust: inside of a class, brackets and doubled signs are characters."""
    if "[" not in pattern:
        return pattern
    parts, is_in_class, i = list[str](), False, 0
    while i < len(pattern):
        char, pair = pattern[i], pattern[i : i + 2]
        if char == "\\":
            parts.append(pair)
            i += 2
            continue
        if is_in_class and pair in _SET_OPERATORS:
            parts.append(f"{char}\\{char}" if char == "-" else f"\\{char}\\{char}")
            i += 2
            continue
        parts.append("\\[" if is_in_class and char == "[" else char)
        is_in_class = char != "]" if is_in_class else char == "["
        i += 1
    return "".join(parts)


def rust_patterns(schemas: Any) -> Any:
    """Return schemas by pattern, with the patterns in Rust's notation."""
    return {rust_pattern(pattern): one for pattern, one in schemas.items()} if isinstance(schemas, dict) else schemas
