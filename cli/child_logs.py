"""The logs of child processes: how their lines are read and passed on, and the reason for an end that they give."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Literal

from penstock.runtime.logging import END_EVENT, LogSettings, has_color
from penstock.runtime.terminal import only_colors

LogSink = Callable[[str, Sequence[str]], None]
"""Takes a child's name and the next lines of its log."""
GATHER_S = 0.05
"""Seconds for which lines are gathered before they are read. A gateway writes a line for each request."""
_MAX_LINE_BYTES = 1 << 20
PIPE_BYTES = 1 << 20
"""What the pipe of a child should hold: a child that fills it waits."""
_log = logging.getLogger(__package__)


# --- reading


async def lines_of(pipe: int) -> AsyncIterator[list[str]]:
    """Yield the lines that arrive in a pipe, those of a moment together, until its other end is closed.

    `pipe`: a descriptor that does not block. A line above 1 MiB is left out.
    """
    rest, is_too_long = b"", False
    while True:
        await _until_readable(pipe)
        try:
            data = os.read(pipe, PIPE_BYTES)
        except BlockingIOError:
            continue
        *ended, rest = (rest + data).split(b"\n")
        if ended and is_too_long:
            del ended[0]
            is_too_long = False
        if not data and rest:
            ended.append(rest)
        if is_too_long or len(rest) > _MAX_LINE_BYTES:
            rest, is_too_long = b"", True
        if ended:
            yield [line.decode(errors="replace").rstrip() for line in ended]
        if not data:
            return
        if len(data) < PIPE_BYTES // 64:
            await asyncio.sleep(GATHER_S)


async def _until_readable(pipe: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pipe, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe)


# --- the reason for an end


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_COLORS = re.compile(r"\x1b\[\d*m")
_LINE_FOR_PEOPLE = re.compile(rf"\d\d:\d\d:\d\d ({'|'.join(_LEVELS)}) +(.*)")
"""An event in a log for people (`ConsoleFormatter`)."""


def end_in_words(status: int | None, tail: Iterable[str]) -> str:
    """Describe an exit status, and the reason that the last lines of the log give.

    After a kill, only a line of the level ERROR counts as the reason, such as a guard's: the process itself had no time
    to write why it ended.
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
    level, text = _end_event_in(last) or ("WARNING", last.strip().removeprefix("penstock: "))
    return text if _LEVELS.index(level) >= _LEVELS.index(least) else ""


def _end_event_in(line: str) -> tuple[str, str] | None:
    """Return the level and the text of an event in either format of the log."""
    if match := _LINE_FOR_PEOPLE.fullmatch(_COLORS.sub("", line)):
        return match[1], match[2]
    try:
        record = json.loads(line)
        level = _LEVELS[_LEVELS.index(record["level"])]
    except (ValueError, TypeError, KeyError):
        return None
    told = [str(record[name]) for name in ("message", "reason") if name in record]
    return level, ": ".join(told[1:] if told[0] == END_EVENT and told[1:] else told)


# --- passing on


_ERROR = "penstock: "
"""What begins the line with which a command ends."""
_END, _TRACEBACK = f'"message": "{END_EVENT}"', '"exc_info"'
"""The same in JSON, and what a line with a traceback has."""


def relay_of(logs: LogSettings) -> LogSink:
    """Return what writes a child's lines to stderr: after the child's name for people, as JSON for programs."""
    is_json = logs.format_for(sys.stderr) == "json"

    def relay(name: str, lines: Sequence[str]) -> None:
        told = list[str]()
        for line in lines:
            if line.startswith(_ERROR) or (_END in line and _TRACEBACK not in line):
                continue  # This command says it, when the child has ended.
            if not is_json:
                told.append(f"{log_prefix(name)}{only_colors(line)}")
            elif line.startswith('{"'):
                # The first field says whose event it is. Nothing is parsed, because each job of a node has a line.
                told.append(f'{{"part": "{name}", {line[1:]}')
            else:
                _write(told)
                _log.info("output", extra={"part": name, "line": line})
        _write(told)

    return relay


def _write(told: list[str]) -> None:
    if told:
        print("\n".join(told), file=sys.stderr, flush=True)  # noqa: T201
        told.clear()


def log_prefix(name: str) -> str:
    """Return what begins a process's lines for people."""
    return f"{name:8}| "


def log_variables(logs: LogSettings) -> dict[str, str]:
    """Return the environment variables by which the children log as this process does."""
    log_format = logs.format_for(sys.stderr)
    variables = {"PENSTOCK_LOG_LEVEL": logs.log_level, "PENSTOCK_LOG_FORMAT": log_format}
    # The children write to a pipe, so they cannot see the terminal.
    return variables | ({"FORCE_COLOR": "1"} if log_format == "console" and has_color(sys.stderr) else {})
