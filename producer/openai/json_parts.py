"""JSON written in parts, so that memory never holds a whole answer as objects or as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from pydantic_core import to_json

ROWS_PER_PART = 16
"""Array rows that are written at once. A row of log-probabilities takes about 1 kB."""
CHARS_PER_PART = 16 << 10
"""Characters of a string that are written at once."""

T = TypeVar("T")


class Lazy:
    """A value that is created only when it is written. Each writing calls `make` again."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make


class Rows(Lazy):
    """A lazy array of values that contain nothing lazy."""


class Items(Lazy):
    """A lazy array of values that may contain lazy values."""


class Text(Lazy):
    """A lazy string, made in pieces."""


def json_parts(value: Any, *, ensure_ascii: bool = False) -> Iterator[bytes]:
    """Yield the JSON of a value in parts of several kilobytes.

    Objects and `Items` may contain lazy values. Plain lists may not. `ensure_ascii` escapes all other characters.
    """
    dump = partial(to_json, ensure_ascii=ensure_ascii)
    if isinstance(value, dict):
        yield from _object_parts(value, dump, ensure_ascii)
    elif isinstance(value, Rows):
        yield from _joined(b"[", (dump(rows)[1:-1] for rows in _batches(value.make())), b"]")
    elif isinstance(value, Items):
        yield b"["
        for i, item in enumerate(value.make()):
            if i:
                yield b","
            yield from json_parts(item, ensure_ascii=ensure_ascii)
        yield b"]"
    elif isinstance(value, Text):
        yield b'"'
        for text in value.make():
            for at in range(0, len(text), CHARS_PER_PART):
                yield dump(text[at : at + CHARS_PER_PART])[1:-1]
        yield b'"'
    else:
        yield dump(value)


def plain(value: Any) -> Any:
    """Return the value with each lazy value replaced by its content."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, Text):
        return "".join(value.make())
    if isinstance(value, Lazy):
        return [plain(item) for item in value.make()]
    return value


def _object_parts(value: dict[str, Any], dump: Callable[[Any], bytes], ensure_ascii: bool) -> Iterator[bytes]:
    if not any(isinstance(member, (dict, Lazy)) for member in value.values()):
        yield dump(value)
        return
    yield b"{"
    for i, (name, member) in enumerate(value.items()):
        yield (b"," if i else b"") + dump(name) + b":"
        yield from json_parts(member, ensure_ascii=ensure_ascii)
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
