"""Messages about the end of a process: its exit status, and the reason from the last lines of its log."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from typing import Literal

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_COLORS = re.compile(r"\x1b\[\d*m")
_LINE_FOR_PEOPLE = re.compile(rf"\d\d:\d\d:\d\d ({'|'.join(_LEVELS)}) +(.*)")
"""An event in a log for people (`runtime/console_format.py`)."""


def end_in_words(status: int | None, tail: Iterable[str]) -> str:
    """Describe an exit status and its reason in the last lines of the log.

    Of a killed process only an error is one, such as a guard's: other last lines do not concern its end.
    """
    words = status_in_words(status)
    reason = reason_in(tail, least="ERROR" if signal.SIGKILL.name in words else "WARNING")
    return f"{words}: {reason}" if reason else words


def status_in_words(status: int | None) -> str:
    """Describe an exit status and the signal behind it. Guards and shells report a signal as 128 plus its number."""
    number = 0 if status is None else -status if status < 0 else status - 128
    if number not in set(signal.Signals):
        return f"status {status}"
    hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"status {128 + number} ({signal.Signals(number).name}{hint})"


def reason_in(tail: Iterable[str], *, least: Literal["WARNING", "ERROR"] = "WARNING") -> str:
    """Return the reason from the end of a log: its last line, if that is an event of at least the level `least`.

    A line that is no event, such as a command's error, counts as a warning.
    """
    last = next((line for line in reversed([*tail]) if line.strip()), "")
    level, text = _event_in(last) or ("WARNING", last.strip().removeprefix("penstock: "))
    return text if _LEVELS.index(level) >= _LEVELS.index(least) else ""


def _event_in(line: str) -> tuple[str, str] | None:
    """Return the level and the text of an event in either format of the log."""
    if match := _LINE_FOR_PEOPLE.fullmatch(_COLORS.sub("", line)):
        return match[1], match[2]
    try:
        record = json.loads(line)
        level = _LEVELS[_LEVELS.index(record["level"])]
    except (ValueError, TypeError, KeyError):
        return None
    return level, ": ".join(str(record[name]) for name in ("message", "reason") if name in record)
