"""A batch over a file: its requests are answered as jobs, a bounded number at once, and their results fill a file.

A killed run can be repeated: it skips the rows that the results file has.

Failed rows can have a second run. It is a batch of its own, with a results file beside that of the first. So an
interrupted one continues where it stopped, and the first results stay whole until all new rows are there. Then the new
rows take the places of the old ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.contract.errors import RequestError, UnavailableError
from penstock.producer.batch import storage
from penstock.producer.batch.answer import Submitter
from penstock.producer.batch.finished import FinishedRow, OpenAiRows, row_id_of
from penstock.producer.batch.lines import InputCheck, InputRow, RowReader, check_file, plain_input, rows_in
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.results import ResultsFile, open_results
from penstock.producer.batch.run import RowRun
from penstock.producer.batch.storage import OnWait, outlast
from penstock.producer.client import AsyncClient
from penstock.producer.openai.json_parts import json_line

Row = dict[str, Any]
OnProgress = Callable[[BatchProgress], None]


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch with a checked input and a locked output."""

    batch: Batch
    batch_id: str
    path: Path
    results: ResultsFile


@contextmanager
def opened(batch: Batch, on_wait: OnWait = lambda _: None) -> Iterator[OpenBatch]:
    """Check a batch's input and lock its output. At the end of the block, publish the output if it is complete.

    If rows failed, a list of them is published too. While the store of an fsspec URL is unreachable, the call waits,
    and reports that to `on_wait`. Raises RequestError if input or output cannot be used, and BusyError while another
    run writes the same output. The call blocks on files, pipes and stores; call it outside an event loop to keep Ctrl-C
    responsive.
    """
    with ExitStack() as stack:
        source = batch.input
        path = outlast(source, lambda: stack.enter_context(storage.local_copy(source, param="input")), on_wait)
        with storage.readable("input"):
            found = check_file(path)
        batch_id = id_of(batch, found)
        results = stack.enter_context(open_results(batch.output, batch_id, found.num_rows, on_wait))
        yield OpenBatch(batch, batch_id, path, results)
        if results.is_whole and results.failed:
            publish_errors(batch, path, results.failed, on_wait)


def id_of(batch: Batch, found: InputCheck) -> str:
    """Return the identity of a batch."""
    identity = "\0".join((found.digest.hex(), storage.canonical(batch.output), batch.model or ""))
    return batch.batch_id or hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def publish_errors(batch: Batch, path: Path, failed: Mapping[str, Row], on_wait: OnWait) -> None:
    """Write the list of failed rows: each row of the output, with the number of its line in the input."""
    # A local list is made in its own folder, so that it can take its place in one step.
    folder_of_list = None if storage.is_remote(batch.errors_name) else Path(batch.errors_name).parent
    with tempfile.TemporaryDirectory(prefix="penstock-batch-", dir=folder_of_list) as folder:
        listed = Path(folder) / "errors"
        with listed.open("wb") as file:
            for row in rows_in(path):
                if row.custom_id in failed:
                    file.write(json_line({"line": row.line, **failed[row.custom_id]}))
        outlast(batch.errors_name, lambda: storage.publish(listed, batch.errors_name), on_wait)


async def run_batch(redis_url: str, batch: Batch, on_progress: OnProgress = lambda _: None) -> BatchProgress:
    """Open and answer a batch, and return its final progress. Raises the errors of `opened` and `answer_batch`."""
    with opened(batch) as one:
        return await answer_batch(redis_url, one, on_progress)


async def answer_batch(redis_url: str, one: OpenBatch, on_progress: OnProgress) -> BatchProgress:
    """Run an open batch to its end with a client of its own. A batch that is complete needs no Redis."""
    if one.results.is_whole:
        on_progress(one.results.progress)
        return one.results.progress
    async with AsyncClient(redis_url) as client:
        return await answer_rows(client, one, on_progress)


async def answer_rows(
    client: Submitter, one: OpenBatch, on_progress: OnProgress, *, on_submit: Callable[[], None] = lambda: None
) -> BatchProgress:
    """Run an open batch to its end and return its final progress.

    It waits without limit while the queue is busy or Redis is unreachable. A canceled batch can be run again. Raises
    RequestError if the input changed during the run.
    """
    results = one.results
    on_progress(results.progress)
    if not results.is_whole:
        # An earlier run may have ended between the writing of a row and its acknowledgment.
        with suppress(UnavailableError):
            await client.ack(*results.recent_job_ids)
        with ExitStack() as stack:
            with storage.readable("input"):
                source = stack.enter_context(plain_input(one.path))
            rows = _FileRows(RowReader(source, answered=results.custom_ids), one.batch.max_in_flight)
            sink = _FileSink(results, on_progress)
            form = OpenAiRows(one.batch_id, shows_lines=False)
            run = RowRun(client, rows, sink, form, one.batch.terms, on_submit)
            try:
                await run.answer_all()
            finally:
                await run.close()
        if not results.is_whole:
            raise RequestError("the input changed during the run: some of its lines are gone", param="input")
    return results.progress


class _FileRows:
    """The rows of a file that its results lack."""

    stopped = ""
    has_more = False

    def __init__(self, reader: RowReader, max_in_flight: int) -> None:
        self._reader = reader
        self._max_in_flight = max_in_flight

    async def window(self) -> int:
        """Return how many rows may be in the queue."""
        return self._max_in_flight

    async def next_rows(self, limit: int) -> Sequence[InputRow]:
        """Return the next rows; none at the end."""
        with storage.readable("input"):
            return await asyncio.to_thread(self._reader.window, limit)


class _FileSink:
    """Appends finished rows to the results, with all that there are in one write."""

    is_full = False

    def __init__(self, results: ResultsFile, on_progress: OnProgress) -> None:
        self._results = results
        self._on_progress = on_progress
        self._fresh: list[FinishedRow] = []

    @property
    def due_in_s(self) -> float | None:
        """Return 0 if there are rows to be stored, and None if there are none."""
        return 0 if self._fresh else None

    def add(self, row: FinishedRow) -> None:
        """Add a row to the next write."""
        self._fresh.append(row)

    async def store(self) -> list[str]:
        """Return the jobs whose results are on disk."""
        fresh, self._fresh = self._fresh, []
        await self._results.append(fresh)
        return [row.job_id for row in fresh if row.job_id is not None]

    def report(self, waiting: str) -> None:
        """Show the progress, and why rows wait to be submitted."""
        self._on_progress(replace(self._results.progress, waiting=waiting))


@contextmanager
def opened_retry(batch: Batch, on_wait: OnWait = lambda _: None) -> Iterator[OpenBatch | None]:
    """Open the failed rows of a batch as a batch, or yield None if no row failed. At the end, merge the new rows.

    Raises RequestError if the batch has no complete output.
    """
    with ExitStack() as stack:

        def copy_of(name: str, param: str) -> Path:
            return outlast(name, lambda: stack.enter_context(storage.local_copy(name, param=param)), on_wait)

        source = copy_of(batch.input, "input")
        with storage.readable("input"):
            found = check_file(source)
        batch_id = id_of(batch, found)
        rows = _results_in(copy_of(batch.output, "output"), batch, batch_id, found.num_rows)
        failed = {row["custom_id"] for row in rows if row["error"] is not None}
        if not failed:
            yield None
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-batch-")))
        again = folder / "failed.jsonl"
        _write(again, [row.fields for row in rows_in(source) if row.custom_id in failed])
        digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()
        fresh = Path(f"{storage.partial_path(batch.output).with_suffix('')}.retry-{digest}")
        second = replace(batch, input=str(again), output=str(fresh), batch_id=f"{batch_id}:{digest}")
        with opened(replace(second, errors=str(folder / "errors")), on_wait) as one:
            yield one
        new_rows = map(json.loads, fresh.read_bytes().splitlines())
        merged = [row for row in rows if row["error"] is None]
        merged += [{**row, "id": row_id_of(batch_id, row["custom_id"])} for row in new_rows]
        _publish(batch, source, merged, on_wait)
        fresh.unlink()


def _results_in(path: Path, batch: Batch, batch_id: str, num_lines: int) -> list[Row]:
    rows: list[Row] = [json.loads(line) for line in path.read_bytes().splitlines()]
    if len(rows) != num_lines or any(row["id"] != row_id_of(batch_id, row["custom_id"]) for row in rows):
        message = f"{batch.output} is not the whole output of this batch: first run it to its end with the same options"
        raise RequestError(message, param="output")
    return rows


def _publish(batch: Batch, source: Path, rows: list[Row], on_wait: OnWait) -> None:
    """Replace the output, and then the list of failed rows. Without failed rows, a local list is removed."""
    whole = storage.partial_path(batch.output)
    _write(whole, rows)
    outlast(batch.output, lambda: storage.publish(whole, batch.output), on_wait)
    still_failed = {row["custom_id"]: row for row in rows if row["error"] is not None}
    if still_failed:
        publish_errors(batch, source, still_failed, on_wait)
    elif not storage.is_remote(batch.errors_name):
        Path(batch.errors_name).unlink(missing_ok=True)


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_bytes(b"".join(map(json_line, rows)))
