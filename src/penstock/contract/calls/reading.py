"""Parsing of tool calls in generated text: pieces of text go in; plain text and parts of calls come out, in order.

A call begins to come out once its name is certain, in JSON together with the brace of its arguments. Text that only
resembles a call is returned unchanged. So is a call that no request may contain, because its name is empty or too long.
A call that breaks later keeps what has come out of it. Calls after the first MAX_CALLS are dropped. The total result
does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.contract.tool_formats import ToolFormat
from penstock.contract.tools import MAX_ARGUMENTS_CHARS, MAX_CALLS, MAX_FUNCTION_NAME_CHARS

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


def warning_of(call: Call) -> str | None:
    """Return what to tell the caller about a call that broke after its beginning was sent."""
    if call.end != "broken":
        return None
    expected = f"a JSON object of at most {MAX_ARGUMENTS_CHARS} characters"
    return f"tool call {call.index}: the arguments that the model wrote are not {expected}"


def num_held(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


BLANK = re.compile(r"[ \t\r\n]*")
MAX_OPENING_CHARS = 4096
"""Characters of a mark and the blanks behind it. More are text: each piece of them would be read from the mark on."""
WAIT, FAIL = -1, -2
"""What `after_mark` returns if the text may go on with the mark, and if it does not."""


def after_mark(text: str, at: int, mark: str) -> int:
    """Return the position after `mark` if the text has it at this position, or WAIT or FAIL."""
    if text.startswith(mark, at):
        return at + len(mark)
    return WAIT if mark.startswith(text[at : at + len(mark)]) else FAIL


def is_name(name: str) -> bool:
    """Whether a request may contain a call of a function with this name."""
    return 1 <= len(name) <= MAX_FUNCTION_NAME_CHARS


class CallReader(ABC):
    """Finds the tool calls in the text of one choice, piece by piece."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._held = ""
        """Text that is not returned yet."""
        begins = form.beginnings
        closing = [mark for mark in (form.call_end, form.section_end) if mark] or ["]"] * form.is_list
        self._begins = re.compile("|".join(map(re.escape, sorted(begins, key=len, reverse=True))))
        self._beginnings = begins
        self._ends = re.compile("|".join(map(re.escape, (*begins, *closing))))
        """The marks at which a broken call ends."""
        self._num_kept = max(map(len, (*begins, *closing))) - 1
        """Characters at the end of `_held` in which such a mark may have begun."""
        self._step: Callable[[list[str | Call]], bool] = self._read_text
        """Reads on in `_held`. Returns False if it needs more text."""
        self._is_start = True
        self._is_after_call = False
        self._is_in_call = False
        """Whether a call is coming out."""
        self._num_chars = 0
        """Characters of this call's arguments that came out."""
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
        if self._is_in_call:
            self._end_call(found, "cut" if is_cut else "broken")
        elif self._is_undecided():
            left = self._without_beginning(left) if is_cut else left
            found += [left] if left else []
        return found

    @abstractmethod
    def _read_opening(self, found: list[str | Call]) -> bool:
        """Read what stands before the arguments of a call."""

    def _is_undecided(self) -> bool:
        """Whether what is held is text if nothing follows it."""
        return self._step in (self._read_text, self._read_opening)

    def _without_beginning(self, left: str) -> str:
        """Return the text that is left without the beginning of a call. One character of a mark may be anything."""
        if self._step == self._read_text:
            num_of_mark = max(num_held(left, mark) for mark in self._beginnings)
            return left[: len(left) - num_of_mark] if num_of_mark > 1 else left
        return "" if self._num_calls or left.lstrip().startswith(self._beginnings) else left

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    def _find(self) -> tuple[int, bool]:
        """Return how many of the first held characters are plain text, and whether a call begins after them."""
        mark = self._begins.search(self._held)
        if mark is None:
            return len(self._held) - max(num_held(self._held, one) for one in self._beginnings), False
        # A longer mark may begin before this one, if it can hold it.
        return mark.start(), True

    def _read_text(self, found: list[str | Call]) -> bool:
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held
        num_plain, opens = self._find()
        if num_plain:
            self._is_start = False
            found.append(self._take(num_plain))
        if opens:
            self._step = self._read_opening
        return opens

    def _begin_call(self, name: str, found: list[str | Call]) -> None:
        self._is_in_call, self._num_chars = True, 0
        if self._num_calls < MAX_CALLS:
            found.append(Call(self._num_calls, name))

    def _add_arguments(self, text: str, found: list[str | Call]) -> bool:
        """Let new text of the arguments come out. Return False if they become too long."""
        new = text[: MAX_ARGUMENTS_CHARS - self._num_chars]
        self._num_chars += len(new)
        if new and self._num_calls < MAX_CALLS:
            found.append(Call(self._num_calls, arguments=new))
        return len(new) == len(text)

    def _end_call(self, found: list[str | Call], end: CallEnd) -> None:
        if self._num_calls < MAX_CALLS:
            found.append(Call(self._num_calls, end=end))
        self._num_calls += 1
        self._is_in_call = False

    def _fail(self, at: int, found: list[str | Call]) -> bool:
        """Handle a wrong character at `at`: what was held is plain text, or the call that is coming out is broken."""
        self._is_start = False
        if self._is_in_call:
            self._end_call(found, "broken")
            self._step = self._skip
        else:
            found.append(self._take(at))
            self._step = self._read_text
        return True

    def _skip(self, found: list[str | Call]) -> bool:
        """Drop the rest of a broken call, up to the next mark."""
        mark = self._ends.search(self._held)
        if mark is None:
            self._take(max(0, len(self._held) - self._num_kept))
            return False
        self._take(mark.start() if mark[0] in self._beginnings else mark.end())
        self._end_list()
        return True

    def _end_list(self) -> None:
        """Go on with plain text after a list of calls."""
        self._is_after_call, self._is_start = True, False
        self._step = self._read_text


class Arguments(ABC):
    """Reads the arguments of one call whose name stands before them."""

    @abstractmethod
    def read(self, text: str, found: list[str]) -> tuple[int, CallEnd | None]:
        """Read on in a text. Add new text of the JSON object to `found`.

        Returns how many characters are read, and the end once the arguments have one.
        """


def name_ends_of(form: ToolFormat) -> tuple[str, ...]:
    """Return the marks at one of which the name of a call ends. Without a mark of its own, it ends at what follows."""
    if form.name_end:
        return (form.name_end,)
    return ("{",) if form.kind == "named" else (form.argument, form.call_end)


class NamedCallReader(CallReader):
    """Finds calls whose name stands between marks, before the arguments."""

    _MAX_HEAD_CHARS = 2 * MAX_FUNCTION_NAME_CHARS
    """Characters of a call's name and id and the marks between them."""

    def __init__(self, form: ToolFormat, arguments_of: Callable[[str], Arguments]) -> None:
        """`arguments_of` returns a reader for the arguments of the function of this name."""
        super().__init__(form)
        self._arguments_of = arguments_of
        self._arguments: Arguments | None = None
        self._awaited: list[str] = []
        """The marks that may follow a call, before the next one."""

    def _read_opening(self, found: list[str | Call]) -> bool:
        form, at = self._form, 0
        if form.section:
            at = self._after_blank(max(0, after_mark(self._held, 0, form.section)))
        start = FAIL if at > MAX_OPENING_CHARS else after_mark(self._held, at, form.call)
        if start < 0:
            return self._fail_at_mark(found) if start == FAIL else False
        return self._read_head(start, found)

    def _read_head(self, at: int, found: list[str | Call]) -> bool:
        """Read the name of a call whose mark ends at `at`."""
        form, limit = self._form, at + self._MAX_HEAD_CHARS
        ends = [end for mark in name_ends_of(form) if (end := self._held.find(mark, at, limit)) >= 0]
        if not ends:
            return self._fail_at_mark(found) if len(self._held) >= limit else False
        end = min(ends)
        head = self._held[at:end]
        name = head.rpartition(form.id_end)[2] if form.id_end else head.partition(form.id_mark or "\0")[0]
        name = name.strip().removeprefix(form.name_prefix)
        if form.number_mark:
            name = re.sub(rf"{re.escape(form.number_mark)}\d+\Z", "", name)
        if not is_name(name) or "\n" in name or self._begins.search(name):
            return self._fail_at_mark(found)
        self._named(name, end + len(form.name_end), found)
        return True

    def _named(self, name: str, at: int, found: list[str | Call]) -> None:
        """Read the arguments after the name of a call."""
        self._begin_call(name, found)
        self._take(at)
        self._arguments = self._arguments_of(name)
        self._step = self._read_arguments

    def _read_arguments(self, found: list[str | Call]) -> bool:
        pieces: list[str] = []
        num_read, end = self._arguments.read(self._held, pieces)  # type: ignore[union-attr]
        self._take(num_read)
        fits = self._add_arguments("".join(pieces), found)
        if end == "broken" or not fits:
            return self._fail(0, found)
        if end == "whole":
            self._end_call(found, "whole")
            own_end = "" if self._form.kind == "tagged" else self._form.call_end.strip()
            self._awaited = [mark for mark in (own_end, self._form.between.strip()) if mark]
            self._step = self._read_between
        return end is not None

    def _fail_at_mark(self, found: list[str | Call]) -> bool:
        """Return the mark at which no call begins as text."""
        mark = self._begins.match(self._held)
        return self._fail(len(self._held) if mark is None else mark.end(), found)

    def _after_blank(self, at: int) -> int:
        return BLANK.match(self._held, at).end()  # type: ignore[union-attr]

    def _read_between(self, found: list[str | Call]) -> bool:
        """Read what follows a call: its end, another one, or the end of the list, or plain text."""
        while self._awaited:
            self._take(self._after_blank(0))
            after = after_mark(self._held, 0, self._awaited[0])
            if after == WAIT:
                return False
            self._take(max(0, after))
            self._awaited.pop(0)
        self._take(self._after_blank(0))
        opens = after_mark(self._held, 0, self._form.call)
        closes = after_mark(self._held, 0, self._form.section_end) if self._form.section_end else FAIL
        if opens < 0 and closes < 0 and WAIT in (opens, closes):
            return False
        if opens >= 0:
            self._step = self._read_opening
        else:
            self._take(max(0, closes))
            self._end_list()
        return True
