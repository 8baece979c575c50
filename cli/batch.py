"""`penstock batch run`: answer a file of requests, in this process or in a Celery worker."""

from __future__ import annotations

import asyncio
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

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
_STDIN = "/dev/stdin"

app = App()


@app.callback()
def batch() -> None:
    """Answer files of requests (OpenAI's batch format)."""


@app.command()
def run(
    input: Annotated[str, typer.Argument(help="JSONL file of requests in OpenAI's batch format; -: stdin.")],  # noqa: A002
    output: Annotated[str, typer.Argument(help="JSONL file to which the results are written.")],
    model: Annotated[str | None, typer.Option(help="Model for rows that name no model.")] = None,
    in_flight: Annotated[
        int, typer.Option(min=1, max=MAX_IN_FLIGHT, help="Most requests in the queue at the same time.")
    ] = DEFAULT_IN_FLIGHT,
    batch_id: Annotated[
        str | None,
        typer.Option(help="Identity of the batch. A new id answers every row again. Default: from input and output."),
    ] = None,
    not_before: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait before the rows may run. Default: no wait.")
    ] = None,
    durability: Annotated[Durability | None, typer.Option(help=DURABILITY_HELP)] = None,
    in_feed: Annotated[
        bool, typer.Option("--in-feed", help="List the rows' jobs among the completions (`jobs watch`).")
    ] = False,
    via_celery: Annotated[
        bool, typer.Option("--via-celery", help="Run the batch in a Celery worker. The paths are the worker's.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Answer every row of INPUT. After an interruption, the same command continues where it stopped.

    Examples:
        penstock batch run requests.jsonl results.jsonl --model MODEL
    """
    not_before_s = time.time() + not_before if not_before else None
    if output == "-":
        raise ConfigError("OUTPUT must be a file: an interrupted batch continues with it")
    if input == "-" and via_celery:
        raise ConfigError("INPUT must be a file: with --via-celery, the worker reads it")
    batch = Batch(
        _STDIN if input == "-" else input, output, model, in_flight, batch_id, not_before_s, durability, in_feed
    )
    url = redis_url_of(redis_url)
    started_s = time.monotonic()
    with BatchBar() as bar:
        done = _run_in_worker(url, batch, bar) if via_celery else _run_here(url, batch, bar)
    summary = f"{done.num_answered} answered, {done.num_failed} failed, {done.completion_tokens} tokens"
    print(f"{summary} in {time.monotonic() - started_s:.1f} s: {output}", file=sys.stderr)
    if done.num_failed:
        write_text(f"first failure: {done.first_failure}\n", sys.stderr)
        raise typer.Exit(EXIT_ROWS_FAILED)


def _run_here(redis_url: str, batch: Batch, bar: BatchBar) -> BatchProgress:
    from penstock.producer.batch.runner import answer_batch, opened

    with opened(batch) as open_batch:
        return asyncio.run(answer_batch(redis_url, open_batch, bar.update))


def _run_in_worker(redis_url: str, batch: Batch, bar: BatchBar) -> BatchProgress:
    try:
        from penstock.producer.batch.remote import run_in_worker
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[batch]'") from error
    return run_in_worker(redis_url, batch, bar.update)


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

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
