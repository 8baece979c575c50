"""`penstock batch run`: a file of requests becomes a file of results, in this process or in a Celery worker."""

from __future__ import annotations

import asyncio
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from penstock.contract.errors import ConfigError
from penstock.producer.batch.records import DEFAULT_IN_FLIGHT, MAX_IN_FLIGHT, Batch, BatchProgress
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from rich.progress import TaskID

EXIT_ROWS_FAILED = 1

app = typer.Typer(no_args_is_help=True)


@app.callback()
def batch() -> None:
    """Files of requests in, files of results out."""


@app.command()
def run(
    input: Annotated[str, typer.Argument(help="JSONL of requests, in OpenAI's batch form.")],  # noqa: A002
    output: Annotated[str, typer.Argument(help="JSONL of results to write.")],
    model: Annotated[str | None, typer.Option(help="For rows that name none.")] = None,
    in_flight: Annotated[
        int, typer.Option(min=1, max=MAX_IN_FLIGHT, help="Most requests in the queue at once.")
    ] = DEFAULT_IN_FLIGHT,
    batch_id: Annotated[
        str | None, typer.Option(help="A new one asks every row anew; default: made of input and output.")
    ] = None,
    not_before: Annotated[
        float | None, typer.Option(min=0, help="Seconds before the rows stand in line, such as until the night.")
    ] = None,
    via_celery: Annotated[
        bool, typer.Option("--via-celery", help="Let a worker do it; the paths are the worker's.")
    ] = False,
    redis_url: Annotated[str | None, typer.Option(help="Redis of the pools; default: $PENSTOCK_REDIS_URL.")] = None,
) -> None:
    """Answer every row of INPUT. Run the same command again after an interruption: it goes on where it stopped."""
    not_before_s = time.time() + not_before if not_before else None
    wanted = Batch(input, output, model, in_flight, batch_id, not_before_s)
    url = redis_url_of(redis_url)
    started_s = time.monotonic()
    with BatchBar() as bar:
        done = _run_in_worker(url, wanted, bar) if via_celery else _run_here(url, wanted, bar)
    said = f"{done.num_answered} answered, {done.num_failed} failed, {done.completion_tokens} tokens"
    print(f"{said} in {time.monotonic() - started_s:.1f} s: {output}", file=sys.stderr)
    if done.num_failed:
        raise typer.Exit(EXIT_ROWS_FAILED)


def _run_here(redis_url: str, wanted: Batch, bar: BatchBar) -> BatchProgress:
    from penstock.producer.batch.runner import answer_batch, opened

    with opened(wanted) as one:
        return asyncio.run(answer_batch(redis_url, one, bar.update))


def _run_in_worker(redis_url: str, wanted: Batch, bar: BatchBar) -> BatchProgress:
    try:
        from penstock.producer.batch.remote import run_in_worker
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[batch]'") from error
    return run_in_worker(redis_url, wanted, bar.update)


class BatchBar:
    """One bar on stderr: rows done and failed, and why rows wait."""

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
            # Or a log would get an empty line.
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("batch", total=None, failed="", waiting="")

    def update(self, progress: BatchProgress) -> None:
        """Shows how far the batch is; what is not known yet stays as it was."""
        failed = f"{progress.num_failed} failed" if progress.num_failed else ""
        if not progress.num_rows:
            self._progress.update(self._task, waiting=progress.waiting)
            return
        self._progress.update(
            self._task, total=progress.num_rows, completed=progress.num_done, failed=failed, waiting=progress.waiting
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
