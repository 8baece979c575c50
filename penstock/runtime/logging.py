"""Logging: one JSON object per line on stderr, with the event's ids and numbers, never prompts or completions."""

from __future__ import annotations

import logging

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter


def configure_logging() -> None:
    """Set up this process's logging. Its entry point calls this once."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
            # uvicorn adds each message a second time, with terminal colors.
            reserved_attrs=[*RESERVED_ATTRS, "color_message"],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
