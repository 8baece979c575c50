"""The format of a log for people: time, level, event and its fields as `name=value`, one line per event."""

from __future__ import annotations

import json
import logging
import re

from pythonjsonlogger.core import RESERVED_ATTRS

NOT_FIELDS = frozenset({"color_message"})
"""Attributes of records that are no fields: uvicorn adds each message a second time, with terminal colors."""
_RESERVED = frozenset(RESERVED_ATTRS) | NOT_FIELDS | {"taskName"}
_PLAIN = re.compile(r"[^\s\"'=]+")
_RESET, _DIM = "\x1b[0m", "\x1b[2m"
_COLORS = {"DEBUG": "\x1b[36m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}


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
            lines.append(self.formatException(record.exc_info))
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
