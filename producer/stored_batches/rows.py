"""The rows of a batch over stored files, from the lines of its input to the lines of its results.

The input is checked line by line, and read in windows of rows. All of that blocks.

A row's number counts the lines that are not blank, from 0. So it stays the same however often the file is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Literal, Protocol

from pydantic_core import from_json, to_json

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.job import MAX_CUSTOM_ID_CHARS
from penstock.contract.json_text import json_refusal, without_mark
from penstock.producer.anthropic.message import error_body, message_of_error, status_of
from penstock.producer.batch.request import EMBEDDINGS_URL, MAX_LINE_BYTES, message_request_of, request_of_line
from penstock.producer.batch.results import answer_row, error_row, row_id_of
from penstock.producer.files.storage import storage_errors
from penstock.producer.openai.json_parts import json_line
from penstock.producer.parsed_body import ParsedBody
from penstock.queue.files.batch import CANCELLED_ROW, EXPIRED_ROW, MESSAGES_ENDPOINT, BatchSpec, RowProblem

MAX_PROBLEMS = 100
"""Wrong lines that a refused batch names."""
MAX_WINDOW_BYTES = 8 << 20
"""Bytes of the lines that are read and sorted at once, but for the last of them."""
_BOM = b"\xef\xbb\xbf"
_PROMPT_FIELDS = ("messages", "prompt", "input")
_FIELDS_BEFORE_PROMPT = ("tools", "system")
"""Fields of a row that the model reads before those."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row of an input: its number, and its line as JSON."""

    number: int
    custom_id: str
    fields: Mapping[str, Any]
    num_bytes: int
    line: int
    """The number of its line in the input, from 1."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What an input may have, and for which endpoint its rows must be."""

    endpoint: str
    max_rows: int
    max_inputs: int


@dataclass(slots=True)
class InputCheck:
    """What a check found: the number of rows, the names of models, and what is wrong."""

    num_rows: int = 0
    # Of one request.
    models: dict[str, int] = field(default_factory=dict)
    """Model → the first line that names it. The empty name stands for rows without one."""
    problems: list[RowProblem] = field(default_factory=list)


class WrongLineError(Exception):
    """A line that no row can be made of."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def checked_input(source: IO[bytes], limits: InputLimits, is_over: Callable[[], bool]) -> InputCheck:
    """Read a whole input and check each line, but not the bodies of its rows.

    It ends early once `is_over`, such as for a canceled batch.
    """
    found, seen, num_inputs = InputCheck(), dict[bytes, int](), 0
    for line, raw in _lines(source):
        found.num_rows += 1
        try:
            if found.num_rows > limits.max_rows:
                raise WrongLineError("too_many_rows", f"the input has more than {limits.max_rows} rows")
            custom_id, fields = _parsed(raw, limits.endpoint)
            # 16 bytes instead of up to 256 characters for each of the rows.
            mark = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
            if mark in seen:
                message = f"custom_id {custom_id!r} is already used in line {seen[mark]}"
                raise WrongLineError("duplicate_custom_id", message, "custom_id")
            seen[mark] = line
            body = fields["body"]
            found.models.setdefault(str(body.get("model") or ""), line)
            if limits.endpoint == EMBEDDINGS_URL:
                given = body.get("input")
                # Token ids are one text.
                is_several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
                num_inputs += len(given) if isinstance(given, list) and is_several else 1
            if num_inputs > limits.max_inputs:
                raise WrongLineError("too_many_inputs", f"the rows have more than {limits.max_inputs} texts in all")
        except WrongLineError as wrong:
            found.problems.append(RowProblem(wrong.code, wrong.message, line, wrong.param))
            if wrong.code.startswith("too_many") or len(found.problems) == MAX_PROBLEMS:
                break
        if is_over():
            break
    if not found.num_rows:
        found.problems.append(RowProblem("empty_file", "the input has no rows"))
    return found


class RowReader:
    """Reads the rows of a checked input that no part has, in windows. Within one, rows with equal beginnings meet.

    Nodes keep the KV cache of common beginnings, so a row finds what the one before it computed.
    """

    def __init__(self, source: IO[bytes], committed: bytes | bytearray) -> None:
        self._source = source
        self._rows = self._left(committed)

    def window(self, num_rows: int) -> list[StoredRow]:
        """Return the next rows, sorted by their prompts, of some MiB at most. None are left if it returns none.

        After an error of the storage the reader is over, and its rows are read again by another one.
        """
        rows, num_bytes = list[StoredRow](), 0
        while len(rows) < num_rows and num_bytes < MAX_WINDOW_BYTES:
            row = next(self._rows, None)
            if row is None:
                break
            rows.append(row)
            num_bytes += row.num_bytes
        return sorted(rows, key=_prompt_of)

    def in_order(self) -> Iterator[StoredRow]:
        """Yield the next rows in the order of the input."""
        return self._rows

    def close(self) -> None:
        """Close the input."""
        self._source.close()

    def _left(self, committed: bytes | bytearray) -> Iterator[StoredRow]:
        for number, (line, raw) in enumerate(_lines(self._source)):
            if is_committed(committed, number):
                continue
            try:
                fields = from_json(raw, allow_inf_nan=False)
                yield StoredRow(number, fields["custom_id"], fields, len(raw), line)
            except (ValueError, KeyError, TypeError):
                # The input was checked, and an object never changes.
                continue


def is_committed(rows: bytes | bytearray, number: int) -> bool:
    """Return whether a row's bit is set."""
    at = number >> 3
    return at < len(rows) and bool(rows[at] & (0x80 >> (number & 7)))


def _prompt_of(row: StoredRow) -> bytes:
    body = row.fields.get("body", {})
    given = next((body[name] for name in _PROMPT_FIELDS if name in body), "")
    return to_json([body.get("model"), *(body.get(name) for name in _FIELDS_BEFORE_PROMPT), given])


def _lines(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes of each line that is not blank."""
    number = 0
    with storage_errors():
        while raw := source.readline(MAX_LINE_BYTES + 1):
            number += 1
            text = raw.removeprefix(_BOM) if number == 1 else raw
            if text.strip():
                yield number, text
            while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                # The rest of a line that is too long.
                raw = source.readline(MAX_LINE_BYTES + 1)


def _parsed(raw: bytes, endpoint: str) -> tuple[str, Mapping[str, Any]]:
    """Return custom_id and fields of a line. Raises WrongLineError."""
    if len(raw) > MAX_LINE_BYTES:
        raise WrongLineError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        fields = from_json(without_mark(raw), allow_inf_nan=False)
    except RequestError as error:
        raise WrongLineError("invalid_json_line", error.message) from None
    except ValueError as error:
        raise WrongLineError("invalid_json_line", json_refusal(raw, error, "not JSON").message) from None
    if not isinstance(fields, dict):
        raise WrongLineError("invalid_json_line", "the line must be a JSON object")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise WrongLineError("invalid_custom_id", message, "custom_id")
    if url != endpoint:
        shown = repr(url[:64]) if isinstance(url, str) else "missing"
        message = f"url is {shown}; all rows must be for the batch's endpoint {endpoint}"
        raise WrongLineError("mismatched_endpoint", message, "url")
    if fields.get("method", "POST") != "POST":
        raise WrongLineError("invalid_method", "method must be POST", "method")
    if not isinstance(body, dict):
        raise WrongLineError("invalid_body", "body must be an object", "body")
    return custom_id, fields


# The lines that rows become: in OpenAI's shape and in Anthropic's.

OUTPUT, ERROR = "output", "error"
KINDS = (OUTPUT, ERROR)
_STOPPED_RESULTS = {CANCELLED_ROW: "canceled", EXPIRED_ROW: "expired"}
"""Code of a row that was not answered because its batch ended early → Anthropic's type of its result."""


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A row with its line for the output or the error file."""

    number: int
    kind: str
    """Which file it belongs to."""
    line: bytes
    outcome: Literal["completed", "failed", "stopped"]
    """`stopped`: its batch ended before it was answered."""
    job_id: str | None = None
    """The job whose result the line has."""
    usage: Mapping[str, Any] = field(default_factory=dict)


class LineFormat(Protocol):
    """One API's rows."""

    def request_of(self, fields: Mapping[str, Any]) -> ParsedBody:
        """Return the request of an input line. Raises RequestError."""

    def answered(self, row: StoredRow, body: Mapping[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""

    def failed(self, row: StoredRow, error: PenstockError) -> FinishedRow:
        """Return a failed row."""

    def stopped(self, row: StoredRow, reason: PenstockError) -> FinishedRow:
        """Return a row that was not answered before its batch was canceled or its window ended."""


def format_of(batch_id: str, spec: BatchSpec) -> LineFormat:
    """Return the format of a batch's rows."""
    return MessageLines(spec) if spec.endpoint == MESSAGES_ENDPOINT else OpenAiLines(batch_id)


class OpenAiLines:
    """The rows of OpenAI's batches: answers are in the output file, all else in the error file."""

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id

    def request_of(self, fields: Mapping[str, Any]) -> ParsedBody:
        """Return the request of an input line. Raises RequestError."""
        return request_of_line(fields)

    def answered(self, row: StoredRow, body: Mapping[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""
        line = json_line(answer_row(row_id_of(self._batch_id, row.custom_id), row.custom_id, dict(body), job_id))
        return FinishedRow(row.number, OUTPUT, line, "completed", job_id, body.get("usage") or {})

    def failed(self, row: StoredRow, error: PenstockError) -> FinishedRow:
        """Return a failed row."""
        return FinishedRow(row.number, ERROR, self._error_line(row, error), "failed")

    def stopped(self, row: StoredRow, reason: PenstockError) -> FinishedRow:
        """Return a row that was not answered."""
        return FinishedRow(row.number, ERROR, self._error_line(row, reason), "stopped")

    def _error_line(self, row: StoredRow, error: PenstockError) -> bytes:
        failed = error_row(row_id_of(self._batch_id, row.custom_id), row.custom_id, error)
        return json_line({"line": row.line, **failed})


class MessageLines:
    """The rows of Anthropic's message batches: all results are in one file."""

    def __init__(self, spec: BatchSpec) -> None:
        self._spec = spec

    def request_of(self, fields: Mapping[str, Any]) -> ParsedBody:
        """Return the request of an input line. Raises RequestError."""
        return message_request_of(fields["body"], ignores_unknown=self._spec.ignores_unknown)

    def answered(self, row: StoredRow, body: Mapping[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""
        line = _result_line(row.custom_id, {"type": "succeeded", "message": body})
        return FinishedRow(row.number, OUTPUT, line, "completed", job_id, body["usage"])

    def failed(self, row: StoredRow, error: PenstockError) -> FinishedRow:
        """Return a failed row."""
        details = error_body(message_of_error(error), status_of(error), None)
        return FinishedRow(
            row.number, OUTPUT, _result_line(row.custom_id, {"type": "errored", "error": details}), "failed"
        )

    def stopped(self, row: StoredRow, reason: PenstockError) -> FinishedRow:
        """Return a row that was not answered."""
        line = _result_line(row.custom_id, {"type": _STOPPED_RESULTS[reason.code]})
        return FinishedRow(row.number, OUTPUT, line, "stopped")


def _result_line(custom_id: str, result: Mapping[str, Any]) -> bytes:
    return json_line({"custom_id": custom_id, "result": result})
