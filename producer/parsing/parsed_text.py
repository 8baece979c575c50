"""Parsing of a choice's text into reasoning, content and tool calls while the text arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from penstock.contract.calls.messages import MarkDropper, MessageReader
from penstock.contract.calls.opening import CallOpening
from penstock.contract.calls.reader import reader_of
from penstock.contract.calls.reading import MAX_OPENING_CHARS, Call, num_held
from penstock.contract.tool_formats import THINK, ToolFormat

_CHARS_READ_AT_ONCE = 1 << 10
_Stage = Literal["before", "inside", "after"]
"""Position of the parser relative to the reasoning."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """The parsed text of a choice, or of a part of it. False if it is empty."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    """Calls or parts of calls, one for each index."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or any(self.calls))

    def __add__(self, more: ParsedText) -> ParsedText:
        calls = self.calls + more.calls
        if self.calls and more.calls and self.calls[-1].index == more.calls[0].index:
            calls = (*self.calls[:-1], self.calls[-1] + more.calls[0], *more.calls[1:])
        return ParsedText(self.content + more.content, self.reasoning + more.reasoning, calls)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to parse an answer's text. An unknown name of a reasoning parser parses nothing."""

    calls: ToolFormat | None = None
    """The format of calls; None: the text has none."""
    reasoning_parser: str = "none"
    one_call: bool = False
    """Whether calls after the first one are dropped."""
    is_named: bool = False
    """Whether the caller chose the function. OpenAI then reports finish reason "stop" instead of "tool_calls"."""
    functions: str | None = None
    """The offered tools as JSON text, if their schemas type the arguments."""
    marks: tuple[str, str] = THINK
    """The marks around the reasoning."""
    frame: ToolFormat | None = None
    """The format whose marks stand around the messages or texts of the answer, if they do."""
    names: tuple[str, ...] = ()
    """The functions whose calls end reasoning that the model did not close."""

    def read(self, text: str, *, is_cut: bool = False) -> ParsedText:
        """Parse a whole text. is_cut: it ended because of a limit."""
        return joined(list(chain.from_iterable(self.parts_of(text, is_cut=is_cut))))

    def parts_of(self, text: str, *, is_cut: bool = False) -> Iterator[list[ParsedText]]:
        """Do the same as `read`, but yield the parts of a kilobyte at a time. `joined` joins all of them."""
        if self == PLAIN:
            yield [ParsedText(text)]
            return
        reader = AnswerReader(self)
        # Each call copies the rest of the piece, so slices keep the cost linear for a text with many calls.
        for at in range(0, len(text), _CHARS_READ_AT_ONCE):
            yield reader.push_in_order(text[at : at + _CHARS_READ_AT_ONCE])
        yield reader.end_in_order(is_cut=is_cut)


PLAIN = AnswerFormat()
"""The format in which all text is content."""


class AnswerReader:
    """Parses the text of one choice, piece by piece."""

    def __init__(self, form: AnswerFormat) -> None:
        self._one_call = form.one_call
        self._calls = None if form.calls is None else reader_of(form.calls, form.functions)
        frame = form.frame
        has_messages = frame is not None and bool(frame.header)
        opening = None if form.calls is None else CallOpening.of(form.calls, form.names)
        self._reasoning: MessageReader | _ReasoningReader = (
            MessageReader(frame)
            if frame and has_messages
            else _ReasoningReader(form.reasoning_parser, form.marks, opening)
        )
        self._dropper = MarkDropper(frame) if frame and not has_messages else None

    def push(self, text: str) -> ParsedText:
        """Add a piece of text and return the content that is certain now."""
        return joined(self.push_in_order(text))

    def end(self, *, is_cut: bool = False) -> ParsedText:
        """Return the rest at the end of the text. is_cut: it ended because of a limit."""
        return joined(self.end_in_order(is_cut=is_cut))

    def push_in_order(self, text: str) -> list[ParsedText]:
        """Do the same as `push`, but return text and calls as separate parts, in the order of the text."""
        reasoning, rest = self._reasoning.push(text)
        return self._parts(reasoning, self._without_marks(self._calls.push(rest) if self._calls else [rest]))

    def end_in_order(self, *, is_cut: bool = False) -> list[ParsedText]:
        """Do the same as `end`, but return text and calls as separate parts, in the order of the text."""
        reasoning, rest = self._reasoning.end()
        found = [rest] if self._calls is None else [*self._calls.push(rest), *self._calls.end(is_cut=is_cut)]
        found = self._without_marks(found)
        if self._dropper is not None:
            found.append(self._dropper.end())
        return self._parts(reasoning, found)

    def _without_marks(self, found: Sequence[str | Call]) -> list[str | Call]:
        """Return the texts without the marks around them."""
        if self._dropper is None:
            return [*found]
        kept: list[str | Call] = []
        for one in found:
            kept += [self._dropper.push(one)] if isinstance(one, str) else [self._dropper.end(), one]
        return kept

    def _parts(self, reasoning: str, found: Sequence[str | Call]) -> list[ParsedText]:
        parts = [ParsedText(reasoning=reasoning)] if reasoning else []
        texts: list[str] = []
        for one in found:
            # A text of nothing but marks of calls has a piece for each.
            if isinstance(one, str):
                if one:
                    texts.append(one)
            elif not self._one_call or one.index == 0:
                if texts:
                    parts.append(ParsedText("".join(texts)))
                    texts.clear()
                parts.append(ParsedText(calls=(one,)))
        if texts:
            parts.append(ParsedText("".join(texts)))
        return parts


def joined(parts: Sequence[ParsedText]) -> ParsedText:
    """Return one parsed text for parts in the order of the text."""
    if len(parts) == 1:
        return parts[0]
    by_index: dict[int, list[Call]] = {}
    for part in parts:
        for call in part.calls:
            by_index.setdefault(call.index, []).append(call)
    return ParsedText(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(_whole(of_call) for of_call in by_index.values()),
    )


def _whole(parts: Sequence[Call]) -> Call:
    arguments = "".join(part.arguments for part in parts)
    return Call(parts[0].index, parts[0].name, arguments, parts[-1].end)


class _ReasoningReader:
    """Separates reasoning at the start of a text from the rest. White space after a mark is dropped.

    The closing mark ends the reasoning, or the beginning of a call, which belongs to the rest.
    """

    def __init__(self, parser: str, marks: tuple[str, str], opening: CallOpening | None) -> None:
        self._open, self._close = marks
        starts: dict[str, _Stage] = {"think": "before", "think_open": "inside"}
        self._stage: _Stage = starts.get(parser, "after")
        self._opening = opening
        self._is_after_mark = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add a piece of text. Return the reasoning and the text after it, as far as both are certain."""
        self._held += text
        reasoning, rest = "", ""
        if self._stage == "before" and not self._open.startswith(self._held):
            if self._held.startswith(self._open):
                self._consume_mark(len(self._open), "inside")
            else:
                self._stage = "after"
        if self._stage == "inside":
            reasoning = self._reasoning()
        if self._stage == "after":
            self._strip()
            rest, self._held = self._held, ""
        return reasoning, rest

    def end(self) -> tuple[str, str]:
        """Return the rest at the end of the text: reasoning, and text after it."""
        left, self._held = self._held, ""
        return (left, "") if self._stage == "inside" else ("", left)

    def _reasoning(self) -> str:
        self._strip()
        at = self._held.find(self._close)
        num_certain = at if at >= 0 else len(self._held) - num_held(self._held, self._close)
        if self._opening is not None:
            begins, num_certain = _before_call(self._held, self._opening, num_certain)
            if begins:
                self._stage = "after"
        reasoning, self._held = self._held[:num_certain], self._held[num_certain:]
        if num_certain == at:
            self._consume_mark(len(self._close), "after")
        return reasoning

    def _consume_mark(self, num_chars: int, stage: _Stage) -> None:
        self._held = self._held[num_chars:]
        self._stage = stage
        self._is_after_mark = True

    def _strip(self) -> None:
        if self._is_after_mark:
            self._held = self._held.lstrip()
            self._is_after_mark = not self._held


def _before_call(text: str, opening: CallOpening, limit: int) -> tuple[bool, int]:
    """Return whether a call begins in the first `limit` characters, and how many of them are certainly reasoning."""
    mark, at = opening.mark, text.find(opening.mark, 0, limit)
    while at >= 0:
        begins = opening.is_at_start(text[at : at + MAX_OPENING_CHARS + len(mark)])
        if begins is not False:
            return begins is True, at
        at = text.find(mark, at + 1, limit)
    return False, min(limit, len(text) - num_held(text, mark))
