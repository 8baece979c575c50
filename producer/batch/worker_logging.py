"""The log of a Celery worker, in the same format as the logs of penstock's other processes."""

from __future__ import annotations

import logging
import sys
from typing import Any

from celery.app.log import Logging

from penstock.runtime.logging import LogSettings, log_formatter


class WorkerLogging(Logging):  # type: ignore[misc]
    """Celery's setup of a worker's loggers, with penstock's formats. The level is Celery's own `--loglevel`."""

    def setup_handlers(self, logger: logging.Logger, *args: Any, **kwargs: Any) -> logging.Logger:
        """Add a handler to `logger` as Celery does, and give it penstock's format."""
        super().setup_handlers(logger, *args, **kwargs)
        formatter = log_formatter(LogSettings.load(), sys.stderr)
        for handler in logger.handlers:
            handler.setFormatter(formatter)
            handler.addFilter(_without_contents)
        return logger


def _without_contents(record: logging.LogRecord) -> bool:
    """Remove what Celery adds to a task's events: its arguments and its result, which are prompts and completions."""
    vars(record).pop("data", None)
    return True
