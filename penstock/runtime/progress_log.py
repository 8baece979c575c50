"""Log lines about the loading of a model, at a slow pace, for logs that no progress bar can be shown in."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

FIRST_S = 1.5
INTERVAL_S = 5.0


class ProgressLog:
    """Logs the stage of a loading model, soon after the start and then every few seconds."""

    def __init__(self, log: logging.Logger, model: str) -> None:
        self._log = log
        self._model = model
        self._stage = "start"
        self._fraction = 0.0
        self._started_s = time.monotonic()

    def update(self, stage: str, fraction: float) -> None:
        """Note the current stage and the fraction of it that is done (0 to 1). Any thread may call this."""
        self._stage, self._fraction = stage, fraction

    async def run(self) -> NoReturn:
        """Log until canceled."""
        await asyncio.sleep(FIRST_S)
        while True:
            facts = {"model": self._model, "stage": self._stage, "percent": round(100 * self._fraction)}
            self._log.info("loading", extra=facts | {"elapsed_s": round(time.monotonic() - self._started_s, 1)})
            await asyncio.sleep(INTERVAL_S)
