"""Reading of calls that are expressions: `f(city="Bern", days=3)` as in Python, or `f{city:<|"|>Bern<|"|>,days:3}`.

The values become JSON while they are written. Words of Python and of JSON are read, and both quotes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
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
    NamedCallReader,
    after_mark,
    num_held,
)
from penstock.contract.tool_formats import ToolFormat

_MAX_LITERAL_CHARS = 4096
"""Characters of a number, a word or the name of an argument. A longer one would be read from its start again."""
_MAX_PIECES = 200_000
"""Brackets, values and the texts between them in one call. Each takes a microsecond."""
_MAX_DEPTH = 500
"""Nested lists and objects. A JSON reader would refuse more."""
_LITERAL = re.compile(r"[^\s,:=\[\]{}()<>\"'|]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_QUOTES = ("'''", '"""', "'", '"')
_ESCAPE = re.compile(
    r"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<char>.))",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_Expected = Literal["first", "key", "assigns", "value", "comma"]
"""first: a key or a value, or the end of what has just been opened. key: the same after a comma."""
_CLOSING = {"[": "]", "{": "}"}


def _unescaped(escape: re.Match[str]) -> str:
    if escape["high"]:
        return json.loads(f'"\\u{escape["high"]}\\u{escape["low"]}"')  # type: ignore[no-any-return]
    code = escape["x"] or escape["u"] or escape["U"]
    if code is None:
        # Python keeps the backslash of an unknown escape. JSON's escaped slash is the exception.
        char = escape["char"]
        return _ESCAPED.get(char, char if char in "\\'\"/" else f"\\{char}")
    number = int(code, 16)
    return chr(number) if number < 0xD800 or 0xDFFF < number <= 0x10FFFF else _REPLACEMENT


class ExpressionArguments(Arguments):
    """Reads the arguments behind the opening bracket of one call."""

    def __init__(self, form: ToolFormat, text_ends: Mapping[str, re.Pattern[str]]) -> None:
        """text_ends: what ends a run of plain characters in a text, by the mark that closes the text."""
        self._form, self._ends = form, text_ends
        self._open: list[str] = []
        """The closing brackets of the values that are being read."""
        self._expected: _Expected = "first"
        self._quote = ""
        """The mark at which the text ends that is being read; empty outside texts."""
        self._is_key = False
        """Whether that text is the key of an object."""
        self._pieces: list[str] = ["{"]
        self._is_begun = False
        self._checked: object = None

    def read(self, text: str, found: list[str]) -> tuple[int, CallEnd | None]:
        """Read on in a text. See `Arguments`."""
        num_known = len(self._pieces) if self._is_begun else 0
        self._is_begun = True
        at, end = 0, None
        while end is None:
            at = at if self._quote else BLANK.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                break
            after, end = self._read_text(text, at) if self._quote else self._read_token(text, at)
            end = "broken" if len(self._pieces) > _MAX_PIECES else end
            if after == WAIT:
                break
            at = max(at, after)
        found += self._pieces[num_known:]
        if end == "whole":
            self._checked = object_of("".join(self._pieces))
            end = "broken" if self._checked is None else end
        return at, end

    @property
    def _in_object(self) -> bool:
        return not self._open or self._open[-1] == "}"

    def _read_token(self, text: str, at: int) -> tuple[int, CallEnd | None]:
        """Read a bracket, a comma, a key or a value. Returns WAIT if more text may belong to it."""
        char = text[at]
        closing = self._open[-1] if self._open else self._form.arguments_end
        if char == closing and self._expected in ("first", "key", "comma"):
            return self._close(at)
        if self._expected == "comma":
            self._expected = "key"
            return at + 1, None if char == "," else "broken"
        if self._expected == "assigns":
            return self._read_assigns(text, at)
        is_key = self._in_object and self._expected != "value"
        quote = self._opening_quote(text, at)
        if quote is None:
            return WAIT, None
        if quote:
            if is_key and not self._open and not self._form.text_mark:
                return at, "broken"  # A call of Python names its arguments without quotes.
            return self._begin_text(quote, at, is_key=is_key)
        if char in _CLOSING:
            return (at, "broken") if is_key else self._begin_container(char, at)
        return self._read_literal(text, at, is_key=is_key)

    def _read_assigns(self, text: str, at: int) -> tuple[int, CallEnd | None]:
        mark = ":" if self._open else self._form.assigns
        if not text.startswith(mark, at):
            return at, "broken"
        self._pieces.append(": ")
        self._expected = "value"
        return at + len(mark), None

    def _opening_quote(self, text: str, at: int) -> str | None:
        """Return the mark at which a text begins here; empty for none, None if more text is needed to decide."""
        marks = (self._form.text_mark,) if self._form.text_mark else _QUOTES
        for mark in marks:
            after = after_mark(text, at, mark)
            if after != FAIL:
                return None if after == WAIT else mark
        return ""

    def _separate(self) -> None:
        """Write the comma before a member that is not the first of its container."""
        if self._expected == "key":
            self._pieces.append(", ")

    def _begin_text(self, quote: str, at: int, *, is_key: bool) -> tuple[int, CallEnd | None]:
        self._separate()
        self._quote, self._is_key = quote, is_key
        self._pieces.append('"')
        return at + len(quote), None

    def _begin_container(self, bracket: str, at: int) -> tuple[int, CallEnd | None]:
        self._separate()
        if len(self._open) == _MAX_DEPTH:
            return at, "broken"
        self._open.append(_CLOSING[bracket])
        self._pieces.append(bracket)
        self._expected = "first"
        return at + 1, None

    def _close(self, at: int) -> tuple[int, CallEnd | None]:
        self._expected = "comma"
        if not self._open:
            self._pieces.append("}")
            return at + 1, "whole"
        self._pieces.append(self._open.pop())
        return at + 1, None

    def _read_literal(self, text: str, at: int, *, is_key: bool) -> tuple[int, CallEnd | None]:
        found = _LITERAL.match(text, at)
        if found is None:
            return at, "broken"
        if len(found[0]) > _MAX_LITERAL_CHARS:
            return at, "broken"
        if found.end() == len(text):
            return WAIT, None
        self._separate()
        if is_key:
            self._pieces.append(json.dumps(found[0], ensure_ascii=False))
            self._expected = "assigns"
        else:
            self._pieces.append(_value_of(found[0]))
            self._expected = "comma"
        return found.end(), None

    def _read_text(self, text: str, at: int) -> tuple[int, CallEnd | None]:
        """Read on in a text, up to its end, an escape, or where either may have begun."""
        quote = self._quote
        end = self._ends[quote].search(text, at)
        certain = end.start() if end else len(text) - num_held(text[max(at, len(text) - len(quote)) :], quote)
        if certain > at:
            self._pieces.append(json.dumps(text[at:certain], ensure_ascii=False)[1:-1])
            return certain, None
        if end is None:
            return WAIT, None
        if end[0] == "\\":
            return self._read_escape(text, at)
        self._pieces.append('"')
        self._quote = ""
        self._expected = "assigns" if self._is_key else "comma"
        return at + len(quote), None

    def _read_escape(self, text: str, at: int) -> tuple[int, CallEnd | None]:
        escape = _ESCAPE.match(text, at) if _ends_escape(text, at) else None
        if escape is None:
            return WAIT, None
        self._pieces.append(json.dumps(_unescaped(escape), ensure_ascii=False)[1:-1])
        return escape.end(), None


_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def _ends_escape(text: str, at: int) -> bool:
    """Whether the escape that begins here is in the text as a whole, its second half of a surrogate pair included."""
    kind = text[at + 1 : at + 2]
    size = 2 + _HEX_DIGITS.get(kind, 0)
    shown = text[at : at + size]
    digits = shown[2:]
    if not kind:
        return False
    if any(char not in "0123456789abcdefABCDEF" for char in digits):
        return True  # It is no such escape: the backslash stands for itself.
    if len(shown) < size:
        return False
    if kind == "u" and re.fullmatch("[dD][89abAB]..", digits):
        second = text[at + size :]
        return not ("\\u".startswith(second[:2]) and len(second) < size)
    return True


def _value_of(literal: str) -> str:
    """Return the JSON of a number or word. A word that stands for no value is a text without quotes."""
    if literal in _WORDS:
        return _WORDS[literal]
    is_number = _NUMBER.fullmatch(literal) is not None and math.isfinite(float(literal))
    return literal if is_number else json.dumps(literal, ensure_ascii=False)


EXPRESSION_NAME = re.compile(r"[^\s,:=\[\](){}<>\"'|]+\Z")
_MAX_BARE_CHARS = 512
_BEGINS_BARE = re.compile(r"\s*\[\s*[^\s,:=\[\](){}<>\"'|]{1,256}\(\s*(?:\)|[^\W\d]\w{0,255}\s*=)")
_MAY_BEGIN_BARE = re.compile(r"\s*(?:\[\s*(?:[^\s,:=\[\](){}<>\"'|]{1,256}(?:\(\s*(?:[^\W\d]\w{0,255}\s*)?)?)?)?\Z")
"""The beginning of a list of calls of Python without a mark."""


class ExpressionCallReader(NamedCallReader):
    """Finds calls that are expressions: each behind its own mark, or in a list behind one."""

    def __init__(self, form: ToolFormat) -> None:
        marks = {form.text_mark: ""} if form.text_mark else dict.fromkeys(_QUOTES, r"|\\")
        ends = {mark: re.compile(re.escape(mark) + escape) for mark, escape in marks.items()}
        super().__init__(form, lambda name: ExpressionArguments(form, ends))
        self._closing: list[str] = []
        """The marks that may still follow a list."""

    def _is_undecided(self) -> bool:
        return self._step == self._read_next or super()._is_undecided()

    def _find(self) -> tuple[int, bool]:
        num_plain, opens = super()._find()
        if not self._form.is_bare or not self._is_start or (opens and not self._held[:num_plain].strip()):
            return num_plain, opens
        if _BEGINS_BARE.match(self._held):
            return 0, True
        may_begin = len(self._held) <= _MAX_BARE_CHARS and _MAY_BEGIN_BARE.match(self._held)
        return (0, False) if may_begin else (num_plain, opens)

    def _read_opening(self, found: list[str | Call]) -> bool:
        form = self._form
        if form.call:
            return super()._read_opening(found)
        at = self._after_blank(0) if form.is_bare else 0
        at = self._after_blank(max(0, after_mark(self._held, at, form.section)))
        if at > MAX_OPENING_CHARS:
            return self._fail_at_mark(found)
        if form.is_list:
            at = after_mark(self._held, at, "[")
            if at < 0:
                return self._fail_at_mark(found) if at == FAIL else False
        return self._read_head(self._after_blank(at), found)

    def _read_head(self, at: int, found: list[str | Call]) -> bool:
        end = self._held.find(self._form.name_end, at, at + self._MAX_HEAD_CHARS)
        if end < 0 and len(self._held) < at + self._MAX_HEAD_CHARS and EXPRESSION_NAME.match(self._held, at):
            return False
        if at == len(self._held):
            return False
        name = self._held[at:end] if end >= 0 else ""
        if not EXPRESSION_NAME.match(name):
            return self._fail_at_mark(found)
        return super()._read_head(at, found)

    def _read_between(self, found: list[str | Call]) -> bool:
        if self._form.call:
            return super()._read_between(found)
        self._step = self._read_next
        return True

    def _read_next(self, found: list[str | Call]) -> bool:
        """Read what follows a call of a list: another one, or the end of the list, or plain text."""
        form = self._form
        at = self._after_blank(0)
        at += self._held.startswith(",", at)
        at = self._after_blank(at)
        if at == len(self._held):
            return self._is_too_long(at)
        marks = ["]"] * form.is_list + [form.section_end] * bool(form.section_end)
        afters = [after_mark(self._held, at, mark) for mark in marks]
        if WAIT in afters and max(afters) < 0:
            return False
        if max(afters) >= 0:
            self._take(at)
            self._closing = marks
            self._step = self._read_closing
            return True
        end = self._held.find(form.name_end, at, at + self._MAX_HEAD_CHARS)
        if end < 0 and len(self._held) < at + self._MAX_HEAD_CHARS and EXPRESSION_NAME.match(self._held, at):
            return False
        if end < 0 or not EXPRESSION_NAME.match(self._held[at:end]):
            self._end_list()
            return True
        self._take(at)
        return super()._read_head(0, found)

    def _is_too_long(self, at: int) -> bool:
        """Take blanks so that they are not read again. They belong to the list."""
        self._take(max(0, at - MAX_OPENING_CHARS))
        return False

    def _read_closing(self, found: list[str | Call]) -> bool:
        """Read the closing marks, each of which may be missing."""
        while self._closing:
            self._take(self._after_blank(0))
            after = after_mark(self._held, 0, self._closing[0])
            if after == WAIT:
                return False
            self._take(max(0, after))
            self._closing.pop(0)
        self._end_list()
        return True
