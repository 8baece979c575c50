"""Grammars of a text that stands inside a JSON string, as the input of a custom tool does in the arguments of its call.

A Lark grammar or a regular expression for the text becomes a Lark grammar for the text as JSON writes it: a line feed
as backslash and n, for example. Each character has one spelling, so the new grammar derives exactly the same texts.

llguidance ends a terminal where the next byte cannot continue it. Escapes share their first byte, so a terminal that
might go on with one would hide the escape that begins the next terminal. So rules become terminals, which are merged
into one automaton. Rules that contain themselves cannot, and stay rules; then a terminal that might go on with an
escape is refused, unless nothing else begins with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_SPECIAL = ['"', "\\", *map(chr, range(0x20))]
"""The characters that JSON escapes."""
_NOT_SPECIAL = r'[^"\\\x00-\x1f]'
_SPACES = frozenset("\t\n\x0b\x0c\r")
_SPECIAL_OF_SET: Mapping[str, frozenset[str]] = {
    "d": frozenset(),
    "w": frozenset(),
    "s": _SPACES,
    "D": frozenset(_SPECIAL),
    "W": frozenset(_SPECIAL),
    "S": frozenset(_SPECIAL) - _SPACES,
}
"""The escapes of regular expressions that stand for sets, and which special characters each set has."""
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\x0c", "v": "\x0b", "a": "\x07"}
_ESCAPE = re.compile(r"\\(?:[pP]\{(?P<category>\w+)\}|(?:x|u)\{?(?P<code>[0-9a-fA-F]{2,8})\}?|(?P<char>.))", re.DOTALL)
_FLAGS = re.compile(r"\(\?([a-z-]*)\)")
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Lark's library of terminals, as regular expressions."""


_OPEN_END = re.compile(r"[*+?}]\)*/$")
"""The end of an expression that may go on."""


class QuotingError(ValueError):
    """A grammar uses what cannot be translated."""


def quoted_grammar(syntax: str, definition: str) -> str:
    """Return a Lark grammar for a text as JSON writes it. syntax: lark or regex. Raises QuotingError."""
    if syntax == "regex":
        return f"start: /{quoted_regex(definition.removeprefix('^').removesuffix('$'))}/"
    return _Grammar(definition).lark()


def _spelled(char: str, flags: str = "") -> str:
    """Return a regular expression for a character as JSON writes it."""
    spelling = json.dumps(char, ensure_ascii=False)[1:-1]
    text = re.escape(spelling).replace("/", r"\/")
    if len(spelling) == 1:
        return text
    return f"(?-i:{text})" if "i" in flags else f"(?:{text})"


def quoted_regex(pattern: str, flags: str = "") -> str:
    """Return a regular expression, in Rust's notation, for the texts of another one as JSON writes them."""
    given = _FLAGS.match(pattern)
    if given is not None:
        flags, pattern = flags + given[1], pattern[given.end() :]
    if unknown := set(flags) - set("imsu"):
        raise QuotingError(f"the flag {min(unknown)} of a regular expression is not supported here")
    parts, at = list[str](), 0
    while at < len(pattern):
        part, at = _part_at(pattern, at, flags)
        parts.append(part)
    text = "".join(parts)
    return f"(?i:{text})" if "i" in flags else text


def _part_at(pattern: str, at: int, flags: str) -> tuple[str, int]:
    char = pattern[at]
    if char == "\\":
        found = _escape_at(pattern, at)
        if isinstance(found.low, str):
            return _spelled(found.low, flags), found.end
        return _of_set(found.text, found.low, flags), found.end
    if char == "[":
        return _class_at(pattern, at, flags)
    if char == ".":
        line_end = frozenset() if "s" in flags else frozenset("\n")
        return _of_set(r"[\s\S]" if "s" in flags else r"[^\n]", frozenset(_SPECIAL) - line_end, flags), at + 1
    if char == "(" and (opening := re.compile(r"\((\?:|\?P?<\w+>)?(?!\?)").match(pattern, at)):
        return "(?:", opening.end()
    if char == "(" or char in "^$":
        raise QuotingError(f"{pattern[at : at + 4]!r} in a regular expression is not supported here")
    if char == "{" and (times := re.compile(r"\{\d+(,\d*)?\}").match(pattern, at)):
        return times[0], times.end()
    return (char if char in "*+?|)" else _spelled(char, flags)), at + 1


class _Escape(NamedTuple):
    text: str
    low: str | frozenset[str]
    """A character, or the special characters of a set."""
    end: int


def _escape_at(pattern: str, at: int) -> _Escape:
    found = _ESCAPE.match(pattern, at)
    if found is None:
        raise QuotingError("a regular expression ends in a backslash")
    category, code, char = found["category"], found["code"], found["char"] or ""
    if category is not None:
        if category[0] not in "LMN" or found[0][1] == "P":
            raise QuotingError(f"{found[0]} in a regular expression is not supported here")
        return _Escape(found[0], frozenset(), found.end())
    if char in _SPECIAL_OF_SET:
        return _Escape(found[0], _SPECIAL_OF_SET[char], found.end())
    if code is None and char.isalnum() and char not in _CONTROLS:
        raise QuotingError(f"{found[0]} in a regular expression is not supported here")
    return _Escape(found[0], chr(int(code, 16)) if code else _CONTROLS.get(char, char), found.end())


def _class_at(pattern: str, at: int, flags: str) -> tuple[str, int]:
    """Return the translated class at a position, and where it ends."""
    is_negated = pattern.startswith("[^", at)
    start = at = at + (2 if is_negated else 1)
    special, parts = set[str](), list[str]()
    while at < len(pattern) and (pattern[at] != "]" or at == start):
        low = _escape_at(pattern, at) if pattern[at] == "\\" else _Escape("", pattern[at], at + 1)
        if (low.low == "[" and not low.text) or pattern.startswith(("&&", "--", "~~"), at):
            raise QuotingError("a class inside a class of a regular expression is not supported here")
        at = low.end
        if not isinstance(low.low, str):
            special |= low.low
            parts.append(low.text)
            continue
        high = low
        if pattern.startswith("-", at) and at + 1 < len(pattern) and pattern[at + 1] != "]":
            high = _escape_at(pattern, at + 1) if pattern[at + 1] == "\\" else _Escape("", pattern[at + 1], at + 2)
            at = high.end
        if not isinstance(high.low, str):
            raise QuotingError("a range of a regular expression ends in a set")
        special |= {one for one in _SPECIAL if low.low <= one <= high.low}
        parts.append(f"{_code(low.low)}-{_code(high.low)}")
    if at >= len(pattern):
        raise QuotingError("a class of a regular expression has no end")
    negation = "^" if is_negated else ""
    found = frozenset(_SPECIAL) - special if is_negated else frozenset(special)
    return _of_set(f"[{negation}{''.join(parts)}]", found, flags), at + 1


def _code(char: str) -> str:
    return rf"\x{{{ord(char):x}}}"


def _of_set(text: str, special: frozenset[str], flags: str) -> str:
    """Return an expression for one character of a set. special: those of it that JSON escapes."""
    return f"(?:{'|'.join([f'[{text}&&{_NOT_SPECIAL}]', *(_spelled(one, flags) for one in sorted(special))])})"


_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|(?:\#|//)[^\n]*)
    |(?P<alias>->[ \t]*[\w-]+)
    |(?P<range>"(?:\\.|[^"\\])*"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\])*")
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<directive>%\w+)
    |(?P<definition>[!?]*[A-Za-z_][\w-]*(?:\.-?\d+)?[ \t]*:(?!:))
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<number>\d+)
    |(?P<repeat>~[ \t]*\d+(?:\.\.\d+)?)
    |(?P<mark>[|()\[\]*+?{},.])""",
    re.VERBOSE,
)
_IMPORT = re.compile(
    r"[ \t]*common(?:\.(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|[ \t]*\((?P<several>[\w, \t]+)\))"
)


@dataclass
class _Definition:
    parts: list[tuple[str, str]] = field(default_factory=list)
    """Kinds and texts; a text of kind "name" refers to a definition, others are translated already."""


class _Grammar:
    """Translates a Lark grammar token by token."""

    def __init__(self, text: str) -> None:
        # Of one request.
        self._definitions: dict[str, _Definition] = {}
        self._ignored: list[_Definition] = []
        self._read(text)
        if "start" not in self._definitions:
            raise QuotingError("the grammar has no rule start")
        every = [*self._definitions.values(), *self._ignored]
        for name in (text for one in every for kind, text in one.parts if kind == "name"):
            if name not in self._definitions:
                raise QuotingError(f"the grammar does not define {name!r}")

    def lark(self) -> str:
        """Return the translated grammar."""
        rules = self._rules()
        if rules:
            self._check_escapes()
        names = {name: f"{'r' if name in rules else 'T'}{at}" for at, name in enumerate(self._definitions)}

        def text_of(one: _Definition) -> str:
            return " ".join(names[text] if kind == "name" else text for kind, text in one.parts)

        lines = [f"start: {names['start']}"]
        lines += [f"{names[name]}: {text_of(one)}" for name, one in self._definitions.items()]
        return "\n".join([*lines, *(f"%ignore {text_of(one)}" for one in self._ignored)])

    def _rules(self) -> set[str]:
        """Return what must stay a rule: what contains itself, and what contains such rules. With %ignore, each rule."""
        uses = {name: {text for kind, text in one.parts if kind == "name"} for name, one in self._definitions.items()}
        if self._ignored:
            return {name for name in uses if name != name.upper()}
        # Remove terminals, which use terminals only, until nothing changes.
        left = dict(uses)
        while terminals := [name for name, used in left.items() if not used & left.keys()]:
            for name in terminals:
                del left[name]
        return set(left)

    def _check_escapes(self) -> None:
        parts = {part for one in [*self._definitions.values(), *self._ignored] for part in one.parts}
        marks = {"string": "\\\\", "regex": ":\\\\"}
        beginning = {text for kind, text in parts if kind in marks and marks[kind] in text}
        if any(_OPEN_END.search(text) and beginning - {text} for text in beginning):
            message = (
                "the grammar has rules that contain themselves, or %ignore, and a terminal that may go on with a "
                "character that JSON escapes; end that terminal with another character"
            )
            raise QuotingError(message)

    def _read(self, text: str) -> None:
        at, current = 0, None
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise QuotingError(f"{text[at : at + 16]!r} in the grammar is not supported here")
            at, kind, token = found.end(), str(found.lastgroup), found[0]
            if kind == "directive":
                at, current = self._directive(token, text, at)
            elif kind == "definition":
                name = re.sub(r"\.-?\d+$", "", token.rstrip(": \t")).lstrip("!?")
                current = self._definitions.setdefault(name, _Definition())
                if current.parts:
                    raise QuotingError(f"the grammar defines {name!r} twice")
            elif kind not in ("blank", "alias"):
                if current is None:
                    raise QuotingError(f"{token[:16]!r} in the grammar stands outside of a rule")
                current.parts += _translated(kind, token)

    def _directive(self, token: str, text: str, at: int) -> tuple[int, _Definition | None]:
        """Handle a directive. Return where its text ends, and the definition that follows it."""
        if token == "%ignore":
            self._ignored.append(_Definition())
            return at, self._ignored[-1]
        found = _IMPORT.match(text, at) if token == "%import" else None
        if found is None:
            raise QuotingError(f"{token} in the grammar is not supported here")
        names = [found["one"]] if found["one"] else [name.strip() for name in found["several"].split(",")]
        for name in names:
            if name not in _COMMON:
                raise QuotingError(f"common.{name} is not supported here")
            regex = f"/{quoted_regex(_COMMON[name])}/"
            self._definitions[found["alias"] or name] = _Definition([("regex", regex)])
        return found.end(), None


def _translated(kind: str, token: str) -> Iterator[tuple[str, str]]:
    if kind == "string":
        text = _text_of(token.removesuffix("i"))
        spelling = json.dumps(text, ensure_ascii=False)[1:-1]
        if token.endswith("i"):
            yield kind, f"/{quoted_regex(re.escape(text), 'i')}/"
        else:
            yield kind, json.dumps(spelling, ensure_ascii=False)
    elif kind == "range":
        low, high = (_text_of(part.strip()) for part in re.split(r'(?<=")[ \t]*\.\.[ \t]*(?=")', token))
        if len(low) != 1 or len(high) != 1:
            raise QuotingError(f"the range {token} in the grammar needs two characters")
        yield kind, f"/{quoted_regex(f'[{_code(low)}-{_code(high)}]')}/"
    elif kind == "regex":
        pattern, _, flags = token[1:].rpartition("/")
        yield kind, f"/{quoted_regex(pattern, flags)}/"
    elif kind == "mark" and token in "[]":
        yield kind, "(" if token == "[" else ")?"
    elif kind == "repeat":
        low, _, high = token[1:].strip().partition("..")
        yield kind, f"{{{low},{high or low}}}"
    else:
        yield kind, token


def _text_of(string: str) -> str:
    """Return the text of a string in the grammar."""
    try:
        text: str = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", string))
    except ValueError:
        raise QuotingError(f"the string {string[:32]} in the grammar has an unknown escape") from None
    return text
