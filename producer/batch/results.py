"""A batch's results while they come: an append-only file with one writer, published when it is whole.

A row is in the file once it was synced; what a crash tore off its end is asked for again.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from penstock.contract.errors import BusyError, RequestError
from penstock.producer.batch import storage
from penstock.producer.batch.records import BatchProgress

LOCKED_RETRY_MS = 10_000


def row_id_of(batch_id: str, custom_id: str) -> str:
    """A row's id, which is its job's idempotency key too."""
    return "batch_req_" + hashlib.blake2b(f"{batch_id}\0{custom_id}".encode(), digest_size=16).hexdigest()


class ResultsFile:
    """The rows written so far, and the end of the file where the next ones go."""

    def __init__(self, file: FileIO, progress: BatchProgress, batch_id: str) -> None:
        self._file = file
        self._batch_id = batch_id
        self.progress = progress
        self.custom_ids: set[str] = set()

    @property
    def is_whole(self) -> bool:
        """Whether every row is written."""
        return self.progress.num_done == self.progress.num_rows

    def load(self, path: Path) -> int:
        """Takes in the whole lines of a file; answers where they end. Raises RequestError for another batch's rows."""
        end = 0
        with path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._take(_own_row(raw, self._batch_id, path))
                end += len(raw)
        return end

    async def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes rows; returns when they are on disk."""
        fresh = list(rows)
        left = memoryview(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in fresh))
        with storage.readable("output", self._file.name):
            while left:
                left = left[self._file.write(left) :]
            await asyncio.to_thread(os.fsync, self._file.fileno())
        for row in fresh:
            self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        self.custom_ids.add(row["custom_id"])
        self.progress = self.progress.after(row)


@contextmanager
def open_results(output: str, batch_id: str, num_rows: int) -> Iterator[ResultsFile]:
    """The batch's results, ours alone until the block ends; whole ones are published then.

    Raises BusyError while another run writes them, RequestError when the place holds something else.
    """
    partial = storage.partial_path(output)
    with _locked(partial) as file:
        results = ResultsFile(file, BatchProgress(num_rows), batch_id)
        is_published = storage.exists(output)
        if is_published:
            _load_published(results, output)
        else:
            with storage.readable("output"):
                file.truncate(results.load(partial))
        yield results
        if results.is_whole and not is_published:
            storage.publish(partial, output)


def _load_published(results: ResultsFile, output: str) -> None:
    with storage.local_copy(output, param="output") as path, storage.readable("output"):
        results.load(path)
    if not results.is_whole:
        raise RequestError(f"{output} exists and is not this batch's; remove it or choose another", param="output")


@contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    while True:
        with storage.readable("output"):
            # With no buffer, which would be written once more at the end when the disk is full.
            file = path.open("ab", buffering=0)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"another run is writing {path}"
                raise BusyError(message, code="batch_running", retry_after_ms=LOCKED_RETRY_MS) from error
            # Between open and lock, the run before us may have published or removed this very file.
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


def _own_row(raw: bytes, batch_id: str, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(raw)
        if row["id"] == row_id_of(batch_id, row["custom_id"]):
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise RequestError(f"{path} holds rows of another batch; remove it or choose another output", param="output")
