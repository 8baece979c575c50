"""Logging on stderr: an event's name with its ids and numbers, never prompts or completions.

On a terminal each event is a line for people, elsewhere one JSON object in one line. A process that loads a model says
how far it is, at a slow pace, where no progress bar can be shown.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NoReturn, TextIO

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from penstock.runtime.settings import Settings
from penstock.runtime.terminal import without_controls

_HTTP_CLIENTS = ("httpx", "httpx2")
"""Libraries that log each request as an event of level info."""

_NOT_FIELDS = frozenset({"color_message"})
"""Attributes of records that are no fields: uvicorn adds each message a second time, with terminal colors."""
_RESERVED = frozenset(RESERVED_ATTRS) | _NOT_FIELDS | {"taskName"}
_PLAIN = re.compile(r"[^\s\"'=]+")
_RESET, _DIM = "\x1b[0m", "\x1b[2m"
_COLORS = {"DEBUG": "\x1b[36m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}

_log = logging.getLogger("penstock")
LogFormat = Literal["console", "json"]


class LogSettings(Settings):
    """The level and the format of a process's log."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that penstock logs. Other libraries log nothing below info."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """Format of the log on stderr. console: lines for people; json: one JSON object per line; auto: console on a
    terminal, else json."""

    def format_for(self, stream: TextIO) -> LogFormat:
        """Return the format for a log that is written to `stream`."""
        if self.log_format != "auto":
            return self.log_format
        return "console" if stream.isatty() else "json"


def configure_logging(settings: LogSettings, *, prefix: str = "", fields: Mapping[str, Any] | None = None) -> None:
    """Set up this process's logging. Its entry point calls this once.

    prefix: begins each line for people. fields: those that each JSON object has beside its own.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(log_formatter(settings, sys.stderr, prefix=prefix, fields=fields))
    level: int = getattr(logging, settings.log_level.upper())
    # Other libraries may log contents of messages as debug events.
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler])
    logging.getLogger("penstock").setLevel(level)
    for client in _HTTP_CLIENTS:
        logging.getLogger(client).setLevel(max(level, logging.WARNING))
    if logs_json():
        # Otherwise Python writes tracebacks as text between the events.
        sys.excepthook = lambda _, error, __: tell_crash(error)
        threading.excepthook = _tell_thread


def logs_json() -> bool:
    """Return whether this process's log is JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


END_EVENT = "the process ends"
"""The event of the last line of a process that ends with an error."""


def tell_end(reason: str, *, as_json: bool = False) -> None:
    """Write on stderr why this process ends: a line for people, or an event if its log is JSON.

    as_json: whether it asks for JSON, where its logging is not set up yet.
    """
    if logs_json():
        _log.error(END_EVENT, extra={"reason": reason})
        return
    line = f"penstock: {without_controls(reason)}"
    if as_json:
        facts = {"name": _log.name, "levelno": logging.ERROR, "levelname": "ERROR", "msg": END_EVENT, "reason": reason}
        line = _json_formatter({}).format(logging.makeLogRecord(facts))
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def tell_crash(error: BaseException) -> None:
    """Write on stderr the traceback of an error that ends this process."""
    if logs_json():
        _log.critical(END_EVENT, exc_info=error, extra={"reason": f"{type(error).__name__}: {error}"})
    else:
        traceback.print_exception(error)


def _tell_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = None if args.thread is None else args.thread.name
        _log.error("a thread has ended", exc_info=args.exc_value, extra={"of_thread": name})


def inherited_log_variables() -> dict[str, str]:
    """Return the environment in which a process that this one starts logs as this one does.

    In a program that has not called `configure_logging`, such a process logs warnings alone.
    """
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    formats = {ConsoleFormatter: "console", JsonFormatter: "json"}
    found = [name for kind, name in formats.items() if any(isinstance(one, kind) for one in formatters)]
    if not found:
        return {"PENSTOCK_LOG_LEVEL": "warning"}
    level = logging.getLevelName(logging.getLogger("penstock").level).lower()
    return {"PENSTOCK_LOG_LEVEL": level, "PENSTOCK_LOG_FORMAT": found[0]}


def log_formatter(
    settings: LogSettings, stream: TextIO, *, prefix: str = "", fields: Mapping[str, Any] | None = None
) -> logging.Formatter:
    """Return the formatter for a log that is written to `stream`. The rest is as for `configure_logging`."""
    if settings.format_for(stream) == "console":
        return ConsoleFormatter(has_color=has_color(stream), prefix=prefix)
    return _json_formatter(fields or {})


class _JsonFormatter(JsonFormatter):
    """Formats records as JSON. Times have the offset of the time zone, so logs of several machines can be compared."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - of the base
        """Return a time such as 2026-11-26T22:50:13.820+00:00."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _json_formatter(fields: Mapping[str, Any]) -> logging.Formatter:
    return _JsonFormatter(
        "{asctime}{levelname}{name}{message}",
        style="{",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        reserved_attrs=[*RESERVED_ATTRS, *_NOT_FIELDS],
        static_fields=dict(fields),
    )


def has_color(stream: TextIO) -> bool:
    """Return whether text on `stream` is colored: on a terminal, unless NO_COLOR is set; elsewhere if FORCE_COLOR is.

    See https://no-color.org and https://force-color.org.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


class ConsoleFormatter(logging.Formatter):
    """Formats records as lines for people. A traceback follows its event on lines of its own."""

    def __init__(self, *, has_color: bool, prefix: str = "") -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._has_color = has_color
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        level = self._colored(f"{record.levelname:7}", _COLORS.get(record.levelname, ""))
        parts = [self._colored(self.formatTime(record, self.datefmt), _DIM), level, self._event(record)]
        fields = {name: value for name, value in vars(record).items() if name not in _RESERVED}
        parts += [f"{self._colored(f'{name}=', _DIM)}{_shown(value)}" for name, value in fields.items()]
        lines = [self._prefix + " ".join(parts)]
        if record.exc_info:
            lines.append(without_controls(self.formatException(record.exc_info)))
        if record.stack_info:
            lines.append(self.formatStack(record.stack_info))
        return "\n".join(lines)

    def _event(self, record: logging.LogRecord) -> str:
        """Return the message on one line, with the logger's name if the record comes from another library."""
        message = record.getMessage()
        if not message.isprintable():
            message = json.dumps(message)
        return message if record.name.partition(".")[0] == "penstock" else f"{record.name}: {message}"

    def _colored(self, text: str, color: str) -> str:
        return f"{color}{text}{_RESET}" if self._has_color and color else text


def _shown(value: object) -> str:
    """Return a field's value as one word: quoted and escaped if it contains spaces or control characters."""
    if isinstance(value, str):
        text = value
    elif value is None or isinstance(value, bool | dict | list | tuple):
        return json.dumps(value, default=str)
    else:
        text = str(value)
    is_plain = text.isprintable() and _PLAIN.fullmatch(text)
    return text if is_plain else json.dumps(text, ensure_ascii=not text.isprintable())


LOADING_STAGES = {
    "start": "starting",
    "download": "downloading the model from the hub",
    "convert": "reading the GGUF file",
    "compile": "compiling the kernels, once per machine (45 s on two idle cores)",
    "load": "loading and packing weights",
    "capture": "compiling GPU kernels and capturing graphs (a minute on a new machine)",
}
"""Stage of a progress event → what the loading process is doing."""
FIRST_PROGRESS_S = 1.5
PROGRESS_INTERVAL_S = 5.0
_LONG_STAGES = ("download", "compile", "capture")
"""Stages that are logged as soon as they begin: on a first start they are nearly all of the time."""


class ProgressLog:
    """Logs what a loading model is doing, soon after the start and then every few seconds."""

    def __init__(self, log: logging.Logger, model: str) -> None:
        self._log = log
        self._model = model
        self._stage = "start"
        self._fraction = 0.0
        self._started_s = time.monotonic()

    def update(self, stage: str, fraction: float) -> None:
        """Note the current stage and the fraction of it that is done (0 to 1). Any thread may call this."""
        begins = stage != self._stage
        self._stage, self._fraction = stage, fraction
        if begins and stage in _LONG_STAGES:
            self._say()

    async def run(self) -> NoReturn:
        """Log until canceled."""
        await asyncio.sleep(FIRST_PROGRESS_S)
        while True:
            self._say()
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    def _say(self) -> None:
        facts = {"model": self._model, "stage": self._stage, "percent": round(100 * self._fraction)}
        elapsed_s = round(time.monotonic() - self._started_s, 1)
        self._log.info(LOADING_STAGES.get(self._stage, "loading"), extra=facts | {"elapsed_s": elapsed_s})
