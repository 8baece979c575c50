"""The input of a batch: its lines, which are checked before any job is submitted, and read as rows in windows.

A file may be compressed with gzip or Zstandard, and may begin with a byte order mark; its content says so.
A row's number counts the lines that are not blank, from 0. So it stays the same however often the input is read.
All of this blocks.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from pydantic_core import from_json, to_json

from penstock.contract.errors import ConfigError, RequestError
from penstock.contract.job import MAX_CUSTOM_ID_CHARS
from penstock.contract.json_text import json_refusal, without_mark
from penstock.contract.priority import Priority
from penstock.producer.flows.graph import FlowGraph
from penstock.queue.files.batch import RowProblem

MAX_LINE_BYTES = 16 << 20
MAX_PROBLEMS = 100
"""Wrong lines that a refused batch names."""
MAX_READ_BYTES = 8 << 20
"""Bytes of the lines that are read and sorted at once, but for the last of them."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""How compressed files begin."""
_PACKED_BYTES = 16 << 10
"""Bytes that are decompressed at once."""
_PROMPT_FIELDS = ("messages", "prompt", "input")
_FIELDS_BEFORE_PROMPT = ("tools", "system")
"""Fields of a row that the model reads before those."""


class LineSource(Protocol):
    """An open input."""

    def readline(self, limit: int = -1, /) -> bytes:
        """Return the next line, or its first `limit` bytes; nothing at the end."""

    def close(self) -> None:
        """Close the input."""


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of an input: its line as a JSON object, whose request is not checked yet."""

    number: int
    custom_id: str
    """The caller's name for the request, unique in its input. The result has the same custom_id."""
    fields: Mapping[str, Any]
    num_bytes: int
    line: int
    """The number of its line in the input, from 1."""
    priority: Priority = Priority.BATCH
    """The class of its jobs. Only rows of flows name one."""

    def without_body(self) -> InputRow:
        """Return the row without its fields, which may take megabytes."""
        return InputRow(self.number, self.custom_id, {}, 0, self.line)


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What an input may have, and for which endpoint its rows must be."""

    texts_fields: Mapping[str, str]
    """The endpoints that a row may have. Of each, the field with a row's texts where each text becomes a job, or ""."""
    max_rows: int
    max_inputs: int
    flow: FlowGraph | None = None
    """Where the rows are added if they may wait for each other."""


@dataclass(slots=True)
class InputCheck:
    """What a check found: the number of rows, the digest of their lines, the names of models, and what is wrong."""

    num_rows: int = 0
    num_inputs: int = 0
    """The texts of rows whose texts become a job each."""
    digest: bytes = b""
    # Of one request.
    models: dict[str, int] = field(default_factory=dict)
    """Model → the first line that names it. The empty name stands for rows without one."""
    problems: list[RowProblem] = field(default_factory=list)


def check_input(
    source: LineSource,
    limits: InputLimits | None = None,
    *,
    max_problems: int = MAX_PROBLEMS,
    is_over: Callable[[], bool] = lambda: False,
) -> InputCheck:
    """Read a whole input and check each line, but not the bodies of its rows.

    Without `limits`, each row may have an endpoint of its own, which is checked with its body. The check ends early
    once `is_over`, such as for a canceled batch.
    """
    found, seen, digest = InputCheck(), dict[bytes, int](), hashlib.blake2b(digest_size=16)
    for line, raw in lines_of(source):
        digest.update(raw)
        found.num_rows += 1
        try:
            if limits is not None and found.num_rows > limits.max_rows:
                raise RequestError(f"the input has more than {limits.max_rows} rows", code="too_many_rows")
            row = _row_of(found.num_rows - 1, line, raw)
            # 16 bytes instead of up to 256 characters for each of the rows.
            mark = hashlib.blake2b(row.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
            if mark in seen:
                message = f"custom_id {row.custom_id!r} is already used in line {seen[mark]}"
                raise RequestError(message, code="duplicate_custom_id", param="custom_id")
            seen[mark] = line
            if limits is not None:
                _check_within(row, limits, found)
        except RequestError as wrong:
            found.problems.append(RowProblem(wrong.code, wrong.message, line, wrong.param))
            if wrong.code.startswith("too_many") or len(found.problems) == max_problems:
                break
        if is_over():
            break
    if not found.num_rows:
        found.problems.append(RowProblem("empty_file", "the input has no requests"))
    if limits is not None and not found.problems:
        found.problems += _problems_of(limits.flow, max_problems)
    found.digest = digest.digest()
    return found


def _check_within(row: InputRow, limits: InputLimits, found: InputCheck) -> None:
    """Note the model and the texts of a row, and add it to its flow. Raises RequestError."""
    url = _checked_endpoint(row, limits.texts_fields)
    body = row.fields["body"]
    found.models.setdefault(str(body.get("model") or ""), row.line)
    found.num_inputs += _num_texts(body.get(limits.texts_fields[url]))
    if found.num_inputs > limits.max_inputs:
        raise RequestError(f"the rows have more than {limits.max_inputs} texts in all", code="too_many_inputs")
    if limits.flow is not None:
        limits.flow.add(row.line, row.custom_id, row.fields)


def _problems_of(flow: FlowGraph | None, limit: int) -> list[RowProblem]:
    wrong_rows = islice(flow.problems(), limit) if flow is not None else ()
    return [RowProblem(wrong.code, wrong.message, line, wrong.param) for wrong, line in wrong_rows]


def check_file(path: Path) -> InputCheck:
    """Read and check an input file. Raises RequestError that names the first wrong line."""
    with plain_input(path) as source:
        found = check_input(source, max_problems=1)
    for problem in found.problems:
        raise _at_line(problem.line, problem.message)
    return found


def rows_in(path: Path) -> Iterator[InputRow]:
    """Yield the rows of a file. Raises RequestError that names the first wrong line."""
    with plain_input(path) as source:
        for number, (line, raw) in enumerate(lines_of(source)):
            try:
                row = _row_of(number, line, raw)
            except RequestError as error:
                raise _at_line(line, error.message) from None
            yield row


def _at_line(line: int | None, message: str) -> RequestError:
    return RequestError(message if line is None else f"line {line}: {message}", param="input")


class RowReader:
    """Reads the rows of a checked input that are not stored yet, in windows.

    Within a window, rows with equal beginnings meet. Nodes keep the KV cache of common beginnings, so a row finds what
    the one before it computed.
    """

    def __init__(self, source: LineSource, stored: bytes | bytearray = b"", answered: Collection[str] = ()) -> None:
        """`stored` has a bit for each row that is stored; `answered`, the custom_ids of such rows."""
        self._source = source
        self._rows = self._left(stored, answered)

    def window(self, num_rows: int) -> list[InputRow]:
        """Return the next rows, sorted by their prompts, of some MiB at most. None are left if it returns none.

        After an error of the storage the reader is over, and its rows are read again by another one.
        """
        rows, num_bytes = list[InputRow](), 0
        while len(rows) < num_rows and num_bytes < MAX_READ_BYTES:
            row = next(self._rows, None)
            if row is None:
                break
            rows.append(row)
            num_bytes += row.num_bytes
        return sorted(rows, key=prompt_of)

    def in_order(self) -> Iterator[InputRow]:
        """Yield the next rows in the order of the input."""
        return self._rows

    def close(self) -> None:
        """Close the input."""
        self._source.close()

    def _left(self, stored: bytes | bytearray, answered: Collection[str]) -> Iterator[InputRow]:
        for number, (line, raw) in enumerate(lines_of(self._source)):
            if is_marked(stored, number):
                continue
            try:
                row = _row_of(number, line, raw)
            except RequestError:
                # The input was checked. If it changed since, the run ends without all of its rows.
                continue
            if row.custom_id not in answered:
                yield row


def is_marked(rows: bytes | bytearray, number: int) -> bool:
    """Return whether a row's bit is set."""
    at = number >> 3
    return at < len(rows) and bool(rows[at] & (0x80 >> (number & 7)))


def prompt_of(row: InputRow) -> bytes:
    """Return what orders the rows of a window: those with equal beginnings meet."""
    body = row.fields.get("body")
    if not isinstance(body, dict):
        return b""
    given = next((body[name] for name in _PROMPT_FIELDS if name in body), "")
    return to_json([body.get("model"), *(body.get(name) for name in _FIELDS_BEFORE_PROMPT), given])


def lines_of(source: LineSource) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes of each line that is not blank. One that is too long is cut behind the limit."""
    number = 0
    while raw := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        text = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
        if text and not text.isspace():
            yield number, text
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            # The rest of a line that is too long.
            raw = source.readline(MAX_LINE_BYTES + 1)


def _row_of(number: int, line: int, raw: bytes) -> InputRow:
    """Return the row of a line. Raises RequestError for one that is no JSON object with a custom_id."""
    if len(raw) > MAX_LINE_BYTES:
        raise RequestError(f"longer than {MAX_LINE_BYTES} bytes", code="line_too_long")
    try:
        fields = from_json(without_mark(raw), allow_inf_nan=False)
    except RequestError as error:
        raise RequestError(error.message, code="invalid_json_line") from None
    except ValueError as error:
        raise RequestError(json_refusal(raw, error, "not JSON").message, code="invalid_json_line") from None
    if not isinstance(fields, dict):
        raise RequestError("must be a JSON object", code="invalid_json_line")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise RequestError(message, code="invalid_custom_id", param="custom_id")
    return InputRow(number, custom_id, fields, len(raw), line)


def _checked_endpoint(row: InputRow, endpoints: Collection[str]) -> str:
    """Return the endpoint of a row. Raises RequestError for a row that is for none of these."""
    url, body = row.fields.get("url"), row.fields.get("body")
    if not isinstance(url, str) or url not in endpoints:
        shown = repr(url[:64]) if isinstance(url, str) else "missing"
        wanted = "all rows must be for the batch's endpoint" if len(endpoints) == 1 else "it must be one of"
        message = f"url is {shown}; {wanted} {', '.join(endpoints)}"
        raise RequestError(message, code="mismatched_endpoint", param="url")
    if row.fields.get("method", "POST") != "POST":
        raise RequestError("method must be POST", code="invalid_method", param="method")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", code="invalid_body", param="body")
    return url


def _num_texts(given: object) -> int:
    # Token ids are one text.
    is_several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    return len(given) if isinstance(given, list) and is_several else int(given is not None)


def plain_copy(path: Path, target: Path) -> Path:
    """Return `path`, or `target` with its decompressed content. Raises RequestError if it is damaged."""
    with path.open("rb") as file:
        if not file.read(len(_ZSTANDARD)).startswith((_GZIP, _ZSTANDARD)):
            return path
    with plain_input(path) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    return target


@contextmanager
def plain_input(path: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress it. Raises RequestError if it is damaged."""
    with path.open("rb") as file:
        head = file.read(len(_ZSTANDARD))
        file.seek(0)
        if head == _ZSTANDARD:
            with _zstandard_reader(file) as reader:
                yield reader
        elif head.startswith(_GZIP):
            try:
                with gzip.open(file) as reader:
                    yield cast(BinaryIO, reader)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise RequestError(f"the input is damaged: {error}", param="input") from error
        else:
            yield file


@contextmanager
def _zstandard_reader(file: BinaryIO) -> Iterator[BinaryIO]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        message = "the input is compressed with Zstandard: pip install 'penstock-llm[batch]'"
        raise ConfigError(message, param="input") from error
    decompress = zstandard.ZstdDecompressor().decompressobj
    try:
        yield io.BufferedReader(_FrameReader(file, decompress), 1 << 16)
    except zstandard.ZstdError as error:
        raise RequestError(f"the input is damaged: {error}", param="input") from error


class _FrameReader(io.RawIOBase):
    """Reads the frames of a Zstandard file. The library's own reader takes a cut file for a shorter one."""

    def __init__(self, file: BinaryIO, decompress: Callable[[], Any]) -> None:
        self._file = file
        self._new_frame = decompress
        self._frame = decompress()
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            packed = self._frame.unused_data or self._file.read(_PACKED_BYTES)
            if self._frame.eof:
                if not packed:
                    return 0
                self._frame = self._new_frame()
            elif not packed:
                raise RequestError("the input is damaged: its end is missing", param="input")
            self._held = memoryview(self._frame.decompress(packed))
        part, self._held = self._held[: len(buffer)], self._held[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
