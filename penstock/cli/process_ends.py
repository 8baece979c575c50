"""Messages about the end of a process: its exit status, and the reason from the last lines of its log."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable

_NO_REASONS = ("DEBUG", "INFO")
"""Levels of events that do not say why a process ended."""


def status_in_words(status: int | None) -> str:
    """Describe an exit status and the signal behind it. Guards and shells report a signal as 128 plus its number."""
    number = 0 if status is None else -status if status < 0 else status - 128
    if number not in set(signal.Signals):
        return f"status {status}"
    hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"status {128 + number} ({signal.Signals(number).name}{hint})"


def reason_in(tail: Iterable[str]) -> str:
    """Return the reason from the end of a log: the last line, or its message and reason if it is JSON.

    A last event of level info, such as the end of a job, is no reason. A killed process leaves none.
    """
    last = next((line for line in reversed([*tail]) if line.strip()), "")
    try:
        record = json.loads(last)
        if record.get("level") in _NO_REASONS:
            return ""
        return ": ".join(str(record[name]) for name in ("message", "reason") if name in record)
    except (ValueError, TypeError, AttributeError):
        return last.strip().removeprefix("penstock: ")
