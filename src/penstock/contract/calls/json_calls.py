"""Reading of calls whose arguments are JSON: alone behind the name, or in an object together with it.

The arguments are the text that the model wrote, unchanged.
"""

from __future__ import annotations

import re
from typing import Literal

from penstock.contract.calls.checking import object_of
from penstock.contract.calls.reading import (
    BLANK,
    FAIL,
    MAX_OPENING_CHARS,
    WAIT,
    Arguments,
    Call,
    CallEnd,
    CallReader,
    after_mark,
    is_name,
)
from penstock.contract.tool_formats import FENCE, FENCE_END, ToolFormat
from penstock.contract.tools import json_of

_STRING = re.compile(r'[^"\\\x00-\x1f]*(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*)*')
"""The inside of a JSON string, up to its quote or to a character that it may not contain."""
_LITERAL = re.compile(r"[0-9A-Za-z+\-.]+")
_FLAT = r"[0-9A-Za-z+\-.,: \t\r\n]"
_INNER = re.compile(rf"(?:{_FLAT}++|\[{_FLAT}*+\]|\{{{_FLAT}*+\}}){{0,1000}}")
"""What is not checked inside of members, without texts and what nests.

It may stop early: without a limit it would take memory for each bracket, and a group with `*+` gives wrong ends in
CPython 3.11.0 to 3.11.4 (CPython issue 106052).
"""
_MAX_DEPTH = 1000
"""Nested lists and objects. A JSON reader would refuse more."""
_Expected = Literal["key", "colon", "value", "comma"]
_AFTER: dict[str, tuple[_Expected, _Expected]] = {":": ("colon", "value"), ",": ("comma", "key")}


class _ObjectScanner:
    """Scans the JSON object of one call in a text that grows. All positions are in that text.

    Only the object's own members are checked here. What is inside of them is checked as a whole when they end.
    """

    def __init__(self, at: int, name: str, arguments: str) -> None:
        """at: position after the object's brace. name, arguments: the keys of both."""
        self.at = at
        """Scanned up to here; where the scan failed, at or just behind the wrong character."""
        self.is_closed = self.has_failed = False
        self.name: str | None = None
        self.arguments_at: int | None = None
        """Where the arguments begin."""
        self.arguments_end: int | None = None
        self._name_key, self._arguments_key = name, arguments
        self._is_alone = False
        """Whether the arguments stand in no object."""
        self._depth = 1
        self._string_at: int | None = None
        """Where the string began that is being scanned."""
        self._expected: _Expected = "key"
        self._key = ""

    @classmethod
    def of_arguments(cls) -> _ObjectScanner:
        """Return a scanner for a text that consists of the arguments."""
        one = cls(0, "", "")
        one._is_alone, one._expected = True, "value"
        return one

    def scan(self, text: str) -> None:
        """Scan up to the end of the text or of the object, or to a character that cannot be right."""
        while not (self.is_closed or self.has_failed or (self._is_alone and self.arguments_end is not None)):
            if self._string_at is None:
                blank = BLANK if self._depth == 1 else _INNER
                self.at = blank.match(text, self.at).end()  # type: ignore[union-attr]
                if self.at == len(text) or self._ends_in_literal(text):
                    return
                self.has_failed = not self._token(text, text[self.at])
            else:
                self.at = _STRING.match(text, self.at).end()  # type: ignore[union-attr]
                if self.at == len(text) or (text[self.at] == "\\" and self.at + 1 == len(text)):
                    return
                self.has_failed = text[self.at] != '"' or not self._end_string(text)

    def move(self, num_chars: int) -> None:
        """Drop this many characters at the beginning of the text, all of them scanned and part of the arguments."""
        self.at -= num_chars
        self.arguments_at = 0
        self._string_at = None if self._string_at is None else max(0, self._string_at - num_chars)

    def _ends_in_literal(self, text: str) -> bool:
        """Whether the text ends in a number or word that is a member's value, and that may go on in the next piece."""
        literal = _LITERAL.match(text, self.at) if self._depth == 1 and self._expected == "value" else None
        return literal is not None and literal.end() == len(text)

    def _token(self, text: str, char: str) -> bool:
        """Scan the token that begins at `at`. Return whether it may stand there."""
        if char in "{[":
            return self._open(char)
        if char in "}]":
            return self._close(char)
        if char == '"':
            self._string_at = self.at
            self.at += 1
            return self._depth > 1 or self._expected in ("key", "value")
        if char in _AFTER:
            before, after = _AFTER[char]
            self.at += 1
            return self._depth > 1 or self._expect(before, after)
        literal = _LITERAL.match(text, self.at)
        if literal is None:
            return False
        self.at = literal.end()
        return self._depth > 1 or self._expect("value", "comma")

    def _expect(self, expected: _Expected, after: _Expected) -> bool:
        """Whether a member's next part is the expected one; then `after` follows it."""
        is_right, self._expected = self._expected == expected, after
        return is_right

    def _open(self, bracket: str) -> bool:
        if self._depth == 1:
            if self._expected != "value":
                return False
            if self._key == self._arguments_key:
                if bracket != "{" or self.arguments_at is not None:
                    return False
                self.arguments_at = self.at
            self._expected = "comma"
        if self._depth == _MAX_DEPTH:
            return False
        self._depth += 1
        self.at += 1
        return True

    def _close(self, bracket: str) -> bool:
        if self._depth == 1:
            if bracket != "}" or self._expected not in ("key", "comma"):
                return False
            self.is_closed = True
        self._depth -= 1
        self.at += 1
        if self._depth == 1 and self.arguments_at is not None and self.arguments_end is None:
            self.arguments_end = self.at
        return True

    def _end_string(self, text: str) -> bool:
        start, self._string_at = self._string_at or 0, None
        self.at += 1
        if self._depth > 1:
            return True
        if self._expected == "key":
            self._key, self._expected = text[start + 1 : self.at - 1], "colon"
            return True
        self._expected = "comma"
        if self._key == self._name_key:
            self.name = _name_of(text[start : self.at])
            return self.name is not None
        return self._key != self._arguments_key


class JsonArguments(Arguments):
    """Reads arguments that are a JSON object."""

    def __init__(self) -> None:
        self._object = _ObjectScanner.of_arguments()
        self._pieces: list[str] = []
        self._checked: object = None

    def read(self, text: str, found: list[str]) -> tuple[int, CallEnd | None]:
        """Read on in a text. See `Arguments`."""
        one = self._object
        one.scan(text)
        if one.arguments_at is None:
            return (0, "broken") if one.has_failed or one.at > MAX_OPENING_CHARS else (0, None)
        start, end = one.arguments_at, one.at if one.arguments_end is None else one.arguments_end
        found.append(text[start:end])
        self._pieces.append(text[start:end])
        if one.has_failed:
            return end, "broken"
        if one.arguments_end is not None:
            self._checked = object_of("".join(self._pieces))
            return end, "broken" if self._checked is None else "whole"
        one.move(end)
        return end, None


class JsonCallReader(CallReader):
    """Finds calls that are JSON objects with a name and arguments."""

    def __init__(self, form: ToolFormat) -> None:
        super().__init__(form)
        self._lead = form.section or form.call
        of_each = [form.call] if form.section and form.call else []
        self._opening = of_each + [FENCE] * form.is_fenced + ["["] * form.is_list + ["{"]
        """What stands between the mark and the first object."""
        self._between = re.compile(rf"[ \t\r\n{re.escape(form.between.strip())}]*")
        ends = ("]" if form.is_list else "", FENCE_END if form.is_fenced else "", form.call_end, form.section_end)
        self._end_marks = tuple(mark for mark in ends if mark)
        self._repeats = form.is_bare or bool(form.section)
        self._object = _ObjectScanner(0, form.name_key, form.arguments_key)
        self._arguments: list[str] = []
        self._checked: object = None
        self._awaited: list[str] = []
        """The closing marks that may still follow."""

    def _is_undecided(self) -> bool:
        return self._step == self._read_object or super()._is_undecided()

    def _find(self) -> tuple[int, bool]:
        return _begins_bare(self._held, self._is_start) if self._form.is_bare else super()._find()

    def _read_opening(self, found: list[str | Call]) -> bool:
        if self._form.is_bare:
            at = len(self._held) - len(self._held.lstrip())
            at += len(self._lead) if self._held.startswith(self._lead, at) else 0
        else:
            # The calls of a list may have marks of their own. Those behind the first one begin with these.
            at = max(0, after_mark(self._held, 0, self._lead))
        for mark in self._opening:
            at = BLANK.match(self._held, at).end()  # type: ignore[union-attr]
            if at > MAX_OPENING_CHARS:
                return self._fail(MAX_OPENING_CHARS, found)
            after = after_mark(self._held, at, mark)
            if after < 0:
                return self._fail(at, found) if after == FAIL else False
            at = after
        self._open_object(at - 1)
        return True

    def _open_object(self, at: int) -> None:
        """Begin to read the object whose brace is at this position."""
        self._object = _ObjectScanner(at + 1, self._form.name_key, self._form.arguments_key)
        self._step = self._read_object

    def _read_object(self, found: list[str | Call]) -> bool:
        one = self._object
        one.scan(self._held)
        if not self._is_in_call and one.name is not None and one.arguments_at is not None:
            self._begin_call(one.name, found)
            self._held = self._held[one.arguments_at :]
            at = one.arguments_at
            one.arguments_end = None if one.arguments_end is None else one.arguments_end - at
            one.move(at)
            self._arguments = []
        if self._is_in_call and not self._grow(found):
            return self._fail(one.at, found)
        if one.has_failed or (one.is_closed and not self._is_in_call):
            return self._fail(one.at, found)
        if one.is_closed:
            self._take(one.at)
            self._end_call(found, "whole")
            self._step = self._read_between
        return one.is_closed

    def _grow(self, found: list[str | Call]) -> bool:
        """Return new text of the arguments. Return False if they end and are wrong, or are too long."""
        one = self._object
        if one.arguments_at is None:
            return True
        end = one.at if one.arguments_end is None else one.arguments_end
        new = self._held[:end]
        self._arguments.append(new)
        if not self._add_arguments(new, found):
            return False
        self._held = self._held[end:]
        ended = one.arguments_end is not None
        one.move(end)
        if ended:
            one.arguments_at = None
            self._checked = object_of("".join(self._arguments))
            return self._checked is not None
        return True

    def _read_between(self, found: list[str | Call]) -> bool:
        """Read what follows an object: another one, or the closing mark, or plain text."""
        self._drop_blank()
        if not self._held:
            return False
        if self._repeats and self._held[0] == "{":
            self._open_object(0)
        else:
            self._awaited = list(self._end_marks)
            self._step = self._read_closing
        return True

    def _read_closing(self, found: list[str | Call]) -> bool:
        """Read the closing marks, each of which may be missing."""
        while self._awaited:
            self._drop_blank()
            after = after_mark(self._held, 0, self._awaited[0])
            if after == WAIT:
                return False
            self._take(max(0, after))
            self._awaited.pop(0)
        self._end_list()
        return True

    def _drop_blank(self) -> None:
        self._take(self._between.match(self._held).end())  # type: ignore[union-attr]


def _name_of(literal: str) -> str | None:
    """Return the function's name that a JSON string stands for, or None if no request may contain it."""
    try:
        name = json_of(literal)
    except ValueError:
        return None
    return name if is_name(name) else None


_MAX_UNDECIDED_CHARS = 32
"""Most characters at the start of a text that are held back while they may be the beginning of a bare call."""
_PYTHON_TAG = "<|python_tag|>"
_BARE_BEGINNINGS = (_PYTHON_TAG, '{"name":', '{"type":"function"')


def _begins_bare(text: str, is_start: bool) -> tuple[int, bool]:
    """Do the same as `_find` for Llama 3, which writes calls as bare JSON.

    Only the position distinguishes a bare call from other JSON, so a call can only begin a text.
    """
    # Look at no more characters than are needed to decide, so that later ones do not change the decision.
    compact = "".join(text[: _MAX_UNDECIDED_CHARS + 1].split())
    if is_start and compact.startswith(_BARE_BEGINNINGS):
        return 0, True
    undecided = is_start and len(text) <= _MAX_UNDECIDED_CHARS
    may_begin = undecided and any(beginning.startswith(compact) for beginning in _BARE_BEGINNINGS)
    return (0 if may_begin else len(text)), False
