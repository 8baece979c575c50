"""`penstock flows`: `run` submits a file of rows that wait for rows and follows it; `show` prints the graph."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.batch.commands import (
    DEFAULT_WINDOW,
    EXIT_ROWS_FAILED,
    BaseUrl,
    Input,
    Key,
    Model,
    Timeout,
    until_ended,
)
from penstock.cli.batch.progress import shown_progress
from penstock.cli.batch.server import STDOUT, Server, patiently, prepared
from penstock.cli.command_line import App
from penstock.cli.output import AsJson, JsonArray, write_line, write_text
from penstock.contract.errors import RequestError
from penstock.queue.files.batch import FLOW_ENDPOINT

FLOW_SHOWN_ROWS = 200
"""Rows that `show` prints unless it is asked for more."""
_SHOWN_PARENTS = 6

app = App()


@app.callback()
def flows() -> None:
    """Run flows: batches of a server whose rows wait for rows and have their texts.

    A flow is a batch, so `penstock batch` lists, pauses, resumes and cancels it.
    """


@app.command()
def run(
    input: Input,  # noqa: A002
    output: Annotated[str, typer.Argument(help="JSONL file for the answered rows; -: stdout.")] = STDOUT,
    errors: Annotated[
        str | None, typer.Option(help="File for the failed rows. Default: OUTPUT with .errors.jsonl at its end.")
    ] = None,
    model: Model = None,
    detach: Annotated[bool, typer.Option("--detach", help="Print the id of the flow, and do not wait.")] = False,
    completion_window: Annotated[
        str, typer.Option(help="Hours or days after which unanswered rows expire, such as 24h or 7d.")
    ] = DEFAULT_WINDOW,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A repeated command with this key, within a day, makes no second flow.")
    ] = None,
    timeout: Timeout = None,
    base_url: BaseUrl = None,
    api_key: Key = None,
) -> None:
    """Submit the rows of INPUT as a flow, follow it to its end, and write its answers.

    The rows are those of a batch, with `after`, `for_each`, `on_failure` and `priority`. The server goes on if this
    command ends. Exit code 0 if all rows succeeded, 1 if rows failed or the flow did, 75 after --timeout.

    Examples:
        penstock flows run flow.jsonl answers.jsonl
        penstock flows run flow.jsonl --detach
    """
    from penstock.cli.batch.results import opened_files

    key, name = idempotency_key or uuid.uuid4().hex, "stdin.jsonl" if input == "-" else Path(input).name
    if errors is None and output != STDOUT:
        errors = output.removesuffix(".jsonl") + ".errors.jsonl"
    if errors is not None and errors == output:
        raise RequestError("errors must be another file than OUTPUT", param="errors")
    with Server(base_url, api_key) as server:
        with prepared(input, model, None, is_flow=True) as (path, _):
            body: dict[str, Any] = {"endpoint": FLOW_ENDPOINT, "completion_window": completion_window}
            body["input_file_id"] = server.upload(path, name, key=key)
        batch_id = str(server.create(body, key=key)["id"])
        if detach:
            write_line(batch_id)
            return
        write_line(f"{batch_id} (`penstock flows show {batch_id}`)", file=sys.stderr)
        with opened_files(output, errors, batch_id) as files, shown_progress() as shown:

            def grow() -> None:
                for file in files:
                    file.grow(server)

            found = until_ended(server, batch_id, shown, timeout, grow)
            for file in files:
                patiently(partial(file.publish, server), shown.wait, None)
    summary = f"{found.status}: {found.num_answered} answered, {found.num_failed} failed or skipped"
    write_line(summary + ("" if output == STDOUT else f": {output}"), file=sys.stderr)
    for problem in found.problems:
        line = "" if problem["line"] is None else f"line {problem['line']}: "
        write_text(f"{line}{problem['message']}\n", sys.stderr)
    if not found.has_succeeded:
        raise typer.Exit(EXIT_ROWS_FAILED)


@app.command()
def show(
    flow_id: Annotated[str, typer.Argument(help="Id of the flow as printed by `run`.")],
    state: Annotated[str | None, typer.Option(help="Only rows in this state, such as waiting or failed.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most rows.")] = FLOW_SHOWN_ROWS,
    as_json: AsJson = False,
    base_url: BaseUrl = None,
    api_key: Key = None,
) -> None:
    """Print the rows of a flow: the state of each, and what it waits for.

    Examples:
        penstock flows show BATCH_ID
        penstock flows show BATCH_ID --state waiting
    """
    with Server(base_url, api_key) as server:
        if as_json:
            with JsonArray() as array:
                for row in server.flow_rows(flow_id, state, limit):
                    array.add(row)
            return
        found, counts = server.batch(flow_id), server.flow_counts(flow_id)
        told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        write_line(f"{flow_id} {found.shown_status}: {told or 'its rows are being checked'}")
        if (waiting := found.fields.get("waiting")) is not None:
            write_line(f"it waits: {waiting}")
        num_shown = 0
        for row in server.flow_rows(flow_id, state, limit):
            num_shown += 1
            write_text("".join(_lines_of(row)))
    total = sum(counts.values()) if state is None else counts.get(state, 0)
    if num_shown == limit < total:
        write_line(f"{total - num_shown} more (--limit {total})")


_MARKS = {"succeeded": "✓", "failed": "✗", "skipped": "–", "running": "▶", "cancelled": "–", "expired": "–"}


def _lines_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a row and what there is to say of it."""
    after = [one if isinstance(one, str) else f"job {one['job']}" for one in row["after"]]
    parents = f" ← {_some(after, row['num_after'])}" if after else ""
    made = f" ({row['num_made']} rows)" if row["num_made"] is not None else ""
    maker = f" for each of {row['for_each']}" if row["for_each"] is not None else ""
    yield f"  {_MARKS.get(row['state'], '·')} {row['custom_id']} {row['state']}{made}{maker}{parents}\n"
    if row["state"] == "waiting" and row["made_by"] is None:
        yield f"      waits for {_some(row['waits_for'], len(row['waits_for']))}\n"
    if row["error"] is not None:
        yield f"      {row['error']['message']}\n"


def _some(names: Sequence[str], total: int) -> str:
    shown = ", ".join(names[:_SHOWN_PARENTS])
    return shown if total <= _SHOWN_PARENTS else f"{shown} and {total - _SHOWN_PARENTS} more"
