"""A second run of a batch's failed rows. Their new rows take the places of the old ones in the results file.

The second run is a batch of its own, with a results file beside that of the first. So an interrupted one continues
where it stopped, and the first results stay whole until all new rows are there.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.contract.errors import RequestError
from penstock.producer.batch import storage
from penstock.producer.batch.records import Batch
from penstock.producer.batch.request import lines_of, survey_of
from penstock.producer.batch.results import row_id_of
from penstock.producer.batch.runner import OpenBatch, Row, id_of, opened, publish_errors
from penstock.producer.batch.storage import OnWait, outlast


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
            survey = survey_of(source)
        batch_id = id_of(batch, survey)
        rows = _rows_in(copy_of(batch.output, "output"), batch, batch_id, survey.num_lines)
        failed = {row["custom_id"] for row in rows if row["error"] is not None}
        if not failed:
            yield None
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-batch-")))
        again = folder / "failed.jsonl"
        _write(again, [line.fields for line in lines_of(source) if line.custom_id in failed])
        digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()
        fresh = Path(f"{storage.partial_path(batch.output).with_suffix('')}.retry-{digest}")
        second = replace(batch, input=str(again), output=str(fresh), batch_id=f"{batch_id}:{digest}")
        with opened(replace(second, errors=str(folder / "errors")), on_wait) as one:
            yield one
        new_rows = map(json.loads, fresh.read_text().splitlines())
        merged = [row for row in rows if row["error"] is None]
        merged += [{**row, "id": row_id_of(batch_id, row["custom_id"])} for row in new_rows]
        _publish(batch, source, merged, on_wait)
        fresh.unlink()


def _rows_in(path: Path, batch: Batch, batch_id: str, num_lines: int) -> list[Row]:
    rows: list[Row] = [json.loads(line) for line in path.read_text().splitlines()]
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


def _write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
