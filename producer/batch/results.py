"""The results file of a batch: append-only, with one writer, and published when it is complete.

Its rows are those of OpenAI's batch format, around the response bodies of the HTTP API, in the order in which the jobs
ended.
A row counts as written once it is synced to disk. If a crash truncates the last row, the next run writes it again.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path
from typing import Any

from penstock.contract.errors import BusyError, RequestError
from penstock.contract.job import created_at, is_job_id
from penstock.producer.batch import storage
from penstock.producer.batch.finished import ERROR, FinishedRow, row_id_of
from penstock.producer.batch.records import BatchProgress
from penstock.producer.batch.storage import OnWait, outlast

_KEPT = timedelta(days=8)
"""Longer than a job may wait for its deadline, and its result is kept by default."""
LOCKED_RETRY_MS = 10_000
"""Milliseconds after which to retry while another run has the file locked."""


def _is_recent(job_id: str) -> bool:
    return is_job_id(job_id) and datetime.now(UTC) - created_at(job_id) < _KEPT


class ResultsFile:
    """An open results file: the rows written so far, and the end where rows are appended."""

    def __init__(self, file: FileIO, progress: BatchProgress, batch_id: str) -> None:
        self._file = file
        self._batch_id = batch_id
        self.progress = progress
        self.custom_ids: set[str] = set()
        # Keyed by id: part of one batch file.
        self.failed: dict[str, dict[str, Any]] = {}
        """The rows without an answer, by custom_id."""
        self.recent_job_ids: list[str] = []
        """Jobs of loaded rows whose results Redis may still have."""

    @property
    def is_whole(self) -> bool:
        """Whether all rows are written."""
        return self.progress.num_done == self.progress.num_rows

    def load(self, path: Path) -> int:
        """Load the complete rows of a file and return the offset in bytes at which they end.

        Raises RequestError for rows of another batch.
        """
        end = 0
        with path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                row = _checked_row(raw, self._batch_id, path)
                response = row["response"]
                self._note(row["custom_id"], response["body"]["usage"] if response else {}, None if response else row)
                if response and _is_recent(response["request_id"]):
                    self.recent_job_ids.append(response["request_id"])
                end += len(raw)
        return end

    async def append(self, rows: Sequence[FinishedRow]) -> None:
        """Append rows and return when they are on disk."""
        left = memoryview(b"".join(row.line for row in rows))
        with storage.readable("output", self._file.name):
            while left:
                left = left[self._file.write(left) :]
            await asyncio.to_thread(os.fsync, self._file.fileno())
        for row in rows:
            self._note(row.row.custom_id, row.usage, json.loads(row.line) if row.kind == ERROR else None)

    def _note(self, custom_id: str, usage: Mapping[str, Any], failed: dict[str, Any] | None) -> None:
        self.custom_ids.add(custom_id)
        if failed is not None:
            self.failed[custom_id] = failed
        self.progress = self.progress.after(custom_id, usage, failed and failed["error"])


@contextmanager
def open_results(output: str, batch_id: str, num_rows: int, on_wait: OnWait) -> Iterator[ResultsFile]:
    """Open the results file of a batch and lock it for the block. At the end, publish it if it is complete.

    While the store of the output is unreachable, it waits, and reports that to `on_wait`. Raises BusyError while
    another run writes it, and RequestError if the output exists with other content.
    """
    partial = storage.partial_path(output)
    with _locked(partial) as file:
        results = ResultsFile(file, BatchProgress(num_rows), batch_id)
        is_published = outlast(output, lambda: storage.exists(output), on_wait)
        if is_published:
            outlast(output, lambda: _load_published(results, output), on_wait)
        else:
            with storage.readable("output"):
                file.truncate(results.load(partial))
        yield results
        if results.is_whole and not is_published:
            outlast(output, lambda: storage.publish(partial, output), on_wait)


def _load_published(results: ResultsFile, output: str) -> None:
    with storage.local_copy(output, param="output") as path, storage.readable("output"):
        results.load(path)
    if not results.is_whole:
        raise RequestError(
            f"{output} exists and does not belong to this batch; remove it or choose another output", param="output"
        )


@contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    while True:
        with storage.readable("output"):
            # Unbuffered: after a failed write on a full disk, a buffer would be written again at close.
            file = path.open("ab", buffering=0)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"another run is writing {path}"
                raise BusyError(message, code="batch_running", retry_after_ms=LOCKED_RETRY_MS) from error
            # Between open and lock, the previous run may have published or removed this file.
            if _is_at(file, path):
                try:
                    yield file
                finally:
                    if _is_at(file, path) and path.stat().st_size == 0:
                        path.unlink()
                return


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _checked_row(raw: bytes, batch_id: str, path: Path) -> dict[str, Any]:
    """Parse a row and check that it belongs to this batch."""
    try:
        row = json.loads(raw)
        if row["id"] == row_id_of(batch_id, row["custom_id"]):
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise RequestError(f"{path} holds rows of another batch; remove it or choose another output", param="output")
