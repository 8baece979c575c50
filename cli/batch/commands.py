"""`penstock batch`: `run` and `retry` answer a file here or in a Celery worker; the other commands ask a server."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.batch.progress import ShownProgress, shown_progress
from penstock.cli.batch.server import ENDED, STDOUT, Server, patiently, progress_of, wait
from penstock.cli.command_line import App
from penstock.cli.options import DURABILITY_HELP, RedisUrl
from penstock.cli.output import (
    EXIT_TRY_AGAIN,
    AsJson,
    JsonArray,
    duration_in_words,
    print_object,
    say_empty,
    write_text,
)
from penstock.contract.errors import ConfigError, RequestError
from penstock.contract.job import Durability
from penstock.producer.batch import storage
from penstock.producer.batch.records import DEFAULT_IN_FLIGHT, MAX_IN_FLIGHT, Batch, BatchProgress
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.producer.batch.request import InputLine

EXIT_ROWS_FAILED = 1
_STDIN = "/dev/stdin"
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
    with shown_progress() as shown:
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


# Batches of a server. They go on without this process.


@app.command()
def submit(
    input: Input,  # noqa: A002
    completion_window: Annotated[
        str, typer.Option(help="Hours or days after which unanswered rows expire, such as 24h or 7d.")
    ] = "24h",
    metadata: Annotated[list[str] | None, typer.Option(help="NAME=VALUE to keep with the batch; repeatable.")] = None,
    model: Model = None,
    retry_of: Annotated[
        str | None, typer.Option(help="Error file of an earlier batch: submit only the rows that it lists.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A repeated command with this key, within a day, makes no second batch.")
    ] = None,
    base_url: BaseUrl = None,
    api_key: Key = None,
) -> None:
    """Store INPUT on a server, let the server answer its rows, and print the id of the batch.

    All rows have the same url. The server goes on without this command.

    Examples:
        penstock batch submit requests.jsonl
        penstock batch submit - --completion-window 7d < requests.jsonl.zst
    """
    key = idempotency_key or uuid.uuid4().hex
    given = dict(_pair(one) for one in metadata or ())
    name = "stdin.jsonl" if input == "-" else Path(input).name
    with Server(base_url, api_key) as server, _prepared(input, model, retry_of) as (path, endpoint):
        body: dict[str, Any] = {"endpoint": endpoint, "completion_window": completion_window}
        body["input_file_id"] = server.upload(path, name, key=key)
        print(server.create(body | ({"metadata": given} if given else {}), key=key)["id"])


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
                    array.add(one)
            return
        row, is_empty = "{:<38} {:<12} {:>9} {:>9} {:>8} {:>5}", True
        for one in server.batches(limit):
            if is_empty:
                print(row.format("ID", "STATUS", "ROWS", "DONE", "FAILED", "AGE"))
            is_empty, counts = False, one["request_counts"]
            num_done = counts["completed"] + counts["failed"]
            age = duration_in_words(max(0, int(1000 * (time.time() - one["created_at"]))))
            status = "paused" if one["paused"] and one["status"] not in ENDED else one["status"]
            print(row.format(one["id"], status, counts["total"], num_done, counts["failed"], age))
        if is_empty:
            say_empty("no batches")


@app.command()
def status(batch_id: BatchId, as_json: AsJson = False, base_url: BaseUrl = None, api_key: Key = None) -> None:
    """Print the state of a server's batch.

    Examples:
        penstock batch status BATCH_ID
    """
    with Server(base_url, api_key) as server:
        found = server.batch(batch_id)
    print_object(found if as_json else dict(_for_people(found)), as_json=as_json)


@app.command("wait")
def wait_for_end(batch_id: BatchId, timeout: Timeout = None, base_url: BaseUrl = None, api_key: Key = None) -> None:
    """Wait for the end of a server's batch, and print its last state. While the server is away, it waits too.

    Exit code 0 if all rows succeeded, 1 if rows failed or the batch did, 75 after --timeout.

    Examples:
        penstock batch wait BATCH_ID && penstock batch results BATCH_ID results.jsonl
    """
    with Server(base_url, api_key) as server, shown_progress() as shown:
        ended = _until_ended(server, batch_id, shown, timeout, lambda: None)
    print(ended["status"])
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
    batch the files get their names. Exit code 0 if all rows succeeded, 1 if rows failed or the batch did, 75 if the
    batch still runs.

    Examples:
        penstock batch results BATCH_ID results.jsonl
        penstock batch results BATCH_ID results.jsonl --wait
    """
    from penstock.cli.batch.results import opened_rows

    if timeout is not None and not follow:
        raise RequestError("timeout: only with --wait", param="timeout")
    if errors is None and output != STDOUT:
        errors = output.removesuffix(".jsonl") + ".errors.jsonl"
    if errors is not None and errors == output:
        raise RequestError("errors must be another file than OUTPUT", param="errors")
    with (
        Server(base_url, api_key) as server,
        opened_rows(output, batch_id, "output") as answered,
        opened_rows(errors or STDOUT, batch_id, "errors") as failed,
        shown_progress() as shown,
    ):
        files = [answered] if errors is None else [answered, failed]

        def grow() -> None:
            for file in files:
                file.grow(server)

        if follow:
            found = _until_ended(server, batch_id, shown, timeout, grow)
        else:
            found = server.batch(batch_id)
            grow()
        if found["status"] in ENDED:
            for file in files:
                file.publish()
    _conclude_stored(found, output, errors)


def _until_ended(
    server: Server, batch_id: str, shown: ShownProgress, timeout_s: float | None, look: Callable[[], None]
) -> Mapping[str, Any]:
    """Return a batch that has ended. `look` is called after each look at it, also after the last one."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    num_looks = 0
    while True:
        found = patiently(partial(server.batch, batch_id), shown.wait, until_s)
        shown.update(progress_of(found))
        patiently(look, shown.wait, until_s)
        if found["status"] in ENDED:
            return found
        num_looks += 1
        wait(POLL_S if num_looks < POLLS_AT_FIRST else LATER_POLL_S, until_s)


def _conclude_stored(found: Mapping[str, Any], output: str = STDOUT, errors: str | None = None) -> None:
    """Say how a batch ended, or how far it is, and exit with the code that tells it."""
    counts, state = found["request_counts"], found["status"]
    num_tokens = found["usage"]["output_tokens"]
    summary = f"{state}: {counts['completed']} answered, {counts['failed']} failed, {num_tokens} tokens"
    name = output if state in ENDED else f"{output}.partial"
    print(summary + ("" if output == STDOUT else f": {name}"), file=sys.stderr)
    for problem in (found["errors"] or {}).get("data", ()):
        line = "" if problem["line"] is None else f"line {problem['line']}: "
        write_text(f"{line}{problem['message']}\n", sys.stderr)
    if state not in ENDED:
        print(f"of {counts['total']} rows; the batch still runs", file=sys.stderr)
        raise typer.Exit(EXIT_TRY_AGAIN)
    if counts["failed"] and errors is not None:
        print(f"failed rows: {errors} (`penstock batch submit INPUT --retry-of {errors}`)", file=sys.stderr)
    if state != "completed" or counts["failed"]:
        raise typer.Exit(EXIT_ROWS_FAILED)


def _change(batch_id: str, action: str, base_url: str | None, api_key: str | None) -> None:
    with Server(base_url, api_key) as server:
        found = server.change(batch_id, action)
    print(batch_id, "paused" if found["paused"] and found["status"] not in ENDED else found["status"])


def _for_people(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the members of a batch that tell something, with times that `print_object` shows as such."""
    for name, value in found.items():
        if name.endswith("_at") and isinstance(value, int):
            yield f"{name}_ms", 1000 * value
        elif name == "errors" and value:
            yield name, value["data"]
        elif name != "object" and value is not False:
            yield name, value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise RequestError(f"metadata must be NAME=VALUE, not {text[:64]!r}", param="metadata")
    return name, value


@contextmanager
def _prepared(source: str, model: str | None, retry_of: str | None) -> Iterator[tuple[Path, str]]:
    """Yield a plain file with the checked lines of an input, and the url of its rows."""
    from penstock.producer.batch.request import lines_of, plain_copy, survey_of

    name = _STDIN if source == "-" else source
    with (
        storage.local_copy(name, param="input") as packed,
        tempfile.TemporaryDirectory(prefix="penstock-batch-") as folder,
    ):
        with storage.readable("input"):
            path = plain_copy(packed, Path(folder) / "plain")
            survey_of(path)
            if model is not None or retry_of is not None:
                path = _changed(path, Path(folder) / "rows", model, retry_of)
            first = next(lines_of(path))
        url = first.fields.get("url")
        if not isinstance(url, str):
            raise RequestError(f"line {first.number}: url must be a text", param="input")
        yield path, url


def _changed(path: Path, target: Path, model: str | None, retry_of: str | None) -> Path:
    """Write the rows that an error file lists (None: all), with `model` in those that name none."""
    from penstock.producer.batch.request import lines_of

    wanted = None if retry_of is None else _failed_in(retry_of)
    num_rows = 0
    with target.open("w", encoding="utf-8") as file:
        for line in lines_of(path):
            if wanted is None or line.custom_id in wanted:
                file.write(json.dumps(_with_model(line, model), ensure_ascii=False) + "\n")
                num_rows += 1
    if not num_rows:
        raise RequestError(f"retry_of: no row of the input is in {retry_of}", param="retry_of")
    return target


def _failed_in(name: str) -> set[str]:
    try:
        with storage.readable("retry_of"):
            return {str(json.loads(line)["custom_id"]) for line in Path(name).read_text("utf-8").splitlines()}
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"retry_of: {name} is no error file of a batch", param="retry_of") from None


def _with_model(line: InputLine, model: str | None) -> dict[str, Any]:
    body = line.fields.get("body")
    if model is None or not isinstance(body, dict) or body.get("model") is not None:
        return line.fields
    return {**line.fields, "body": {**body, "model": model}}
