"""Checks of the JSON that a model wrote, without holding an event loop for long.

The arguments of a call have up to a megabyte. So a check must neither walk over all values in Python nor start
collections of garbage: a tree of lists and objects has none. To free such a tree takes half as long again, so a reader
keeps it until its next piece of text.
"""

from __future__ import annotations

import gc
import json
import math
import re
from typing import Any

MAX_CONTAINERS = 1 << 17
"""Lists and objects in the arguments of one call. Twice as many could take more than 50 ms."""
_LARGE_EXPONENT = re.compile(r"[eE]\+?[0-9]{3}")
_DIGITS = 100
"""A number that is beyond the range of a double has an exponent of three digits, or more than twice as many digits."""
_OVERFLOW_CHARS = 5
"""Characters of `1e309`, the shortest number that is beyond the range."""
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def value_of(text: str) -> Any:
    """Parse JSON, with null in place of each number with a fraction or exponent, unless the text is nothing else.

    Raises ValueError also for what `json_of` refuses: infinite numbers, NaN, lone surrogates, too deep nesting; and for
    more than MAX_CONTAINERS.
    """
    if text.count("[") + text.count("{") > MAX_CONTAINERS and _num_containers(text) > MAX_CONTAINERS:
        raise ValueError(f"has more than {MAX_CONTAINERS} lists and objects")
    # To make the floats would take five times as long as the rest.
    fractions: list[str] = []
    decoder = json.JSONDecoder(parse_constant=_refused, parse_float=fractions.append)
    was_on = gc.isenabled()
    gc.disable()
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    finally:
        if was_on:
            gc.enable()
    if fractions and (_LARGE_EXPONENT.search(text) or _has_long_number(text)):
        numbers = [float(one) for one in fractions if len(one) >= _OVERFLOW_CHARS]
        if math.inf in numbers or -math.inf in numbers:
            raise ValueError("a number is beyond the range of a double")
    if "\\u" in text and _SURROGATE.search(text) and _SURROGATE.search(_PAIR.sub("", text.replace("\\\\", ""))):
        raise ValueError("text must be valid Unicode, without lone surrogates")
    text.encode()  # Raises UnicodeEncodeError, which is a ValueError.
    return float(fractions[0]) if value is None and fractions else value


def _has_long_number(text: str) -> bool:
    """Whether a number may have twice _DIGITS digits or more."""
    return any(text[at : at + _DIGITS].isdigit() for at in range(0, len(text) - _DIGITS, _DIGITS))


def _num_containers(text: str) -> int:
    """Return the number of brackets outside strings."""
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    return outside.count("[") + outside.count("{")


def _refused(literal: str) -> Any:
    raise ValueError(f"{literal} is no JSON")


def object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, with null as in `value_of`, or None."""
    try:
        value = value_of(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
