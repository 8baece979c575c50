"""The output and the error file of a server's batch on this disk. They grow as `.partial` until the batch has ended.

A batch's bytes are only ever appended to. So an interrupted download goes on behind the last byte that is here.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from penstock.cli.batch.server import STDOUT, Server
from penstock.contract.errors import BusyError, RequestError
from penstock.producer.batch import storage
from penstock.producer.batch.request import MAX_LINE_BYTES
from penstock.producer.batch.results import LOCKED_RETRY_MS, row_id_of


class GrowingRows(Protocol):
    """One of the two files of a batch."""

    def grow(self, server: Server) -> None:
        """Append what the server has beyond the bytes that are here."""

    def publish(self) -> None:
        """Give the file its name, because its batch has ended."""


class _Printed:
    """Rows that are printed on stdout."""

    def __init__(self, batch_id: str, kind: str) -> None:
        self._batch_id = batch_id
        self._kind = kind
        self._num_bytes = 0

    def grow(self, server: Server) -> None:
        with server.rows(self._batch_id, self._kind, self._num_bytes) as pieces:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
                self._num_bytes += len(piece)
        sys.stdout.flush()

    def publish(self) -> None:
        return


class _Saved:
    """Rows in a file."""

    def __init__(self, file: BinaryIO, path: Path, batch_id: str, kind: str, *, may_be_absent: bool) -> None:
        self._file = file
        self._path = path
        self._batch_id = batch_id
        self._kind = kind
        self._may_be_absent = may_be_absent

    def grow(self, server: Server) -> None:
        with storage.readable(self._kind), server.rows(self._batch_id, self._kind, self._file.tell()) as pieces:
            for piece in pieces:
                self._file.write(piece)
        self._file.flush()

    def publish(self) -> None:
        partial = storage.partial_path(str(self._path))
        if self._may_be_absent and self._file.tell() == 0:
            partial.unlink(missing_ok=True)
            return
        os.fsync(self._file.fileno())
        storage.publish(partial, str(self._path))


@contextmanager
def opened_rows(name: str, batch_id: str, kind: str) -> Iterator[GrowingRows]:
    """Open a file for the `output` or the `errors` of a batch. Without rows, a list of errors is not published.

    Raises RequestError if the file has rows of something else, and BusyError while another command writes it.
    """
    if name == STDOUT:
        yield _Printed(batch_id, kind)
        return
    partial = storage.partial_path(name)
    with storage.readable(kind):
        _check_owner(Path(name), batch_id, kind)
        file = partial.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another command is writing {partial}"
            raise BusyError(message, code="batch_running", retry_after_ms=LOCKED_RETRY_MS) from None
        if not _check_owner(partial, batch_id, kind):
            file.truncate(0)
        try:
            yield _Saved(file, Path(name), batch_id, kind, may_be_absent=kind == "errors")
        finally:
            file.flush()
            if partial.exists() and partial.stat().st_size == 0:
                partial.unlink()


def _check_owner(path: Path, batch_id: str, kind: str) -> bool:
    """Return whether a file begins with a whole row of this batch. Raises RequestError if its first line is another."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        line = file.readline(2 * MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        is_ours = not line or path.suffix == ".partial"
    else:
        try:
            row = json.loads(line)
            is_ours = row["id"] == row_id_of(batch_id, row["custom_id"])
        except (ValueError, KeyError, TypeError):
            is_ours = False
    if not is_ours:
        message = f"{path} holds rows of something else than {batch_id}; remove it or choose another file"
        raise RequestError(message, param=kind)
    return bool(line)
