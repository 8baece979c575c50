"""The output and the error file of a server's batch on this disk. They grow as `.partial` until the batch has ended.

A batch's bytes are only ever appended to. So an interrupted download goes on behind the last byte that is here.
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from penstock.cli.batch.server import STDOUT, Server
from penstock.cli.output import write_text
from penstock.contract.errors import BusyError, RequestError
from penstock.producer.batch import storage
from penstock.producer.batch.finished import row_id_of
from penstock.producer.batch.lines import MAX_LINE_BYTES
from penstock.producer.batch.results import LOCKED_RETRY_MS
from penstock.queue.files.batch import is_of_messages

_ANSWERED = "succeeded"
"""Anthropic's type of the result of an answered request."""


class GrowingRows(Protocol):
    """One of the two files of a batch."""

    def grow(self, server: Server) -> None:
        """Append what the server has beyond the bytes that are here."""

    def publish(self, server: Server) -> None:
        """Give the file its name, because its batch has ended."""


class _Printed:
    """Rows that are printed on stdout."""

    def __init__(self, batch_id: str, kind: str) -> None:
        self._batch_id = batch_id
        self._kind = kind
        self._num_bytes = 0

    def grow(self, server: Server) -> None:
        decoder = getincrementaldecoder("utf-8")("replace")
        with server.rows(self._batch_id, self._kind, self._num_bytes) as pieces:
            for piece in pieces:
                if sys.stdout.isatty():
                    write_text(decoder.decode(piece))
                else:
                    sys.stdout.buffer.write(piece)
                self._num_bytes += len(piece)
        sys.stdout.flush()

    def publish(self, server: Server) -> None:
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

    def publish(self, server: Server) -> None:
        partial = storage.partial_path(str(self._path))
        if self._may_be_absent and self._file.tell() == 0:
            partial.unlink(missing_ok=True)
            return
        os.fsync(self._file.fileno())
        storage.publish(partial, str(self._path))


class _MessageRows:
    """The results of a message batch, which the server has once the batch has ended: answers, and all others."""

    def __init__(
        self, batch_id: str, answered: BinaryIO, failed: BinaryIO | None, names: Mapping[str, BinaryIO]
    ) -> None:
        """`names`: the files that are published, by name."""
        self._batch_id = batch_id
        self._answered = answered
        self._failed = failed
        self._names = names
        self._num_lines = 0

    def grow(self, server: Server) -> None:
        """Do nothing, because there are no results before the end."""

    def publish(self, server: Server) -> None:
        """Write all results, and give the files their names. Raises RequestError if a file holds something else."""
        with server.message_results(self._batch_id) as lines:
            # Those before were written by an attempt that was cut off.
            for line in islice(lines, self._num_lines, None):
                is_answered = json.loads(line)["result"]["type"] == _ANSWERED
                file = self._answered if is_answered else self._failed
                if file is not None:
                    file.write(line)
                self._num_lines += 1
        for name, file in self._names.items():
            file.flush()
            partial, path = storage.partial_path(name), Path(name)
            if file is self._failed and file.tell() == 0:
                continue
            if path.exists() and not filecmp.cmp(partial, path, shallow=False):
                message = (
                    f"{path} holds something else than results of {self._batch_id}; remove it or choose another file"
                )
                raise RequestError(message, param="errors" if file is self._failed else "output")
            storage.publish(partial, name)


@contextmanager
def opened_files(output: str, errors: str | None, batch_id: str) -> Iterator[Sequence[GrowingRows]]:
    """Open the files for a batch's answers and for its other results; `errors`: None to write no others.

    Raises RequestError if a file has rows of something else, and BusyError while another command writes it.
    """
    with ExitStack() as stack:
        if is_of_messages(batch_id):
            yield [stack.enter_context(_opened_results(output, errors, batch_id))]
            return
        wanted = {"output": output} | ({} if errors is None else {"errors": errors})
        yield [stack.enter_context(_opened_rows(name, batch_id, kind)) for kind, name in wanted.items()]


@contextmanager
def _opened_results(output: str, errors: str | None, batch_id: str) -> Iterator[_MessageRows]:
    """Open the files for the results of a message batch. `errors`: None to write no other results than answers."""
    names = dict[str, BinaryIO]()
    with ExitStack() as stack:

        def opened(name: str, kind: str) -> BinaryIO:
            if name == STDOUT:
                return sys.stdout.buffer
            names[name] = file = stack.enter_context(_locked_partial(name, kind))
            # A part of an earlier download, which begins anew.
            file.truncate(0)
            return file

        yield _MessageRows(
            batch_id, opened(output, "output"), None if errors is None else opened(errors, "errors"), names
        )


@contextmanager
def _opened_rows(name: str, batch_id: str, kind: str) -> Iterator[GrowingRows]:
    """Open a file for the `output` or the `errors` of a batch. Without rows, a list of errors is not published.

    Raises RequestError if the file has rows of something else, and BusyError while another command writes it.
    """
    if name == STDOUT:
        yield _Printed(batch_id, kind)
        return
    with storage.readable(kind):
        _check_owner(Path(name), batch_id, kind)
    with _locked_partial(name, kind) as file:
        if not _check_owner(storage.partial_path(name), batch_id, kind):
            file.truncate(0)
        yield _Saved(file, Path(name), batch_id, kind, may_be_absent=kind == "errors")


@contextmanager
def _locked_partial(name: str, kind: str) -> Iterator[BinaryIO]:
    """Open what grows to a file, at its end, and lock it. It is removed if it is empty at the end of the block.

    Raises BusyError while another command writes it.
    """
    partial = storage.partial_path(name)
    with storage.readable(kind):
        file = partial.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another command is writing {partial}"
            raise BusyError(message, code="batch_running", retry_after_ms=LOCKED_RETRY_MS) from None
        try:
            yield file
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
