"""The progress bar of a loading model."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.cli.processes import Event

if TYPE_CHECKING:
    from rich.progress import Progress


class LoadingBar:
    """A progress bar on stderr that follows a node's progress events."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._progress: Progress | None = None

    def update(self, event: Event) -> None:
        """Show one progress event: the name of its `stage`, and the `fraction` of the whole (0 to 1)."""
        fraction, stage = event.get("fraction"), event.get("stage")
        if self._progress is not None and isinstance(fraction, int | float) and isinstance(stage, str):
            self._progress.update(self._progress.task_ids[0], completed=min(1.0, float(fraction)), stage=stage)

    def __enter__(self) -> Self:
        # Imported late, so that the processes already start while rich is imported.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # Otherwise rich prints an empty line to a log.
            disable=not console.is_terminal,
        )
        self._progress.add_task(f"Loading {Path(self._model).name}", total=1.0, stage="starting")
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
