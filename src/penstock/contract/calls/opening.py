"""Where a call begins inside reasoning that the model did not close.

Models such as Qwen3.5 and Kimi K2 sometimes write a call without the mark that ends their reasoning. vLLM's parsers of
both let the mark of a call end the reasoning. A reasoning may also mention that mark, so here the mark counts only if
the name of an offered function follows it, in the format's own writing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Self

from penstock.contract.calls.reading import BLANK, MAX_OPENING_CHARS, WAIT, after_mark
from penstock.contract.tool_formats import ToolFormat
from penstock.contract.tools import MAX_FUNCTION_NAME_CHARS


class CallOpening:
    """The beginning of a call, from its mark to the function's name."""

    __slots__ = ("_parts", "mark", "mark_bytes")

    max_bytes = 4 * (MAX_OPENING_CHARS + MAX_FUNCTION_NAME_CHARS + 1)
    """Bytes of a text that tell enough of it."""

    def __init__(self, form: ToolFormat, names: Sequence[str]) -> None:
        first, *further = _parts_before_name(form)
        self.mark, self.mark_bytes = first, first.encode()
        self._parts = [[part] for part in further] + [sorted(names, key=len, reverse=True)]

    @classmethod
    def of(cls, form: ToolFormat, names: Sequence[str]) -> Self | None:
        """Return the opening of the format's calls; None if no mark begins them, or if a header does."""
        is_told = bool(form.header or form.id_end or form.is_fenced or not (form.section or form.call))
        return None if is_told or not names or form.kind == "none" else cls(form, names)

    def is_at_start(self, text: str) -> bool | None:
        """Return whether a text that begins with the mark goes on as a call; None if it is too short to tell."""
        at = len(self.mark)
        for options in self._parts:
            blank = BLANK.match(text, at)
            at = at if blank is None else blank.end()
            if at > MAX_OPENING_CHARS:
                return False
            ends = [after_mark(text, at, option) for option in options]
            may_be_longer = WAIT in ends
            at = max(ends)
            if at < 0:
                return None if may_be_longer else False
        if at < len(text) and not (text[at].isalnum() or text[at] in "_-."):
            return True
        return None if may_be_longer or at == len(text) else False


def names_in(tools: str) -> tuple[str, ...]:
    """Return the names of the offered functions. `tools`: OpenAI's list as JSON text."""
    return tuple(tool["function"]["name"] for tool in json.loads(tools))


def _parts_before_name(form: ToolFormat) -> list[str]:
    parts = [form.section, form.call]
    if form.is_list:
        parts.append("[")
    parts += ["{", json.dumps(form.name_key), ":", '"'] if form.kind == "json" else [form.name_prefix.strip()]
    return [part for part in parts if part]
