"""Logging on stderr: an event's name with its ids and numbers, never prompts or completions.

On a terminal each event is a line for people, elsewhere one JSON object in one line.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from penstock.runtime.console_format import NOT_FIELDS, ConsoleFormatter
from penstock.runtime.settings import Settings

_HTTP_CLIENTS = ("httpx", "httpx2")
"""Libraries that log each request as an event of level info."""

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


def configure_logging(settings: LogSettings, *, prefix: str = "") -> None:
    """Set up this process's logging. Its entry point calls this once. `prefix` begins each line for people."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_formatter(settings, sys.stderr, prefix=prefix))
    level: int = getattr(logging, settings.log_level.upper())
    # Other libraries may log contents of messages as debug events.
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler])
    logging.getLogger("penstock").setLevel(level)
    for client in _HTTP_CLIENTS:
        logging.getLogger(client).setLevel(max(level, logging.WARNING))


def log_formatter(settings: LogSettings, stream: TextIO, *, prefix: str = "") -> logging.Formatter:
    """Return the formatter for a log that is written to `stream`. `prefix` begins each line for people."""
    if settings.format_for(stream) == "console":
        return ConsoleFormatter(has_color=has_color(stream), prefix=prefix)
    return JsonFormatter(
        "{asctime}{levelname}{name}{message}",
        style="{",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        reserved_attrs=[*RESERVED_ATTRS, *NOT_FIELDS],
    )


def has_color(stream: TextIO) -> bool:
    """Return whether text on `stream` is colored: on a terminal, unless NO_COLOR is set; elsewhere if FORCE_COLOR is.

    See https://no-color.org and https://force-color.org.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")
