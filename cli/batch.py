"""`penstock batch run` and `retry`: answer a file of requests, in this process or in a Celery worker."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self, TextIO

import typer

from penstock.cli.command_line import App
from penstock.cli.options import DURABILITY_HELP, RedisUrl
from penstock.cli.output import write_text
from penstock.contract.errors import ConfigError
from penstock.contract.job import Durability
from penstock.producer.batch.records import DEFAULT_IN_FLIGHT, MAX_IN_FLIGHT, Batch, BatchProgress
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from rich.progress import TaskID


EXIT_ROWS_FAILED = 1
FIRST_LINES_S, FIRST_LINES_FOR_S, LINES_S = 5.0, 60.0, 30.0
"""Seconds between two lines of progress at first, how long that is, and the seconds between two lines afterwards."""
_STDIN = "/dev/stdin"

app = App()
Input = Annotated[str, typer.Argument(help="JSONL file of requests in OpenAI's batch format; -: stdin.")]
Model = Annotated[str | None, typer.Option(help="Model for rows that name no model.")]
InFlight = Annotated[int, typer.Option(min=1, max=MAX_IN_FLIGHT, help="Most requests in the queue at the same time.")]
Errors = Annotated[
    str | None, typer.Option(help="File that lists the failed rows. Default: OUTPUT with .errors.jsonl at its end.")
]
BatchDurability = Annotated[Durability | None, typer.Option(help=DURABILITY_HELP)]


@app.callback()
def batch() -> None:
    """Answer files of requests (OpenAI's batch format)."""


@app.command()
def run(
    input: Input,  # noqa: A002
    output: Annotated[str, typer.Argument(help="JSONL file to which the results are written.")],
    model: Model = None,
    in_flight: InFlight = DEFAULT_IN_FLIGHT,
    batch_id: Annotated[
        str | None,
        typer.Option(help="Identity of the batch. A new id answers every row again. Default: from input and output."),
    ] = None,
    not_before: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait before the rows may run. Default: no wait.")
    ] = None,
    errors: Errors = None,
    durability: BatchDurability = None,
    in_feed: Annotated[
        bool, typer.Option("--in-feed", help="List the rows' jobs among the completions (`jobs watch`).")
    ] = False,
    via_celery: Annotated[
        bool, typer.Option("--via-celery", help="Run the batch in a Celery worker. The paths are the worker's.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Answer every row of INPUT. After an interruption, the same command continues where it stopped.

    The rows of OUTPUT are in the order in which they ended. Rows that failed are also listed in a file of their own.

    Examples:
        penstock batch run requests.jsonl results.jsonl --model MODEL
        penstock batch run - results.jsonl < requests.jsonl.zst
    """
    not_before_s = time.time() + not_before if not_before else None
    if output == "-":
        raise ConfigError("OUTPUT must be a file: an interrupted batch continues with it")
    if input == "-" and via_celery:
        raise ConfigError("INPUT must be a file: with --via-celery, the worker reads it")
    source = _STDIN if input == "-" else input
    batch = Batch(source, output, model, in_flight, batch_id, not_before_s, durability, in_feed, errors)
    url = redis_url_of(redis_url)
    _conclude(batch, lambda shown: _run_in_worker(url, batch, shown) if via_celery else _run_here(url, batch, shown))


@app.command()
def retry(
    input: Input,  # noqa: A002
    output: Annotated[str, typer.Argument(help="The results of INPUT, which `batch run` has written.")],
    model: Model = None,
    in_flight: InFlight = DEFAULT_IN_FLIGHT,
    batch_id: Annotated[str | None, typer.Option(help="The identity that `batch run` was given.")] = None,
    errors: Errors = None,
    durability: BatchDurability = None,
    redis_url: RedisUrl = None,
) -> None:
    """Answer the failed rows of a finished batch again, with the options that `batch run` was given.

    New rows replace those that failed. After an interruption, the same command continues where it stopped.

    Examples:
        penstock batch retry requests.jsonl results.jsonl
    """
    if input == "-":
        raise ConfigError("INPUT must be a file: its lines are read again")
    batch = Batch(input, output, model, in_flight, batch_id, durability=durability, errors=errors)
    url = redis_url_of(redis_url)
    _conclude(batch, lambda shown: _retry_here(url, batch, shown))


def _conclude(batch: Batch, work: Callable[[ShownProgress], BatchProgress]) -> None:
    """Do the work while its progress is shown, say how it ended, and exit with 1 if rows failed."""
    started_s = time.monotonic()
    with BatchBar() if sys.stderr.isatty() else BatchLines(sys.stderr) as shown:
        done = work(shown)
    summary = f"{done.num_answered} answered, {done.num_failed} failed, {done.completion_tokens} tokens"
    print(f"{summary} in {time.monotonic() - started_s:.1f} s: {batch.output}", file=sys.stderr)
    if done.num_failed:
        write_text(f"first failure: {done.first_failure}\n", sys.stderr)
        print(f"failed rows: {batch.errors_name} (`penstock batch retry` runs them again)", file=sys.stderr)
        raise typer.Exit(EXIT_ROWS_FAILED)


def _run_here(redis_url: str, batch: Batch, shown: ShownProgress) -> BatchProgress:
    from penstock.producer.batch.runner import answer_batch, opened

    with opened(batch, shown.wait) as open_batch:
        return asyncio.run(answer_batch(redis_url, open_batch, shown.update))


def _retry_here(redis_url: str, batch: Batch, shown: ShownProgress) -> BatchProgress:
    from penstock.producer.batch.retry import opened_retry
    from penstock.producer.batch.runner import answer_batch

    with opened_retry(batch, shown.wait) as open_batch:
        if open_batch is None:
            return BatchProgress(0)
        return asyncio.run(answer_batch(redis_url, open_batch, shown.update))


def _run_in_worker(redis_url: str, batch: Batch, shown: ShownProgress) -> BatchProgress:
    try:
        from penstock.producer.batch.remote import run_in_worker
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[batch]'") from error
    return run_in_worker(redis_url, batch, shown.update)


class BatchBar:
    """A progress bar on stderr: rows done, rows failed, and why rows wait."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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

    def update(self, progress: BatchProgress) -> None:
        """Show the progress. While the number of rows is unknown, only the reason for waiting changes."""
        failed = f"{progress.num_failed} failed" if progress.num_failed else ""
        if not progress.num_rows:
            self._progress.update(self._task, waiting=progress.waiting)
            return
        self._progress.update(
            self._task, total=progress.num_rows, completed=progress.num_done, failed=failed, waiting=progress.waiting
        )

    def wait(self, reason: str) -> None:
        """Show why nothing goes on."""
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
        self._progress = BatchProgress(0)
        self._said = ""
        self._first: tuple[float, int] | None = None
        """When the first progress of this run came, and how many rows earlier runs had done."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="penstock-progress", daemon=True)

    def update(self, progress: BatchProgress) -> None:
        """Note the progress for the next line."""
        if self._first is None and progress.num_rows:
            self._first = time.monotonic(), progress.num_done
        self._progress = progress

    def wait(self, reason: str) -> None:
        """Note why nothing goes on."""
        self._progress = replace(self._progress, waiting=reason)

    def line(self, now_s: float, clock_s: float) -> str:
        """Return the line for this moment. `clock_s`: the time since 1970, for the expected end."""
        progress = self._progress
        parts = [f"{progress.num_done:,} of {progress.num_rows:,} rows done", f"{progress.num_failed:,} failed"]
        if self._first is not None:
            since_s, num_before = self._first
            rate = (progress.num_done - num_before) / max(now_s - since_s, 1e-3)
            parts.append(f"{rate:,.1f} rows/s")
            if rate:
                end_s = clock_s + (progress.num_rows - progress.num_done) / rate
                parts.append(f"expected end {datetime.fromtimestamp(end_s):%Y-%m-%d %H:%M:%S}")
        counted = ", ".join(parts) if progress.num_rows else ""
        return ": ".join(filter(None, ("batch", counted))) + (
            f"; waits: {progress.waiting}" if progress.waiting else ""
        )

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
