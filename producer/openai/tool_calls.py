"""Tool calls in what a model writes: pieces of text go in, plain text and whole calls come out.

What turns out to be no call comes out as it was written. How a text is cut into pieces makes no difference to all that
comes out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.contract.tools import json_of

_MAX_UNDECIDED_CHARS = 32
"""The longest beginning of a text, white space included, that is held back because a bare call may begin so."""


_QUOTE = re.compile(r'\\.|["\n]', re.DOTALL)
"""What begins and ends strings, and what is escaped in them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `index` counts the calls of its choice, `arguments` is the text of a JSON object."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One family's way of writing calls."""

    find: Callable[[str, bool], tuple[int, bool]]
    """Of a text, and whether the choice begins with it: how much of it is plain, and whether a call begins there."""
    close: str
    """What ends a call; empty: the end of the text."""
    calls_of: Callable[[str], list[tuple[str, Any]]]
    """Names and arguments in what stands from the opening to the end. Where that is no call, it fails as it may."""


def num_held(text: str, mark: str) -> int:
    """The longest end of a text that may be the beginning of `mark`, in characters."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


class ToolCallReader:
    """Reads one choice's text."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._held = ""
        self._searched = self._num_counted = 0
        """No close that ends a call stands in `held` before the first, quotes are counted up to the second."""
        self._in_string = False
        self._is_open = False
        self._is_behind_call = False
        self._is_start = True
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """Plain text and calls that became certain."""
        self._held += text
        plain: list[str] = []
        calls: list[Call] = []
        while self._is_open or self._opens(plain):
            end = self._find_end()
            if end < 0:
                break
            written, self._held = self._held[:end], self._held[end:]
            self._read(written, plain, calls)
        return "".join(plain), tuple(calls)

    def end(self) -> tuple[str, tuple[Call, ...]]:
        """What is left when the text ends."""
        plain: list[str] = []
        calls: list[Call] = []
        if self._is_open and not self._form.close:
            self._read(self._held, plain, calls)
        else:
            plain.append(self._held)
        self._held = ""
        return "".join(plain), tuple(calls)

    def _opens(self, plain: list[str]) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip()
            self._is_behind_call = not self._held
        num_plain, self._is_open = self._form.find(self._held, self._is_start)
        self._is_start = self._is_start and not num_plain
        plain.append(self._held[:num_plain])
        self._held = self._held[num_plain:]
        self._searched = self._num_counted = 0
        self._in_string = False
        return self._is_open

    def _find_end(self) -> int:
        """Where the open call ends, if it does: behind the first close that stands in none of its strings, or -1."""
        close = self._form.close
        while close and (at := self._held.find(close, self._searched)) >= 0:
            for quote in _QUOTE.finditer(self._held, self._num_counted, at):
                if quote[0] == '"':
                    self._in_string = not self._in_string
                elif quote[0] == "\n":  # which a JSON string has none of: one quote too many spoils its line alone
                    self._in_string = False
            self._num_counted = at
            if not self._in_string:
                return at + len(close)
            self._searched = at + len(close)
        self._searched = max(self._searched, len(self._held) - len(close))
        return -1

    def _read(self, written: str, plain: list[str], calls: list[Call]) -> None:
        self._is_open = self._is_start = False
        try:
            found = [(name, _arguments_text(name, arguments)) for name, arguments in self._form.calls_of(written)]
        except (ValueError, KeyError, TypeError, RecursionError):
            plain.append(written)
            return
        self._is_behind_call = True
        for name, arguments in found:
            calls.append(Call(self._num_calls, name, arguments))
            self._num_calls += 1


def _arguments_text(name: object, arguments: object) -> str:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("not a call")
    name.encode()  # a lone surrogate cannot be sent
    return json.dumps(arguments)


def _marked(mark: str) -> Callable[[str, bool], tuple[int, bool]]:
    def find(text: str, is_start: bool) -> tuple[int, bool]:
        at = text.find(mark)
        return (at, True) if at >= 0 else (len(text) - num_held(text, mark), False)

    return find


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_BEGINNINGS = (_PYTHON_TAG, '{"name":', '{"type":"function"')


def _llama_begins(text: str, is_start: bool) -> tuple[int, bool]:
    """Nothing but its place tells a bare call from other JSON, so a call is all of a text or nothing of it."""
    said = "".join(text[: 2 * _MAX_UNDECIDED_CHARS].split())
    if is_start and said.startswith(_LLAMA_BEGINNINGS):
        return 0, True
    undecided = is_start and len(text) <= _MAX_UNDECIDED_CHARS
    may_begin = undecided and any(beginning.startswith(said) for beginning in _LLAMA_BEGINNINGS)
    return (0 if may_begin else len(text)), False


def _hermes_calls(written: str) -> list[tuple[str, Any]]:
    call = json_of(written.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return [(call["name"], call["arguments"])]


def _mistral_calls(written: str) -> list[tuple[str, Any]]:
    calls = json_of(written.removeprefix("[TOOL_CALLS]"))
    if not isinstance(calls, list) or not calls:
        raise TypeError("not a list of calls")
    return [(call["name"], call["arguments"]) for call in calls]


def _llama_calls(written: str) -> list[tuple[str, Any]]:
    # Several calls stand one behind the other, with semicolons between them: as a list they are JSON.
    calls: list[Any] = []
    rest = written.strip().removeprefix(_PYTHON_TAG)
    decoder = json.JSONDecoder()
    while rest := rest.lstrip(" \t\r\n;"):
        call, end = decoder.raw_decode(rest)
        calls.append((call["name"], json_of(json.dumps(call["parameters"]))))
        rest = rest[end:]
    if not calls:
        raise ValueError("no call")
    return calls


CALL_FORMS = {
    "hermes": CallFormat(_marked("<tool_call>"), "</tool_call>", _hermes_calls),
    "llama3_json": CallFormat(_llama_begins, "", _llama_calls),
    "mistral": CallFormat(_marked("[TOOL_CALLS]"), "", _mistral_calls),
}
"""By the name in a pool's record."""
