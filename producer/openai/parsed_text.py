"""What a choice's text says: reasoning, content and tool calls, told apart as the text comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.producer.openai.tool_calls import CALL_FORMS, Call, ToolCallReader, num_held

_OPEN, _CLOSE = "<think>", "</think>"
_CHARS_READ_AT_ONCE = 8 << 10
_Place = Literal["before", "inside", "behind"]
"""Where a reader stands, seen from the reasoning."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A part of what a choice says, or all of it."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, more: ParsedText) -> ParsedText:
        return ParsedText(self.content + more.content, self.reasoning + more.reasoning, self.calls + more.calls)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How an answer is read; the names are those of a pool's record, unknown ones read nothing."""

    tool_parser: str = "none"
    reasoning_parser: str = "none"
    one_call: bool = False
    """Calls behind the first one are left out."""
    is_named: bool = False
    """The caller said which function is called, so that a call is no reason to end."""

    def read(self, text: str) -> ParsedText:
        """All that a whole text says."""
        if self == PLAIN:
            return ParsedText(text)
        reader, said = AnswerReader(self), ParsedText()
        # Behind each call the rest is copied: in slices, many calls cost no more than few.
        for at in range(0, len(text), _CHARS_READ_AT_ONCE):
            said += reader.push(text[at : at + _CHARS_READ_AT_ONCE])
        return said + reader.end()


PLAIN = AnswerFormat()
"""All is content."""


class AnswerReader:
    """Reads one choice's text, piece by piece."""

    def __init__(self, form: AnswerFormat) -> None:
        call_form = CALL_FORMS.get(form.tool_parser)
        self._one_call = form.one_call
        self._calls = ToolCallReader(call_form) if call_form else None
        self._reasoning = _ReasoningReader(form.reasoning_parser)

    def push(self, text: str) -> ParsedText:
        """What a further piece makes certain."""
        reasoning, rest = self._reasoning.push(text)
        content, calls = self._calls.push(rest) if self._calls else (rest, ())
        return ParsedText(content, reasoning, self._wanted(calls))

    def end(self) -> ParsedText:
        """What is left when the text ends."""
        reasoning, rest = self._reasoning.end()
        if self._calls is None:
            return ParsedText(rest, reasoning)
        (content, calls), (last, last_calls) = self._calls.push(rest), self._calls.end()
        return ParsedText(content + last, reasoning, self._wanted(calls + last_calls))

    def _wanted(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        return tuple(call for call in calls if not call.index) if self._one_call else calls


class _ReasoningReader:
    """`<think>…</think>` at the start of a text; white space behind either mark belongs to it."""

    def __init__(self, parser: str) -> None:
        starts: dict[str, _Place] = {"think": "before", "think_open": "inside"}
        self._place: _Place = starts.get(parser, "behind")
        self._is_behind_mark = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning, and what stands behind it."""
        self._held += text
        reasoning, rest = "", ""
        if self._place == "before" and not _OPEN.startswith(self._held):
            if self._held.startswith(_OPEN):
                self._pass(len(_OPEN), "inside")
            else:
                self._place = "behind"
        if self._place == "inside":
            reasoning = self._reasoning()
        if self._place == "behind":
            self._strip()
            rest, self._held = self._held, ""
        return reasoning, rest

    def end(self) -> tuple[str, str]:
        """What is left when the text ends."""
        left, self._held = self._held, ""
        return (left, "") if self._place == "inside" else ("", left)

    def _reasoning(self) -> str:
        self._strip()
        at = self._held.find(_CLOSE)
        said = self._held[: at if at >= 0 else len(self._held) - num_held(self._held, _CLOSE)]
        self._held = self._held[len(said) :]
        if at >= 0:
            self._pass(len(_CLOSE), "behind")
        return said

    def _pass(self, num_chars: int, place: _Place) -> None:
        self._held = self._held[num_chars:]
        self._place = place
        self._is_behind_mark = True

    def _strip(self) -> None:
        if self._is_behind_mark:
            self._held = self._held.lstrip()
            self._is_behind_mark = not self._held
