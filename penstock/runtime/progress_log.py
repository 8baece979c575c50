"""Log lines about the loading of a model, at a slow pace, for logs that no progress bar can be shown in."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

STAGES = {
    "start": "starting",
    "download": "downloading the model from the hub",
    "convert": "reading the GGUF file",
    "compile": "compiling the kernels, once per machine (45 s on two idle cores)",
    "load": "loading and packing weights",
    "capture": "compiling GPU kernels and capturing graphs (a minute on a new machine)",
}
"""Stage of a progress event → what the loading process is doing."""
FIRST_S = 1.5
INTERVAL_S = 5.0
_LONG = ("download", "compile", "capture")
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
        if begins and stage in _LONG:
            self._say()

    async def run(self) -> NoReturn:
        """Log until canceled."""
        await asyncio.sleep(FIRST_S)
        while True:
            self._say()
            await asyncio.sleep(INTERVAL_S)

    def _say(self) -> None:
        facts = {"model": self._model, "stage": self._stage, "percent": round(100 * self._fraction)}
        elapsed_s = round(time.monotonic() - self._started_s, 1)
        self._log.info(STAGES.get(self._stage, "loading"), extra=facts | {"elapsed_s": elapsed_s})
