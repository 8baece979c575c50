"""Answers in messages with headers: reasoning is separated, and calls come out as their format writes them."""

from __future__ import annotations

import re
from typing import Literal

from penstock.contract.calls.reading import num_held
from penstock.contract.tool_formats import ToolFormat

MAX_HEADER_CHARS = 512
"""Characters of a header. More are text: the answer has no header, as if it continued a message."""
_NAME = re.compile(r"[^\s<>{}\"']+")
_Part = Literal["header", "reasoning", "text", "call"]


class MessageReader:
    """Reads an answer that begins inside the header of its first message."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._marks = (form.header, *form.message_ends)
        self._ends = re.compile("|".join(map(re.escape, self._marks)))
        self._part: _Part = "header"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add a piece of text. Return the reasoning and the rest of the answer, as far as both are certain."""
        self._held += text
        reasoning, rest = list[str](), list[str]()
        while self._read(reasoning, rest):
            pass
        return "".join(reasoning), "".join(rest)

    def end(self) -> tuple[str, str]:
        """Return what is left at the end of the text."""
        left, self._held = self._held, ""
        if self._part == "reasoning":
            return left, ""
        if self._part == "header":
            # A header that was cut off says nothing.
            begun = (self._form.header, self._form.reasoning_header, self._form.text_header)
            return "", "" if any(mark and mark in left for mark in begun) else left
        return "", left

    def _read(self, reasoning: list[str], rest: list[str]) -> bool:
        """Read on in the held text. Return False if more is needed."""
        if self._part == "header":
            return self._read_header(rest)
        out = reasoning if self._part == "reasoning" else rest
        end = self._ends.search(self._held)
        if end is None:
            certain = len(self._held) - max(num_held(self._held, mark) for mark in self._marks)
            out.append(self._held[:certain])
            self._held = self._held[certain:]
            return False
        out.append(self._held[: end.start()])
        if self._part == "call":
            out.append(self._form.call_end)
        self._held = self._held[end.end() :]
        self._part = "header"
        return True

    def _read_header(self, rest: list[str]) -> bool:
        form = self._form
        end = self._held.find(form.header_end, 0, MAX_HEADER_CHARS)
        if end < 0:
            if len(self._held) < MAX_HEADER_CHARS:
                return False
            self._part = "text"
            return True
        header = self._held[:end]
        self._held = self._held[end + len(form.header_end) :]
        said = header.rpartition(form.header)[2]
        name = self._name_in(said)
        if form.reasoning_header and form.reasoning_header in said:
            self._part = "reasoning"
        elif name:
            self._part = "call"
            rest.append(f"{form.call}{name}{form.name_end}")
        else:
            self._part = "text"
            if form.text_header and said.strip() != form.text_header:
                rest.append(header + form.header_end)
        return True

    def _name_in(self, header: str) -> str | None:
        """Return the function that a header names."""
        form = self._form
        if form.text_header:
            name = header.strip()
            return name if name != form.text_header and _NAME.fullmatch(name) else None
        at = header.find(form.call_header) if form.call_header else -1
        found = _NAME.match(header, at + len(form.call_header)) if at >= 0 else None
        return found[0] if found else None


class MarkDropper:
    """Drops the marks around the text of an answer."""

    def __init__(self, form: ToolFormat) -> None:
        self._marks = tuple(mark for mark in (form.text_opening, form.text_end, *form.dropped) if mark)
        self._any = re.compile("|".join(map(re.escape, self._marks)))
        self._held = ""

    def push(self, text: str) -> str:
        """Add a piece of text. Return what is certain."""
        self._held += text
        said, at = list[str](), 0
        for mark in self._any.finditer(self._held):
            said.append(self._held[at : mark.start()])
            at = mark.end()
        certain = len(self._held) - max(num_held(self._held[at:], mark) for mark in self._marks)
        said.append(self._held[at:certain])
        self._held = self._held[certain:]
        return "".join(said)

    def end(self) -> str:
        """Return what is left, at the end of the text or where a call begins."""
        left, self._held = self._held, ""
        return left
