"""Parsing of tool calls in generated text: pieces of text go in, plain text and whole calls come out.

Text that only resembles a call is returned unchanged. The total result does not depend on how the text is cut into
pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.contract.tools import json_of

_MAX_UNDECIDED_CHARS = 32
"""Most characters at the start of a text that are held back while they may be the beginning of a bare call."""


_QUOTE = re.compile(r'\\.|["\n]', re.DOTALL)
"""Escapes, quotes and line ends: the characters that matter for finding the strings in a call's JSON."""


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
    close: str
    """The mark that ends a call. Empty: a call extends to the end of the text."""
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
        self._searched = self._num_counted = 0
        """Positions in `_held`: it has no closing mark before the first, and quotes are counted up to the second."""
        self._in_string = False
        self._is_open = False
        self._is_after_call = False
        self._is_start = True
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """Add a piece of text. Return the plain text and the calls that are certain now."""
        self._held += text
        plain: list[str] = []
        calls: list[Call] = []
        while self._is_open or self._opens(plain):
            end = self._find_end()
            if end < 0:
                break
            written, self._held = self._held[:end], self._held[end:]
            self._parse(written, plain, calls)
        return "".join(plain), tuple(calls)

    def end(self) -> tuple[str, tuple[Call, ...]]:
        """Return the remaining plain text and calls at the end of the text."""
        plain: list[str] = []
        calls: list[Call] = []
        if self._is_open and not self._form.close:
            self._parse(self._held, plain, calls)
        else:
            plain.append(self._held)
        self._held = ""
        return "".join(plain), tuple(calls)

    def _opens(self, plain: list[str]) -> bool:
        """Move plain text from `_held` to `plain`, and return whether a call begins after it."""
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held
        num_plain, self._is_open = self._form.find(self._held, self._is_start)
        self._is_start = self._is_start and not num_plain
        plain.append(self._held[:num_plain])
        self._held = self._held[num_plain:]
        self._searched = self._num_counted = 0
        self._in_string = False
        return self._is_open

    def _find_end(self) -> int:
        """Return the position after the first closing mark that is outside of strings, or -1."""
        close = self._form.close
        while close and (at := self._held.find(close, self._searched)) >= 0:
            for quote in _QUOTE.finditer(self._held, self._num_counted, at):
                if quote[0] == '"':
                    self._in_string = not self._in_string
                elif quote[0] == "\n":  # JSON strings contain no line end, so a stray quote affects only its own line
                    self._in_string = False
            self._num_counted = at
            if not self._in_string:
                return at + len(close)
            self._searched = at + len(close)
        self._searched = max(self._searched, len(self._held) - len(close))
        return -1

    def _parse(self, written: str, plain: list[str], calls: list[Call]) -> None:
        """Add the calls in `written` to `calls`; if it is not a valid call, add it to `plain` unchanged."""
        self._is_open = self._is_start = False
        try:
            found = [(name, _arguments_text(name, arguments)) for name, arguments in self._form.calls_of(written)]
        except (ValueError, KeyError, TypeError, RecursionError):
            plain.append(written)
            return
        self._is_after_call = True
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
    """`CallFormat.find` for Llama 3, which writes calls as bare JSON.

    Only the position distinguishes a bare call from other JSON, so a text is either one call as a whole or plain text.
    """
    compact = "".join(text[: 2 * _MAX_UNDECIDED_CHARS].split())
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


CALL_FORMS = {
    "hermes": CallFormat(_marked("<tool_call>"), "</tool_call>", _hermes_calls),
    "llama3_json": CallFormat(_llama_begins, "", _llama_calls),
    "mistral": CallFormat(_marked("[TOOL_CALLS]"), "", _mistral_calls),
}
"""Call formats by the name of the tool parser in a pool's record."""
