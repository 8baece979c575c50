"""Parsing of tool calls in generated text: pieces of text go in, plain text and whole calls come out, in their order.

Text that only resembles a call is returned unchanged. So is a call that no request may contain, because its name is
empty or its name or arguments are too long. Calls after the first MAX_CALLS are dropped. The total result does not
depend on how the text is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.contract.tools import MAX_ARGUMENTS_CHARS, MAX_CALLS, MAX_FUNCTION_NAME_CHARS, json_of

_MAX_UNDECIDED_CHARS = 32
"""Most characters at the start of a text that are held back while they may be the beginning of a bare call."""


_QUOTE = re.compile(r'\\.|["\n]', re.DOTALL)
"""Escapes, quotes and line ends: the characters that matter for finding the strings in a call's JSON."""
_NOT_BLANK = re.compile(r"[^ \t\r\n]")
"""A character that is no white space in JSON."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a choice."""

    index: int
    """Number of the call in its choice, from 0."""
    name: str
    arguments: str
    """A JSON object as text."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The syntax in which one family of models writes tool calls."""

    find: Callable[[str, bool], tuple[int, bool]]
    """Takes a text and whether it is the start of the choice. Returns how many of its first characters are plain text,
    and whether a call begins after them."""
    mark: str
    """The mark that begins a call, and so ends the one before it. Empty: only `find` knows where a call begins."""
    body: str
    """The first character of the JSON after `mark`. Before any other character the mark is plain text."""
    close: str
    """The mark that ends a call. Empty: a call extends to the next one or to the end of the text."""
    calls_of: Callable[[str], list[tuple[str, Any]]]
    """Takes the text of a call from its opening to its end, and returns names and arguments. Raises ValueError,
    KeyError, TypeError or RecursionError if the text is not a call."""


def num_held(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


class ToolCallReader:
    """Finds the tool calls in the text of one choice, piece by piece."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._held = ""
        """Text that may belong to a call and is not returned yet."""
        self._ends = re.compile("|".join(re.escape(mark) for mark in (form.mark, form.close) if mark) or r"(?!)")
        """The marks at which an open call ends."""
        self._num_kept = max(len(form.mark), len(form.close), 1) - 1
        """Characters at the end of `_held` in which such a mark may have begun."""
        self._searched = self._num_counted = 0
        """Positions in `_held`: no call ends before the first, and quotes are counted up to the second."""
        self._in_string = False
        self._is_open = False
        self._has_body = False
        """Whether the JSON of the open call has begun."""
        self._is_after_call = False
        self._is_start = True
        self._num_calls = 0

    def push(self, text: str) -> list[str | Call]:
        """Add a piece of text. Return the plain text and the calls that are certain now, in their order."""
        self._held += text
        found: list[str | Call] = []
        while self._is_open or self._opens(found):
            end = self._find_end()
            if end < 0:
                break
            self._parse(self._take(end), found)
        return found

    def end(self) -> list[str | Call]:
        """Return the remaining plain text and calls at the end of the text, which also ends a call."""
        found: list[str | Call] = []
        written = self._take(len(self._held))
        if self._is_open:
            self._parse(written, found)
        elif written:
            found.append(written)
        return found

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    def _opens(self, found: list[str | Call]) -> bool:
        """Move plain text from `_held` to `found`, and return whether a call begins after it."""
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held
        num_plain, self._is_open = self._form.find(self._held, self._is_start)
        if num_plain:
            self._is_start = False
            found.append(self._take(num_plain))
        self._searched = self._num_counted = len(self._form.mark)
        self._in_string = False
        self._has_body = not self._form.body
        return self._is_open

    def _find_end(self) -> int:
        """Return the position after the open call, or -1: after the closing mark, or before the next opening mark.

        Marks in strings do not count. If no JSON follows the opening mark, that mark is the whole of the call.
        """
        if not self._has_body:
            first = _NOT_BLANK.search(self._held, self._searched)
            if first is None:
                self._searched = len(self._held)
                return -1
            if first[0] != self._form.body:
                return first.start()
            self._has_body = True
        while mark := self._ends.search(self._held, self._searched):
            for quote in _QUOTE.finditer(self._held, self._num_counted, mark.start()):
                if quote[0] == '"':
                    self._in_string = not self._in_string
                elif quote[0] == "\n":  # JSON strings contain no line end, so a stray quote affects only its own line
                    self._in_string = False
            self._num_counted = mark.start()
            if not self._in_string:
                return mark.start() if mark[0] == self._form.mark else mark.end()
            self._searched = mark.end()
        self._searched = max(self._searched, len(self._held) - self._num_kept)
        return -1

    def _parse(self, written: str, found: list[str | Call]) -> None:
        """Add the calls in `written` to `found`; if it is not a valid call, add it unchanged."""
        self._is_open = self._is_start = False
        try:
            calls = [(name, _arguments_text(name, arguments)) for name, arguments in self._form.calls_of(written)]
        except (ValueError, KeyError, TypeError, RecursionError):
            found.append(written)
            return
        self._is_after_call = True
        for name, arguments in calls[: MAX_CALLS - self._num_calls]:
            found.append(Call(self._num_calls, name, arguments))
            self._num_calls += 1


def _arguments_text(name: object, arguments: object) -> str:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("not a call")
    name.encode()  # a lone surrogate cannot be sent
    text = json.dumps(arguments)
    if not 1 <= len(name) <= MAX_FUNCTION_NAME_CHARS or len(text) > MAX_ARGUMENTS_CHARS:
        raise ValueError("no request may contain such a call")
    return text


def _marked(mark: str) -> Callable[[str, bool], tuple[int, bool]]:
    def find(text: str, is_start: bool) -> tuple[int, bool]:
        at = text.find(mark)
        return (at, True) if at >= 0 else (len(text) - num_held(text, mark), False)

    return find


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_BEGINNINGS = (_PYTHON_TAG, '{"name":', '{"type":"function"')


def _llama_begins(text: str, is_start: bool) -> tuple[int, bool]:
    """`CallFormat.find` for Llama 3, which writes calls as bare JSON.

    Only the position distinguishes a bare call from other JSON, so a text is either one call as a whole or plain text.
    """
    # Look at no more characters than are needed to decide, so that later ones do not change the decision.
    compact = "".join(text[: _MAX_UNDECIDED_CHARS + 1].split())
    if is_start and compact.startswith(_LLAMA_BEGINNINGS):
        return 0, True
    undecided = is_start and len(text) <= _MAX_UNDECIDED_CHARS
    may_begin = undecided and any(beginning.startswith(compact) for beginning in _LLAMA_BEGINNINGS)
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
    # Llama separates several calls with semicolons, so each JSON object is decoded by itself.
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


def _format(mark: str, body: str, close: str, calls_of: Callable[[str], list[tuple[str, Any]]]) -> CallFormat:
    return CallFormat(_marked(mark), mark, body, close, calls_of)


CALL_FORMS = {
    "hermes": _format("<tool_call>", "{", "</tool_call>", _hermes_calls),
    "llama3_json": CallFormat(_llama_begins, "", "", "", _llama_calls),
    "mistral": _format("[TOOL_CALLS]", "[", "", _mistral_calls),
}
"""Call formats by the name of the tool parser in a pool's record."""
