"""Values that a model or its template wrote as Python writes them."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(r"[\s,:\[\]{}]+|(?P<number>-?[0-9][0-9.eE+\-]*)|(?P<word>[A-Za-z]+)")
_INSIDE = {quote: re.compile(rf"(?:[^{quote}\\]++|\\.){{0,1000}}", re.DOTALL) for quote in ("'", '"')}
"""A part of the inside of a string, by its quote. Without a limit it would take memory for each escape."""
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def json_of_python(text: str) -> str | None:
    """Return the JSON of a literal of Python, or None for a text with anything else in it. Takes linear time.

    The brackets are not checked: the caller parses the result.
    """
    pieces, at = [], 0
    while at < len(text):
        if text[at] in _INSIDE:
            begin, at = at + 1, _end_of_string(text, at)
            if at > len(text):
                return None
            pieces.append(json.dumps(_ESCAPE.sub(_unescaped, text[begin : at - 1]), ensure_ascii=False))
            continue
        token = _TOKEN.match(text, at)
        if token is None or (token.lastgroup == "word" and token[0] not in _WORDS):
            return None
        at = token.end()
        pieces.append(_WORDS.get(token[0], token[0]))
    return "".join(pieces)


def _end_of_string(text: str, at: int) -> int:
    """Return the position behind the string whose quote is at `at`; beyond the text for one without an end."""
    quote = text[at]
    at += 1
    while at < len(text) and text[at] != quote:
        end = _INSIDE[quote].match(text, at).end()  # type: ignore[union-attr]
        if end == at:
            return len(text) + 1
        at = end
    return at + 1


def _unescaped(escape: re.Match[str]) -> str:
    said = escape[1]
    if len(said) > 1:
        number = int(said[1:], 16)
        return chr(number) if number <= 0x10FFFF else said
    return _ESCAPED.get(said, said)
