"""Text that models, files and callers have written, without what would steer a terminal."""

from __future__ import annotations

import re
import unicodedata

_COLOR = re.compile(r"(\x1b\[[\d;]*m)")


def without_controls(text: str) -> str:
    """Return a text without its control characters; lines and tabs stay."""
    return text if text.isprintable() else "".join(filter(_is_shown, text))


def only_colors(text: str) -> str:
    """Return a line of a process's log without control characters, but with its colors."""
    if text.isprintable():
        return text
    return "".join(part if at % 2 else without_controls(part) for at, part in enumerate(_COLOR.split(text)))


def _is_shown(character: str) -> bool:
    return character in "\n\t" or unicodedata.category(character) != "Cc"
