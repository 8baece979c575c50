"""Values that a model or its template wrote as Python writes them."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(
    r"""[\s,:\[\]{}]+|(?P<number>-?[0-9][0-9.eE+\-]*)|(?P<word>[A-Za-z]+)"""
    r"""|'(?P<single>(?:[^'\\]|\\.)*+)'|"(?P<double>(?:[^"\\]|\\.)*+)\"""",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def json_of_python(text: str) -> str | None:
    """Return the JSON of a literal of Python, or None for a text with anything else in it. Takes linear time.

    The brackets are not checked: the caller parses the result.
    """
    pieces, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        kind, at = token.lastgroup, token.end()
        if kind == "word":
            if token[0] not in _WORDS:
                return None
            pieces.append(_WORDS[token[0]])
        elif kind in ("single", "double"):
            pieces.append(json.dumps(_ESCAPE.sub(_unescaped, token[kind]), ensure_ascii=False))
        else:
            pieces.append(token[0])
    return "".join(pieces)


def _unescaped(escape: re.Match[str]) -> str:
    said = escape[1]
    if len(said) > 1:
        number = int(said[1:], 16)
        return chr(number) if number <= 0x10FFFF else said
    return _ESCAPED.get(said, said)
