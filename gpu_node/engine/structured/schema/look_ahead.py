"""Look-ahead at the beginning of a pattern, which llguidance's regular expressions lack: other patterns say the same.

pydantic writes it for decimals, Zod for addresses of mail, and people for passwords. Patterns of one schema must all
match, so `^(?=A)(?!B)C` is `^C` beside `^(?:A)` and a pattern of the texts that do not begin with a B.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_ATOMS = 8
"""Most characters of a text that a negative look-ahead may forbid."""
MAX_DIGITS = 64
"""Most digits of a decimal before whose last one a point may stand."""
_ATOM = re.compile(
    r"\\(?:[pP]\{[^}\\]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^bBckpPux1-9])"
    r"|\[\^?(?:[^\]\\]|\\.)+\]|[^\\\[\]^$.|?*+(){}]"
)
"""A character, an escape, or a class."""
_ONE_CHAR = re.compile(r"\\[^a-zA-Z0-9]|[^\\\[\]^$.|?*+(){}]")
_ANYWHERE = re.compile(r"(?:\.|\[\^\]|\[\\s\\S\])\*\??")
_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_KNOWN = {
    # Zod's durations.
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})$"
    )
}
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*\(\?:\\d\{0,(\d{1,3})\}"
    r"\|\(\?=\[\\d\.\]\{1,(\d{1,3})\}0\*\$\)\\d(?:\*\\\.\\d\*|\{0,\d{1,3}\}\\\.\\d\{0,(\d{1,3})\})0\*\$\)"
)
"""What pydantic up to 2.13 writes for a decimal of at most so many digits, of which so many after the point."""


def without_look_ahead(pattern: str) -> tuple[str, list[str]]:
    """Return an ECMA-262 pattern without the look-ahead after its `^`, and the patterns that must match besides.

    A pattern stays as it is where none say the same; llguidance then refuses it. Where `.` stands before what is
    forbidden, line ends count as any character: that allows less.
    """
    if (known := _KNOWN.get(pattern)) is not None:
        return known, []
    if (decimal := _DECIMAL.fullmatch(pattern)) is not None:
        return _decimal(*(None if group is None else int(group) for group in decimal.groups())), []
    if not pattern.startswith(("^(?=", "^(?!")):
        return pattern, []
    at, besides = 1, list[str]()
    while pattern.startswith(("(?=", "(?!"), at):
        if (end := _end_of_group(pattern, at)) is None:
            return pattern, []
        body = pattern[at + 3 : end]
        found = [f"^(?:{body})"] if pattern[at + 2] == "=" else _forbidding(body)
        if found is None:
            return pattern, []
        besides += found
        at = end + 1
    # With alternatives, the look-ahead belongs to the first alone.
    return (pattern, []) if len(_alternatives(pattern[at:])) > 1 else (f"^{pattern[at:]}", besides)


def _decimal(num_whole: int | None, num_chars: int | None, num_places: int | None) -> str:
    """Return a pattern of decimals. Pydantic's own allows any text after the whole digits; this one does not."""
    whole, places = num_whole or 0, min(num_places or 0, (num_chars or 1) - 1)
    if num_places is None:
        forms = [rf"\d{{1,{max(1, whole)}}}"]
        forms += [rf"\d{{1,{i}}}\.\d{{1,{whole - i}}}" for i in range(1, min(whole, MAX_DIGITS))]
        return f"^[+-]?(?:{'|'.join(forms)})$"
    fraction = rf"\.\d{{1,{places}}}" if places else ""
    if not whole:
        return rf"^[+-]?0(?:{fraction})?$"
    return rf"^[+-]?\d{{1,{whole}}}(?:{fraction})?$"


def _marks(pattern: str, at: int = 0) -> Iterator[tuple[int, str, int]]:
    """Yield brackets and `|` outside of escapes and classes: position, sign, and how many groups are open behind it."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif char == "[":
            at = _end_of_class(pattern, at)
        elif char in "()|":
            depth += {"(": 1, ")": -1, "|": 0}[char]
            yield at, char, depth
        at += 1


def _end_of_group(pattern: str, at: int) -> int | None:
    """Return where the group that begins at a position has its closing bracket."""
    return next((end for end, char, depth in _marks(pattern, at) if char == ")" and not depth), None)


def _end_of_class(pattern: str, at: int) -> int:
    at += 2 if pattern.startswith("[^", at) else 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at


def _alternatives(pattern: str) -> list[str]:
    """Return the parts of a pattern between the `|` that stand in no group and no class."""
    parts, start = list[str](), 0
    for at, char, depth in _marks(pattern):
        if char == "|" and not depth:
            parts.append(pattern[start:at])
            start = at + 1
    return [*parts, pattern[start:]]


def _forbidding(body: str) -> list[str] | None:
    """Return patterns of the texts that do not begin with a match of `body`; None if this module knows none."""
    if body.startswith("(?:") and _end_of_group(body, 0) == len(body) - 1:
        body = body[3:-1]
    found = list[str]()
    for one in _alternatives(body):
        if (pattern := _forbidding_one(one)) is None:
            return None
        found.append(pattern)
    return found


def _forbidding_one(body: str) -> str | None:
    body = body.removeprefix("^")
    if body == "$":
        return r"^[\s\S]"
    if (repeated := re.fullmatch(rf"({_ATOM.pattern})([*+])\$", body)) is not None:
        other = _negated(repeated[1])
        return other if repeated[2] == "*" else f"^$|{other}"
    if (anywhere := _ANYWHERE.match(body)) is not None:
        return _without(body[anywhere.end() :])
    to_the_end = body.endswith("$") and not body.endswith("\\$")
    atoms = _ATOM.findall(body.removesuffix("$") if to_the_end else body)
    if "".join(atoms) != body.removesuffix("$" if to_the_end else "") or not 0 < len(atoms) <= MAX_ATOMS:
        return None
    pattern = f"{atoms[-1]}[\\s\\S]" if to_the_end else ""
    for i, atom in enumerate(reversed(atoms)):
        inner = pattern if not i else f"{atom}(?:{pattern})"
        pattern = f"$|{_negated(atom)}" + (f"|{inner}" if inner else "")
    return f"^(?:{pattern})"


def _without(body: str) -> str | None:
    """Return a pattern of the texts that have a match of `body`, of one or two characters, nowhere."""
    if (atom := _ATOM.fullmatch(body)) is not None:
        return f"^{_negated(atom[0])}*$"
    chars = _ONE_CHAR.findall(body)
    if len(chars) != 2 or "".join(chars) != body:
        return None
    first, second = chars
    if first == second:
        return f"^(?:{first}?{_negated(first)})*{first}?$"
    neither = f"[^{_in_class(first)}{_in_class(second)}]"
    return f"^(?:{_negated(first)}|{first}+{neither})*{first}*$"


def _negated(atom: str) -> str:
    if atom.startswith("[^"):
        return f"[{atom[2:]}"
    return f"[^{atom[1:]}" if atom.startswith("[") else f"[^{_in_class(atom)}]"


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "-^]" else char
