"""Logs: one JSON object a line on stderr, with the ids and numbers of the event; never prompts or completions."""

from __future__ import annotations

import logging

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter


def configure_logging() -> None:
    """Sets up this process's logs; called once, by its entry point."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
            # uvicorn says its messages twice, the second time with a terminal's colours.
            reserved_attrs=[*RESERVED_ATTRS, "color_message"],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
