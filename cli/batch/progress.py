"""The progress of a batch for people: a bar on a terminal, lines for a log."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from penstock.cli.output import write_text
from penstock.producer.batch.records import BatchProgress

if TYPE_CHECKING:
    from rich.progress import TaskID

FIRST_LINES_S, FIRST_LINES_FOR_S, LINES_S = 5.0, 60.0, 30.0
"""Seconds between two lines of progress at first, how long that is, and the seconds between two lines afterwards."""


class BatchBar:
    """A progress bar on stderr: rows done, rows failed, and why rows wait."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from penstock.cli.console import Console

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("Batch"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[waiting]}"),
            console=console,
            transient=True,
            # Otherwise rich prints an empty line to a log.
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("batch", total=None, failed="", waiting="")
        self.last = BatchProgress(0)

    def update(self, progress: BatchProgress) -> None:
        """Show the progress. While the number of rows is unknown, only the reason for waiting changes."""
        self.last = progress
        failed = f"{progress.num_failed} failed" if progress.num_failed else ""
        if not progress.num_rows:
            self._progress.update(self._task, waiting=progress.waiting)
            return
        self._progress.update(
            self._task, total=progress.num_rows, completed=progress.num_done, failed=failed, waiting=progress.waiting
        )

    def wait(self, reason: str) -> None:
        """Show why the batch waits."""
        self._progress.update(self._task, waiting=reason)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()


class BatchLines:
    """Lines of progress for a log: every few seconds in the first minute, then twice a minute."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.last = BatchProgress(0)
        self._said = ""
        self._first: tuple[float, int] | None = None
        """When the first progress of this run came, and how many rows earlier runs had done."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="penstock-progress", daemon=True)

    def update(self, progress: BatchProgress) -> None:
        """Note the progress for the next line."""
        if self._first is None and progress.num_rows:
            self._first = time.monotonic(), progress.num_done
        self.last = progress

    def wait(self, reason: str) -> None:
        """Note why the batch waits."""
        self.last = replace(self.last, waiting=reason)

    def line(self, now_s: float, clock_s: float) -> str:
        """Return the line for this moment. `clock_s`: the time since 1970, for the expected end."""
        progress = self.last
        parts = [f"{progress.num_done:,} of {progress.num_rows:,} rows done", f"{progress.num_failed:,} failed"]
        if self._first is not None:
            since_s, num_before = self._first
            rate = (progress.num_done - num_before) / max(now_s - since_s, 1e-3)
            parts.append(f"{rate:,.1f} rows/s")
            if rate:
                end_s = clock_s + (progress.num_rows - progress.num_done) / rate
                parts.append(f"expected end {datetime.fromtimestamp(end_s):%Y-%m-%d %H:%M:%S}")
        counted = ", ".join(parts) if progress.num_rows else "the input is read"
        return f"batch: {counted}" + (f"; waits: {progress.waiting}" if progress.waiting else "")

    def _speak(self) -> None:
        begun_s = time.monotonic()
        while not self._ended.wait(FIRST_LINES_S if time.monotonic() - begun_s < FIRST_LINES_FOR_S else LINES_S):
            if (line := self.line(time.monotonic(), time.time())) != self._said:
                self._said = line
                write_text(line + "\n", self._stream)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()


ShownProgress = BatchBar | BatchLines


def shown_progress() -> ShownProgress:
    """Return what shows the progress on stderr."""
    return BatchBar() if sys.stderr.isatty() else BatchLines(sys.stderr)
