"""The text input of a custom tool, which the model writes as the only argument of a function."""

from __future__ import annotations

import json
import re
from typing import Literal

from penstock.contract.tools import TEXT_ARGUMENT

_OPENING = re.compile(rf'\s*\{{\s*"{TEXT_ARGUMENT}"\s*:\s*"')
_COMPACT_OPENING = f'{{"{TEXT_ARGUMENT}":"'
_MAX_OPENING_CHARS = 64
"""Longer arguments without the opening have another form."""
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^u])")
_MAX_ESCAPE_CHARS = 12
"""Characters of the longest escape, a pair of surrogates."""
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]")


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this input."""
    return json.dumps({TEXT_ARGUMENT: text}, ensure_ascii=False)


class TextInputReader:
    """Reads the input from the arguments of one call, piece by piece. The result does not depend on the pieces.

    Arguments of another form, which a model may write if no grammar holds it, are the input as they are. But if an
    object has a text as its only member, that text is the input, whatever its name is.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state: Literal["opening", "text", "end", "other"] = "opening"

    def push(self, piece: str) -> str:
        """Add a piece of the arguments, and return the text that is certain now."""
        if self._state == "end":
            return ""
        self._held += piece
        if self._state == "opening":
            self._open()
        return self._decoded() if self._state == "text" else ""

    def end(self) -> str:
        """Return the rest of the text at the end of the arguments."""
        held, self._held = self._held, ""
        if self._state in ("text", "end"):
            return ""
        try:
            found = json.loads(held)
        except ValueError:
            return held
        values = list(found.values()) if isinstance(found, dict) else []
        return values[0] if len(values) == 1 and isinstance(values[0], str) else held

    def _open(self) -> None:
        opening = _OPENING.match(self._held)
        if opening is not None and opening.end() <= _MAX_OPENING_CHARS:
            self._held = self._held[opening.end() :]
            self._state = "text"
        elif len(self._held) > _MAX_OPENING_CHARS or not _COMPACT_OPENING.startswith("".join(self._held.split())):
            self._state = "other"

    def _decoded(self) -> str:
        text, at, parts = self._held, 0, list[str]()
        while at < len(text):
            if text[at] == '"':
                self._state, text = "end", ""
                break
            plain = _PLAIN.match(text, at)
            if plain is not None:
                parts.append(plain[0])
                at = plain.end()
                continue
            escape = _ESCAPE.match(text, at)
            waits = len(text) - at < _MAX_ESCAPE_CHARS and _HIGH_SURROGATE.match(text, at)
            if escape is None or (waits and len(escape[0]) < _MAX_ESCAPE_CHARS):
                break
            parts.append(json.loads(f'"{escape[0]}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            at = escape.end()
        self._held = text[at:]
        return "".join(parts)
