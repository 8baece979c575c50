"""Output of commands: JSON for programs, and lines for people."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Annotated, Any, Self, TextIO

import typer

from penstock.contract.errors import (
    EXIT_WRONG_USE,
    BusyError,
    ConfigError,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.runtime.terminal import without_controls

EXIT_FAILED = 1
EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h."""


def exit_code_of(error: PenstockError) -> int:
    """Return 2 for a usage error, 75 if the same command may succeed later, and 1 for other errors."""
    if isinstance(error, RequestError | ConfigError):
        return EXIT_WRONG_USE
    if isinstance(error, BusyError | UnavailableError):
        return EXIT_TRY_AGAIN
    return EXIT_FAILED


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]
_FIRST_YEAR_MS = 10**12
"""A value in milliseconds from here on is a time since 1970, not a duration."""


def print_object(shown: Mapping[str, Any], *, as_json: bool) -> None:
    """Print an object as JSON, or as lines for people."""
    write_text((json.dumps(shown, indent=2, ensure_ascii=False) if as_json else "\n".join(object_lines(shown))) + "\n")


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Print text of a model on `stream` (default: stdout), and flush.

    A terminal gets no control characters, so that no model can steer it.
    """
    stream = stream or sys.stdout
    stream.write(without_controls(text) if stream.isatty() else text)
    stream.flush()


def write_line(*words: object, end: str = "\n", file: TextIO | None = None) -> None:
    """Print words as `print` does, on a terminal without control characters: names and texts come from others."""
    write_text(" ".join(map(str, words)) + end, file)


def write_error(message: str, *, as_json: bool = False) -> None:
    """Print the line on stderr that tells why a command ends. A supervisor may pass it on to a terminal.

    as_json: whether it is to be JSON, although the command has no log yet.
    """
    # It takes time to import, and most commands end without an error.
    from penstock.runtime.logging import tell_end

    tell_end(message, as_json=as_json)


def confirm(question: str, *, is_sure: bool, can_ask: bool = True) -> None:
    """Ask on a terminal before a command destroys, unless the caller is sure. Raises ConfigError elsewhere."""
    if is_sure:
        return
    if not (can_ask and sys.stdin.isatty()):
        raise ConfigError(f"add --yes: without a terminal, this command cannot ask: {question}")
    typer.confirm(question, abort=True, err=True)


def say_empty(what: str) -> None:
    """Tell a person that a list is empty. Programs that read stdout see an empty list."""
    write_line(what, file=sys.stderr)


_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})


def problem_of_output(error: Exception) -> str | None:
    """Return one sentence about a file or a stdout that cannot be written; None for another error."""
    if isinstance(error, ExceptionGroup):
        # Of the tasks of a command, the first one tells: the others often end with the same error.
        return next(filter(None, map(problem_of_output, error.exceptions)), None)
    if not isinstance(error, OSError) or error.errno not in _NOT_WRITTEN:
        return None
    return f"the output cannot be written: {f'{error.filename}: ' if error.filename else ''}{error.strerror}"


def give_up_stdout() -> None:
    """Drop what stdout could not write. Otherwise Python tries once more at its end, and shows a traceback."""
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


class JsonArray:
    """A JSON array on stdout, with one object per line. It is written while the objects come."""

    def __init__(self) -> None:
        self._is_empty = True

    def add(self, *objects: Mapping[str, Any]) -> None:
        """Print objects."""
        for shown in objects:
            write_line("[" if self._is_empty else ",")
            write_line(json.dumps(shown, ensure_ascii=False), end="")
            self._is_empty = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After an error the array stays open, so that no program takes it for the whole answer.
        if error is None:
            write_line("[]" if self._is_empty else "\n]")


def object_lines(shown: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield a JSON object as lines for people. Members without a value are left out."""
    for name, value in shown.items():
        if value is None or value in ("", [], (), {}):
            continue
        label = name.removesuffix("_ms") if _is_time(name, value) else name
        if isinstance(value, Mapping):
            yield f"{indent}{label}"
            yield from object_lines(value, f"{indent}  ")
        elif isinstance(value, list | tuple) and isinstance(value[0], Mapping):
            yield f"{indent}{label}"
            for one in value:
                yield f"{indent}  " + "  ".join(_in_words(key, part) for key, part in one.items())
        else:
            yield f"{indent}{label:<18} {_in_words(name, value)}"


def time_in_words(unix_ms: int) -> str:
    """Return a time in UTC to the second."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="seconds")


def duration_in_words(duration_ms: int) -> str:
    """Return a duration in its largest whole unit, in 4 characters: 59s, 3m, 23h, 91d."""
    seconds = duration_ms // 1000
    for unit, size, limit in (("s", 1, 60), ("m", 60, 3600), ("h", 3600, 86_400)):
        if seconds < limit:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86_400}d"


def _is_time(name: str, value: object) -> bool:
    return name.endswith("_ms") and isinstance(value, int) and value >= _FIRST_YEAR_MS


def _in_words(name: str, value: Any) -> str:
    if _is_time(name, value):
        return datetime.fromtimestamp(value / 1000, UTC).isoformat(timespec="milliseconds")
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
