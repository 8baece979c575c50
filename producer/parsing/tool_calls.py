"""Parsing of tool calls in generated text: pieces of text go in; plain text and parts of calls come out, in order.

A call begins to come out once its name and the brace of its arguments are certain. Its arguments are the text that the
model wrote, unchanged. Text that only resembles a call is returned unchanged. So is a call that no request may contain,
because its name is empty or too long. A call that breaks later keeps what has come out of it. Calls after the first
MAX_CALLS are dropped. The total result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.contract.tools import MAX_ARGUMENTS_CHARS, MAX_CALLS, MAX_FUNCTION_NAME_CHARS, json_of

_MAX_UNDECIDED_CHARS = 32
"""Most characters at the start of a text that are held back while they may be the beginning of a bare call."""

CallEnd = Literal["whole", "cut", "broken"]
"""How a call ends. cut: the text ended inside it. broken: its arguments are no JSON object, or are too long."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a choice, or a part of it: the first part has the name, the last one the end."""

    index: int
    """Number of the call in its choice, from 0."""
    name: str = ""
    arguments: str = ""
    """A JSON object as text, or a part of it."""
    end: CallEnd | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to show: the end of a whole call is not."""
        return bool(self.name or self.arguments or self.end == "broken")

    def __add__(self, more: Call) -> Call:
        return Call(self.index, self.name or more.name, self.arguments + more.arguments, more.end)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The syntax in which one family of models writes tool calls. A call is a JSON object with a name and arguments."""

    find: Callable[[str, bool], tuple[int, bool]]
    """Takes a text and whether it is the start of the choice. Returns how many of its first characters are plain text,
    and whether a call begins after them."""
    mark: str
    """The mark that begins a call. Empty: only `find` knows where a call begins."""
    lead: re.Pattern[str]
    """What stands before `brackets`: the mark and white space."""
    brackets: str
    """The brackets that the first object begins with. Before any other character the mark is plain text."""
    between: re.Pattern[str]
    """What may stand between two objects of one call text, or before `close`."""
    close: str
    """The mark that ends a call text. Empty: it has none."""
    repeats: bool
    """Whether several objects may follow each other without a new mark."""
    arguments: str
    """The key of the arguments."""
    certain: str
    """The mark that can begin nothing but a call. So it is not shown if the text was cut behind it."""


def warning_of(call: Call) -> str | None:
    """Return what to tell the caller about a call that broke after its beginning was sent."""
    if call.end != "broken":
        return None
    expected = f"a JSON object of at most {MAX_ARGUMENTS_CHARS} characters"
    return f"tool call {call.index}: the arguments that the model wrote are not {expected}"


def num_held(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


_BLANK = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'[^"\\\x00-\x1f]*(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*)*')
"""The inside of a JSON string, up to its quote or to a character that it may not contain."""
_LITERAL = re.compile(r"[0-9A-Za-z+\-.]+")
_Expected = Literal["key", "colon", "value", "comma"]
_AFTER: dict[str, tuple[_Expected, _Expected]] = {":": ("colon", "value"), ",": ("comma", "key")}


class _ObjectScanner:
    """Scans the JSON object of one call in a text that grows. All positions are in that text.

    Only the object's own members are checked here. What is inside of them is checked as a whole when they end.
    """

    def __init__(self, at: int, arguments: str) -> None:
        """at: position after the object's brace. arguments: the key of the arguments."""
        self.at = at
        """Scanned up to here; where the scan failed, at or just behind the wrong character."""
        self.is_closed = self.has_failed = False
        self.name: str | None = None
        self.arguments_at: int | None = None
        """Where the arguments begin."""
        self.arguments_end: int | None = None
        self._arguments_key = arguments
        self._depth = 1
        self._string_at: int | None = None
        """Where the string began that is being scanned."""
        self._expected: _Expected = "key"
        self._key = ""

    def scan(self, text: str) -> None:
        """Scan up to the end of the text or of the object, or to a character that cannot be right."""
        while not (self.is_closed or self.has_failed):
            if self._string_at is None:
                self.at = _BLANK.match(text, self.at).end()  # type: ignore[union-attr]
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
        if self._key == "name":
            self.name = _name_of(text[start : self.at])
            return self.name is not None
        return self._key != self._arguments_key


MAX_OPENING_CHARS = 4096
"""Characters of a mark and the blanks behind it. More are text: each piece of them would be read from the mark on."""


class ToolCallReader:
    """Finds the tool calls in the text of one choice, piece by piece."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._held = ""
        """Text that is not returned yet."""
        self._ends = re.compile("|".join(re.escape(mark) for mark in (form.mark, form.close) if mark) or r"(?!)")
        """The marks at which a broken call ends."""
        self._num_kept = max(len(form.mark), len(form.close), 1) - 1
        """Characters at the end of `_held` in which such a mark may have begun."""
        self._step: Callable[[list[str | Call]], bool] = self._read_text
        """Reads on in `_held`. Returns False if it needs more text."""
        self._object = _ObjectScanner(0, form.arguments)
        self._is_start = True
        self._is_after_call = False
        self._arguments: list[str] | None = None
        """The arguments of the call that is coming out; None if there is no such call."""
        self._num_chars = 0
        self._num_calls = 0

    def push(self, text: str) -> list[str | Call]:
        """Add a piece of text. Return the plain text and the parts of calls that are certain now, in their order."""
        self._held += text
        found: list[str | Call] = []
        while self._step(found):
            pass
        return found

    def end(self, *, is_cut: bool = False) -> list[str | Call]:
        """Return what is left at the end of the text. is_cut: a limit ended it, so the rest may belong to a call."""
        found: list[str | Call] = []
        left, self._held = self._held, ""
        if self._arguments is not None:
            self._end_call(found, "cut" if is_cut else "broken")
        elif self._step in (self._read_text, self._read_opening, self._read_object):
            left = self._without_beginning(left) if is_cut else left
            found += [left] if left else []
        return found

    def _without_beginning(self, left: str) -> str:
        """Return the text that is left without the beginning of a call. One character of a mark may be anything."""
        mark = self._form.certain
        if self._step == self._read_text:
            num_of_mark = num_held(left, mark)
            return left[: len(left) - num_of_mark] if num_of_mark > 1 else left
        return "" if self._num_calls or left.lstrip().startswith(mark) else left

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    def _read_text(self, found: list[str | Call]) -> bool:
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held
        num_plain, opens = self._form.find(self._held, self._is_start)
        if num_plain:
            self._is_start = False
            found.append(self._take(num_plain))
        if opens:
            self._step = self._read_opening
        return opens

    def _read_opening(self, found: list[str | Call]) -> bool:
        at = self._form.lead.match(self._held).end()  # type: ignore[union-attr]
        for bracket in self._form.brackets:
            at = _BLANK.match(self._held, at).end()  # type: ignore[union-attr]
            if at > MAX_OPENING_CHARS:
                return self._fail(MAX_OPENING_CHARS, found)
            if at == len(self._held):
                return False
            if self._held[at] != bracket:
                return self._fail(at, found)
            at += 1
        self._open_object(at - 1)
        return True

    def _open_object(self, at: int) -> None:
        """Begin to read the object whose brace is at this position."""
        self._object = _ObjectScanner(at + 1, self._form.arguments)
        self._step = self._read_object

    def _read_object(self, found: list[str | Call]) -> bool:
        one = self._object
        one.scan(self._held)
        if self._arguments is None and one.name is not None and one.arguments_at is not None:
            if self._num_calls < MAX_CALLS:
                found.append(Call(self._num_calls, one.name))
            self._held = self._held[one.arguments_at :]
            at = one.arguments_at
            one.arguments_end = None if one.arguments_end is None else one.arguments_end - at
            one.move(at)
            self._arguments, self._num_chars = [], 0
        if self._arguments is not None and not self._grow(found):
            return self._fail(one.at, found)
        if one.has_failed or (one.is_closed and self._arguments is None):
            return self._fail(one.at, found)
        if one.is_closed:
            self._take(one.at)
            self._end_call(found, "whole")
            self._step = self._read_between
        return one.is_closed

    def _grow(self, found: list[str | Call]) -> bool:
        """Return new text of the arguments. Return False if they end and are wrong, or are too long."""
        one = self._object
        if one.arguments_at is None or self._arguments is None:
            return True
        end = one.at if one.arguments_end is None else one.arguments_end
        new = self._held[:end][: MAX_ARGUMENTS_CHARS - self._num_chars]
        is_too_long = len(new) < end
        if new:
            self._arguments.append(new)
            self._num_chars += len(new)
            if self._num_calls < MAX_CALLS:
                found.append(Call(self._num_calls, arguments=new))
        if is_too_long:
            return False
        self._held = self._held[end:]
        ended = one.arguments_end is not None
        one.move(end)
        if ended:
            one.arguments_at = None
            return _is_object("".join(self._arguments))
        return True

    def _end_call(self, found: list[str | Call], end: CallEnd) -> None:
        if self._num_calls < MAX_CALLS:
            found.append(Call(self._num_calls, end=end))
        self._num_calls += 1
        self._arguments = None

    def _fail(self, at: int, found: list[str | Call]) -> bool:
        """Handle a wrong character at `at`: what was held is plain text, or the call that is coming out is broken."""
        self._is_start = False
        if self._arguments is None:
            found.append(self._take(at))
            self._step = self._read_text
        else:
            self._end_call(found, "broken")
            self._step = self._skip
        return True

    def _skip(self, found: list[str | Call]) -> bool:
        """Drop the rest of a broken call, up to the next mark."""
        mark = self._ends.search(self._held)
        if mark is None:
            self._take(max(0, len(self._held) - self._num_kept))
            return False
        self._take(mark.start() if mark[0] == self._form.mark else mark.end())
        self._is_after_call = True
        self._step = self._read_text
        return True

    def _read_between(self, found: list[str | Call]) -> bool:
        """Read what follows an object: another one, or the closing mark, or plain text."""
        at = self._form.between.match(self._held).end()  # type: ignore[union-attr]
        rest = self._held[at:]
        if not rest or (len(rest) < len(self._form.close) and self._form.close.startswith(rest)):
            return False
        if self._form.repeats and rest[0] == "{":
            self._take(at)
            self._open_object(0)
            return True
        closes = bool(self._form.close) and rest.startswith(self._form.close)
        self._take(at + len(self._form.close) if closes else at)
        self._is_after_call, self._is_start = True, False
        self._step = self._read_text
        return True


def _name_of(literal: str) -> str | None:
    """Return the function's name that a JSON string stands for, or None if no request may contain it."""
    try:
        name = json_of(literal)
    except ValueError:
        return None
    return name if 1 <= len(name) <= MAX_FUNCTION_NAME_CHARS else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json_of(text), dict)
    except ValueError:
        return False


def _marked(mark: str) -> Callable[[str, bool], tuple[int, bool]]:
    def find(text: str, is_start: bool) -> tuple[int, bool]:
        at = text.find(mark)
        return (at, True) if at >= 0 else (len(text) - num_held(text, mark), False)

    return find


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_BEGINNINGS = (_PYTHON_TAG, '{"name":', '{"type":"function"')


def _llama_begins(text: str, is_start: bool) -> tuple[int, bool]:
    """`CallFormat.find` for Llama 3, which writes calls as bare JSON.

    Only the position distinguishes a bare call from other JSON, so a call can only begin a text.
    """
    # Look at no more characters than are needed to decide, so that later ones do not change the decision.
    compact = "".join(text[: _MAX_UNDECIDED_CHARS + 1].split())
    if is_start and compact.startswith(_LLAMA_BEGINNINGS):
        return 0, True
    undecided = is_start and len(text) <= _MAX_UNDECIDED_CHARS
    may_begin = undecided and any(beginning.startswith(compact) for beginning in _LLAMA_BEGINNINGS)
    return (0 if may_begin else len(text)), False


CALL_FORMS = {
    "hermes": CallFormat(
        find=_marked("<tool_call>"),
        mark="<tool_call>",
        lead=re.compile("<tool_call>"),
        brackets="{",
        between=_BLANK,
        close="</tool_call>",
        repeats=False,
        arguments="arguments",
        certain="<tool_call>",
    ),
    "llama3_json": CallFormat(
        find=_llama_begins,
        mark="",
        lead=re.compile(r"\s*(?:<\|python_tag\|>)?"),
        brackets="{",
        between=re.compile(r"[ \t\r\n;]*"),
        close="",
        repeats=True,
        arguments="parameters",
        certain=_PYTHON_TAG,
    ),
    "mistral": CallFormat(
        find=_marked("[TOOL_CALLS]"),
        mark="[TOOL_CALLS]",
        lead=re.compile(r"\[TOOL_CALLS\]"),
        brackets="[{",
        between=re.compile(r"[ \t\r\n]*(?:,[ \t\r\n]*)?"),
        close="]",
        repeats=True,
        arguments="arguments",
        certain="[TOOL_CALLS]",
    ),
}
"""Call formats by the name of the tool parser in a pool's record."""
