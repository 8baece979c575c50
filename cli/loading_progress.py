"""The progress of a model that is loaded: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from penstock.cli.processes import Event
from penstock.runtime.event_loop import cancel_until_done
from penstock.runtime.logging import LOADING_STAGES, ProgressLog

if TYPE_CHECKING:
    from rich.progress import Progress

_ALMOST = 0.999
"""Shown instead of 1. After 1, rich counts the bar as finished and stops its clock, but another stage may follow."""


class _Shown(Protocol):
    def update(self, stage: str, fraction: float) -> None: ...


class LoadingProgress:
    """Shows a node's progress events on stderr while the model loads."""

    def __init__(self, log: logging.Logger, model: str) -> None:
        self._log = log
        self._model = model
        self._shown: _Shown | None = None

    def update(self, event: Event) -> None:
        """Show one progress event: the name of its `stage`, and the `fraction` of the stage that is done (0 to 1)."""
        fraction, stage = event.get("fraction"), event.get("stage")
        if self._shown is not None and isinstance(fraction, int | float) and isinstance(stage, str):
            self._shown.update(stage, min(1.0, float(fraction)))

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show the progress until the end of the block."""
        if sys.stderr.isatty():
            with LoadingBar(self._model) as bar:
                self._shown = bar
                yield
            return
        lines = ProgressLog(self._log, self._model)
        self._shown = lines
        task = asyncio.create_task(lines.run())
        try:
            yield
        finally:
            await cancel_until_done([task])


class LoadingBar:
    """A progress bar on stderr."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._progress: Progress | None = None

    def update(self, stage: str, fraction: float) -> None:
        """Show a stage and the fraction of it that is done."""
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0], completed=min(fraction, _ALMOST), stage=LOADING_STAGES.get(stage, stage)
            )

    def __enter__(self) -> Self:
        # Imported late, so that the processes already start while rich is imported.
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        from penstock.cli.console import Console

        self._progress = Progress(
            TextColumn("Loading {task.description}", markup=False),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[stage]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._progress.add_task(self._model, total=1.0, stage="starting")
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
