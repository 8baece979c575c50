"""Reading what another process may have damaged in Redis: fields of records, sums, and keys of another type.

A record that is asked for by name raises DamagedRecordError, which names the field. In sums and statistics, what is no
number counts as 0: `penstock audit` finds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from penstock.contract.errors import DamagedRecordError

T = TypeVar("T")
MAX_WHOLE = 1 << 53
"""Largest number of a record: Lua's numbers hold no larger ones exactly."""
MAX_TIME_MS = 253_402_300_799_999
"""The end of the year 9999, the last time that can be shown."""
_MAX_SHOWN = 32
_WHOLE = re.compile(r"-?[0-9]{1,16}")
_ALL_WHOLE = re.compile(r"[0-9]{1,15}( [0-9]{1,15})*")


class RecordFields:
    """The fields of one record, each checked where it is read. Every method raises DamagedRecordError."""

    def __init__(self, what: str, found: Mapping[bytes, bytes]) -> None:
        """`what` names the record in errors, such as `batch batch_1`."""
        self.what = what
        self._found = found

    def __contains__(self, name: str) -> bool:
        return name.encode() in self._found

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text; `default` for an absent field, which must otherwise be there."""
        return self.parsed(name, str, default)

    def whole(self, name: str, default: int | None = None, *, most: int = MAX_WHOLE) -> int:
        """Return a whole number from 0 to `most`."""

        def number(text: str) -> int:
            if (found := whole(text, -1, most=most)) < 0:
                raise ValueError(text)
            return found

        return self.parsed(name, number, default)

    def time_ms(self, name: str) -> int:
        """Return a time."""
        return self.whole(name, most=MAX_TIME_MS)

    def one_of(self, name: str, values: Collection[str]) -> str:
        """Return a text that is one of these values."""
        text = self.text(name)
        if text not in values:
            raise self.damaged(name, f"is {text[:_MAX_SHOWN]!r}")
        return text

    def parsed(self, name: str, parse: Callable[[str], T], default: T | None = None) -> T:
        """Return what `parse` makes of a text. It may raise ValueError, TypeError or LookupError."""
        data = self._found.get(name.encode())
        if data is None:
            if default is None:
                raise self.damaged(name, "is absent")
            return default
        try:
            return parse(data.decode())
        except (ValueError, TypeError, LookupError, RecursionError):
            raise self.damaged(name, f"is {data[:_MAX_SHOWN]!r}") from None

    def damaged(self, name: str, problem: str) -> DamagedRecordError:
        """Return the error for one field."""
        return DamagedRecordError(f"the record of {self.what} is damaged: {name} {problem}")


def whole(data: object, instead: int = 0, *, least: int = 0, most: int = MAX_WHOLE) -> int:
    """Return a whole number of Redis; `instead` for what is none from `least` to `most`, which the scripts mend too."""
    # `int` takes blanks, underscores and the digits of any script.
    text = data.decode(errors="replace") if isinstance(data, bytes) else data
    if not isinstance(text, str) or not _WHOLE.fullmatch(text):
        return instead
    return number if least <= (number := int(text)) <= most else instead


def all_whole(texts: Sequence[str]) -> list[int]:
    """Return what `whole` returns for each text. Nearly all are whole numbers, and one look at all is faster."""
    text = " ".join(texts)
    are_plain = text.count(" ") == len(texts) - 1 and _ALL_WHOLE.fullmatch(text)
    return [*map(int if are_plain else whole, texts)]


def sums_of(found: Mapping[bytes, bytes] | None) -> dict[str, int]:
    """Return the sums of a hash by field, without fields that are no text."""
    return {name.decode(): whole(value) for name, value in (found or {}).items() if is_text(name)}


def is_text(data: bytes) -> bool:
    """Return whether these bytes are UTF-8."""
    return "\ufffd" not in data.decode(errors="replace")


def is_wrong_type(error: object) -> bool:
    """Return whether Redis refused a command because the key has another type."""
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


async def unless_wrong_type(default: T, command: Callable[..., Any], *args: Any, **options: Any) -> T:
    """Return the answer to a command of redis-py, `default` for a key of another type. Raises its other errors."""
    # The call is made here: of one that a cancelled task was given and never awaited, Python would warn.
    try:
        found: T = await command(*args, **options)
        return found
    except ResponseError as error:
        if not is_wrong_type(error):
            raise
        return default


async def executed(pipe: Any, default: Any = None) -> list[Any]:
    """Return the answers of a pipeline, `default` for a key of another type. Raises redis-py's other errors."""
    found: Sequence[Any] = await pipe.execute(raise_on_error=False)
    return without_wrong_types(found, [default] * len(found))


def without_wrong_types(answers: Sequence[Any], defaults: Sequence[Any]) -> list[Any]:
    """Return answers, with its default for each whose key has another type. Raises redis-py's other errors."""
    for one in answers:
        if isinstance(one, Exception) and not is_wrong_type(one):
            raise one
    return [default if isinstance(one, Exception) else one for one, default in zip(answers, defaults, strict=True)]
