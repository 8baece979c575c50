"""`penstock batch`: `run` and `retry` answer a file here or in a Celery worker; the other commands ask a server."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.batch.progress import ShownProgress, shown_progress
from penstock.cli.batch.server import STDIN, STDOUT, Server, StoredBatch, patiently, prepared, wait
from penstock.cli.command_line import App
from penstock.cli.options import DURABILITY_HELP, SPAN, RedisUrl, seconds_of_text
from penstock.cli.output import (
    EXIT_TRY_AGAIN,
    AsJson,
    JsonArray,
    duration_in_words,
    print_object,
    say_empty,
    write_line,
    write_text,
)
from penstock.contract.durability import Durability
from penstock.contract.errors import ConfigError, RequestError
from penstock.producer.batch.records import DEFAULT_IN_FLIGHT, MAX_IN_FLIGHT, Batch, BatchProgress
from penstock.queue.files.batch import FLOW_ENDPOINT, MESSAGES_ENDPOINT, is_of_messages
from penstock.runtime.settings import redis_url_of

EXIT_ROWS_FAILED = 1
DEFAULT_WINDOW = "24h"
POLL_S, POLLS_AT_FIRST, LATER_POLL_S = 1.0, 60, 5.0
"""Seconds between two looks at a batch of a server: for the first looks, and afterwards."""

app = App()
Input = Annotated[str, typer.Argument(help="JSONL file of requests in OpenAI's batch format; -: stdin.")]
Model = Annotated[str | None, typer.Option(help="Model for rows that name no model.")]
InFlight = Annotated[int, typer.Option(min=1, max=MAX_IN_FLIGHT, help="Most requests in the queue at the same time.")]
Errors = Annotated[
    str | None, typer.Option(help="File that lists the failed rows. Default: OUTPUT with .errors.jsonl at its end.")
]
BatchDurability = Annotated[Durability | None, typer.Option(help=DURABILITY_HELP)]
_SERVER = "Server"
BaseUrl = Annotated[
    str | None,
    typer.Option(
        help="URL of the server, with or without /v1. Default: $PENSTOCK_URL, $OPENAI_BASE_URL, or this machine's.",
        rich_help_panel=_SERVER,
    ),
]
Key = Annotated[
    str | None,
    typer.Option("--api-key", help="API key. Default: $PENSTOCK_API_KEY or $OPENAI_API_KEY.", rich_help_panel=_SERVER),
]
BatchId = Annotated[str, typer.Argument(help="Id of the batch as printed by `submit`.")]
Timeout = Annotated[float | None, typer.Option(min=0, help="Most seconds to wait. Default: no limit.")]


@app.callback()
def batch() -> None:
    """Answer files of requests (OpenAI's batch format), here (`run`, `retry`) or by a server (the other commands)."""


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
        float | None,
        typer.Option(
            parser=seconds_of_text, metavar=SPAN, help="When the rows may run, in seconds from now. Default: at once."
        ),
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
    source = STDIN if input == "-" else input
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
    started_s, shown = time.monotonic(), shown_progress()
    try:
        with shown:
            done = work(shown)
    except KeyboardInterrupt:
        counted = f"{shown.last.num_done:,} of {shown.last.num_rows:,} rows" if shown.last.num_rows else "no row"
        write_line(f"interrupted with {counted} done; the same command goes on after these", file=sys.stderr)
        raise
    summary = f"{done.num_answered} answered, {done.num_failed} failed, {done.completion_tokens} tokens"
    write_line(f"{summary} in {time.monotonic() - started_s:.1f} s: {batch.output}", file=sys.stderr)
    if done.num_failed:
        write_text(f"first failure: {done.first_failure}\n", sys.stderr)
        write_line(f"failed rows: {batch.errors_name} (`penstock batch retry` runs them again)", file=sys.stderr)
        raise typer.Exit(EXIT_ROWS_FAILED)


def _run_here(redis_url: str, batch: Batch, shown: ShownProgress) -> BatchProgress:
    from penstock.producer.batch.runner import answer_batch, opened

    with opened(batch, shown.wait) as open_batch:
        return asyncio.run(answer_batch(redis_url, open_batch, shown.update))


def _retry_here(redis_url: str, batch: Batch, shown: ShownProgress) -> BatchProgress:
    from penstock.producer.batch.runner import answer_batch, opened_retry

    with opened_retry(batch, shown.wait) as open_batch:
        if open_batch is None:
            return BatchProgress(0)
        return asyncio.run(answer_batch(redis_url, open_batch, shown.update))


def _run_in_worker(redis_url: str, batch: Batch, shown: ShownProgress) -> BatchProgress:
    try:
        from penstock.producer.batch.celery_app import run_in_worker
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock-llm[batch]'") from error
    return run_in_worker(redis_url, batch, shown.update)


# Batches of a server. They go on without this process.


@app.command()
def submit(
    input: Input,  # noqa: A002
    completion_window: Annotated[
        str, typer.Option(help="Hours or days after which unanswered rows expire, such as 24h or 7d.")
    ] = DEFAULT_WINDOW,
    metadata: Annotated[list[str] | None, typer.Option(help="NAME=VALUE to keep with the batch; repeatable.")] = None,
    model: Model = None,
    retry_of: Annotated[
        str | None, typer.Option(help="Error file of an earlier batch: submit only the rows that it lists.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, max=8, help="How often each row is tried. Default: the pool's setting.")
    ] = None,
    retry_backoff: Annotated[
        float | None, typer.Option(min=0, max=3600, metavar="SECONDS", help="Mean pause before a row's second attempt.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A repeated command with this key, within a day, makes no second batch.")
    ] = None,
    base_url: BaseUrl = None,
    api_key: Key = None,
) -> None:
    """Store INPUT on a server, let the server answer its rows, and print the id of the batch.

    All rows have the same url. Or all are requests of Anthropic's API (`custom_id` and `params`): they become a message
    batch. The server goes on without this command.

    Examples:
        penstock batch submit requests.jsonl
        penstock batch submit - --completion-window 7d < requests.jsonl.zst
        penstock batch submit requests-of-messages.jsonl --model MODEL
    """
    key = idempotency_key or uuid.uuid4().hex
    given = dict(_pair(one) for one in metadata or ())
    asked = {"max_attempts": max_attempts, "retry_backoff_s": retry_backoff}
    retries = {option: value for option, value in asked.items() if value is not None}
    name = "stdin.jsonl" if input == "-" else Path(input).name
    with Server(base_url, api_key) as server, prepared(input, model, retry_of) as (path, endpoint):
        if endpoint == MESSAGES_ENDPOINT:
            wrong = {"metadata": bool(given), "completion_window": completion_window != DEFAULT_WINDOW}
            wrong |= dict.fromkeys(retries, True)
            if param := next((option for option, is_wrong in wrong.items() if is_wrong), None):
                message = f"{param}: a message batch has {DEFAULT_WINDOW} for its requests, no metadata and no retries"
                raise RequestError(message, param=param)
            write_line(server.create_of_messages(path, key=key))
            return
        body: dict[str, Any] = {"endpoint": endpoint, "completion_window": completion_window}
        body["input_file_id"] = server.upload(path, name, key=key)
        write_line(server.create(body | ({"metadata": given} if given else {}) | retries, key=key)["id"])


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most batches.")] = 20,
    as_json: AsJson = False,
    base_url: BaseUrl = None,
    api_key: Key = None,
) -> None:
    """List the batches of a server, newest first.

    Examples:
        penstock batch list
    """
    with Server(base_url, api_key) as server:
        if as_json:
            with JsonArray() as array:
                for one in server.batches(limit):
                    array.add(one.fields)
            return
        row, is_empty = "{:<41} {:<12} {:>9} {:>9} {:>8} {:>5}", True
        for one in server.batches(limit):
            if is_empty:
                write_line(row.format("ID", "STATUS", "ROWS", "DONE", "FAILED", "AGE"))
            is_empty, num_done = False, one.num_answered + one.num_failed
            age = duration_in_words(max(0, int(1000 * (time.time() - one.created_s))))
            write_line(row.format(one.batch_id, one.shown_status, one.num_rows, num_done, one.num_failed, age))
        if is_empty:
            say_empty("no batches")


@app.command()
def status(batch_id: BatchId, as_json: AsJson = False, base_url: BaseUrl = None, api_key: Key = None) -> None:
    """Print the state of a server's batch.

    Examples:
        penstock batch status BATCH_ID
    """
    with Server(base_url, api_key) as server:
        found = server.batch(batch_id).fields
    print_object(found if as_json else dict(_for_people(found)), as_json=as_json)


@app.command("wait")
def wait_for_end(batch_id: BatchId, timeout: Timeout = None, base_url: BaseUrl = None, api_key: Key = None) -> None:
    """Wait for the end of a server's batch, and print its last state. While the server is away, it waits too.

    Exit code 0 if all rows succeeded, 1 if rows failed or the batch did, 75 after --timeout.

    Examples:
        penstock batch wait BATCH_ID && penstock batch results BATCH_ID results.jsonl
    """
    with Server(base_url, api_key) as server, shown_progress() as shown:
        ended = until_ended(server, batch_id, shown, timeout, lambda: None)
    write_line(ended.status)
    _conclude_stored(ended)


@app.command()
def cancel(batch_id: BatchId, base_url: BaseUrl = None, api_key: Key = None) -> None:
    """Cancel a server's batch. Answered rows stay in its output. Prints its state.

    Examples:
        penstock batch cancel BATCH_ID
    """
    _change(batch_id, "cancel", base_url, api_key)


@app.command()
def pause(batch_id: BatchId, base_url: BaseUrl = None, api_key: Key = None) -> None:
    """Let no further rows of a server's batch into the queue, until `resume`. Its completion window goes on.

    Examples:
        penstock batch pause BATCH_ID
    """
    _change(batch_id, "pause", base_url, api_key)


@app.command()
def resume(batch_id: BatchId, base_url: BaseUrl = None, api_key: Key = None) -> None:
    """Let the rows of a paused batch into the queue again.

    Examples:
        penstock batch resume BATCH_ID
    """
    _change(batch_id, "resume", base_url, api_key)


@app.command()
def results(
    batch_id: BatchId,
    output: Annotated[str, typer.Argument(help="JSONL file for the answered rows; -: stdout.")],
    errors: Annotated[
        str | None, typer.Option(help="File for the failed rows. Default: OUTPUT with .errors.jsonl at its end.")
    ] = None,
    follow: Annotated[bool, typer.Option("--wait", help="Write rows as they come, until the batch ends.")] = False,
    timeout: Timeout = None,
    base_url: BaseUrl = None,
    api_key: Key = None,
) -> None:
    """Write the rows of a server's batch: those with an answer to OUTPUT, the others to an error file.

    Rows of a batch that still runs are in OUTPUT.partial; the same command adds what came since. At the end of the
    batch the files get their names. A message batch has no results before its end. Exit code 0 if all rows succeeded,
    1 if rows failed or the batch did, 75 if the batch still runs.

    Examples:
        penstock batch results BATCH_ID results.jsonl
        penstock batch results BATCH_ID results.jsonl --wait
    """
    from penstock.cli.batch.results import opened_files

    if timeout is not None and not follow:
        raise RequestError("timeout: only with --wait", param="timeout")
    if errors is None and output != STDOUT:
        errors = output.removesuffix(".jsonl") + ".errors.jsonl"
    if errors is not None and errors == output:
        raise RequestError("errors must be another file than OUTPUT", param="errors")
    with (
        Server(base_url, api_key) as server,
        opened_files(output, errors, batch_id) as files,
        shown_progress() as shown,
    ):

        def grow() -> None:
            for file in files:
                file.grow(server)

        if follow:
            found = until_ended(server, batch_id, shown, timeout, grow)
        else:
            found = server.batch(batch_id)
            grow()
        if found.is_ended:
            for file in files:
                patiently(partial(file.publish, server), shown.wait, None)
    _conclude_stored(found, output, errors)


def until_ended(
    server: Server, batch_id: str, shown: ShownProgress, timeout_s: float | None, look: Callable[[], None]
) -> StoredBatch:
    """Return a batch that has ended. `look` is called after each look at it, also after the last one."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    num_looks = 0
    while True:
        found = patiently(partial(server.batch, batch_id), shown.wait, until_s)
        shown.update(found.progress)
        patiently(look, shown.wait, until_s)
        if found.is_ended:
            return found
        num_looks += 1
        wait(POLL_S if num_looks < POLLS_AT_FIRST else LATER_POLL_S, until_s)


def _conclude_stored(found: StoredBatch, output: str = STDOUT, errors: str | None = None) -> None:
    """Say how a batch ended, or how far it is, and exit with the code that tells it."""
    summary = f"{found.status}: {found.num_answered} answered, {found.num_failed} failed"
    if found.num_tokens is not None:
        summary += f", {found.num_tokens[1]} tokens"
    name = output if found.is_ended else f"{output}.partial"
    has_rows = found.is_ended or not is_of_messages(found.batch_id)
    write_line(summary + ("" if output == STDOUT or not has_rows else f": {name}"), file=sys.stderr)
    for problem in found.problems:
        line = "" if problem["line"] is None else f"line {problem['line']}: "
        write_text(f"{line}{problem['message']}\n", sys.stderr)
    if not found.is_ended:
        write_line(f"of {found.num_rows} rows; the batch still runs", file=sys.stderr)
        raise typer.Exit(EXIT_TRY_AGAIN)
    if found.num_failed and errors is not None:
        # Rows of a flow would lack those that they wait for.
        is_flow = found.fields.get("endpoint") == FLOW_ENDPOINT
        hint = "" if is_flow else f" (`penstock batch submit INPUT --retry-of {errors}`)"
        write_line(f"failed rows: {errors}{hint}", file=sys.stderr)
    if not found.has_succeeded:
        raise typer.Exit(EXIT_ROWS_FAILED)


def _change(batch_id: str, action: str, base_url: str | None, api_key: str | None) -> None:
    with Server(base_url, api_key) as server:
        found = server.change(batch_id, action)
    write_line(batch_id, found.shown_status)


def _for_people(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the members of a batch that tell something, with times that `print_object` shows as such."""
    for name, value in found.items():
        if name.endswith("_at") and isinstance(value, int):
            yield f"{name}_ms", 1000 * value
        elif name == "errors" and value:
            yield name, value["data"]
        elif name not in ("object", "type") and value is not False:
            yield name, value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise RequestError(f"metadata must be NAME=VALUE, not {text[:64]!r}", param="metadata")
    return name, value
