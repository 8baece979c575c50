"""JSON that is written in parts, so that no answer exists as a whole: neither as objects nor as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from pydantic_core import to_json

ROWS_PER_PART = 16
"""Rows that are written at once: a row of log-probabilities takes about a kilobyte."""
CHARS_PER_PART = 16 << 10

T = TypeVar("T")


class Lazy:
    """A value that is made when it is written. `make` is called anew each time."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make


class Rows(Lazy):
    """An array of plain values."""


class Items(Lazy):
    """An array of values that may have lazy ones in them."""


class Text(Lazy):
    """A string in pieces."""


def json_parts(value: Any) -> Iterator[bytes]:
    """The JSON of a value, in parts of some kilobytes; objects may hold lazy values, lists only where they are lazy."""
    if isinstance(value, dict):
        yield from _object_parts(value)
    elif isinstance(value, Rows):
        yield from _joined(b"[", (to_json(rows)[1:-1] for rows in _batches(value.make())), b"]")
    elif isinstance(value, Items):
        yield b"["
        for i, item in enumerate(value.make()):
            if i:
                yield b","
            yield from json_parts(item)
        yield b"]"
    elif isinstance(value, Text):
        yield b'"'
        for text in value.make():
            for at in range(0, len(text), CHARS_PER_PART):
                yield to_json(text[at : at + CHARS_PER_PART])[1:-1]
        yield b'"'
    else:
        yield to_json(value)


def plain(value: Any) -> Any:
    """The same value with nothing lazy in it."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, Text):
        return "".join(value.make())
    if isinstance(value, Lazy):
        return [plain(item) for item in value.make()]
    return value


def _object_parts(value: dict[str, Any]) -> Iterator[bytes]:
    if not any(isinstance(member, (dict, Lazy)) for member in value.values()):
        yield to_json(value)
        return
    yield b"{"
    for i, (name, member) in enumerate(value.items()):
        yield (b"," if i else b"") + to_json(name) + b":"
        yield from json_parts(member)
    yield b"}"


def _joined(before: bytes, parts: Iterable[bytes], after: bytes) -> Iterator[bytes]:
    yield before
    for i, part in enumerate(parts):
        yield b"," + part if i else part
    yield after


def _batches(rows: Iterable[T]) -> Iterator[list[T]]:
    left = iter(rows)
    while batch := list(islice(left, ROWS_PER_PART)):
        yield batch
