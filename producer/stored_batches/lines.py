"""What the rows of stored batches ask for, and the lines that they become: in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.contract.errors import PenstockError
from penstock.contract.problems import rename
from penstock.producer.anthropic.message import error_body, message_of_error, status_of
from penstock.producer.batch.request import BatchRequest, message_request_of, request_of_line
from penstock.producer.batch.results import answer_row, error_row, row_id_of
from penstock.producer.stored_batches.stored_input import StoredRow
from penstock.queue.files.batch import CANCELLED_ROW, EXPIRED_ROW, MESSAGES_ENDPOINT, BatchSpec

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

    def request_of(self, fields: Mapping[str, Any]) -> BatchRequest:
        """Return the request of an input line. Raises RequestError."""

    def answered(self, row: StoredRow, body: Mapping[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""

    def failed(self, row: StoredRow, error: PenstockError, names: Mapping[str, str]) -> FinishedRow:
        """Return a failed row. `names` maps penstock's field names to those of the request, where they differ."""

    def stopped(self, row: StoredRow, reason: PenstockError) -> FinishedRow:
        """Return a row that was not answered before its batch was canceled or its window ended."""


def format_of(batch_id: str, spec: BatchSpec) -> LineFormat:
    """Return the format of a batch's rows."""
    return MessageLines(spec) if spec.endpoint == MESSAGES_ENDPOINT else OpenAiLines(batch_id)


class OpenAiLines:
    """The rows of OpenAI's batches: answers are in the output file, all else in the error file."""

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id

    def request_of(self, fields: Mapping[str, Any]) -> BatchRequest:
        """Return the request of an input line. Raises RequestError."""
        return request_of_line(fields)

    def answered(self, row: StoredRow, body: Mapping[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""
        line = _line(answer_row(row_id_of(self._batch_id, row.custom_id), row.custom_id, dict(body), job_id))
        return FinishedRow(row.number, OUTPUT, line, "completed", job_id, body.get("usage") or {})

    def failed(self, row: StoredRow, error: PenstockError, names: Mapping[str, str]) -> FinishedRow:
        """Return a failed row."""
        return FinishedRow(row.number, ERROR, self._error_line(row, error), "failed")

    def stopped(self, row: StoredRow, reason: PenstockError) -> FinishedRow:
        """Return a row that was not answered."""
        return FinishedRow(row.number, ERROR, self._error_line(row, reason), "stopped")

    def _error_line(self, row: StoredRow, error: PenstockError) -> bytes:
        failed = error_row(row_id_of(self._batch_id, row.custom_id), row.custom_id, error)
        return _line({"line": row.line, **failed})


class MessageLines:
    """The rows of Anthropic's message batches: all results are in one file."""

    def __init__(self, spec: BatchSpec) -> None:
        self._spec = spec

    def request_of(self, fields: Mapping[str, Any]) -> BatchRequest:
        """Return the request of an input line. Raises RequestError."""
        return message_request_of(fields["body"], ignores_unknown=self._spec.ignores_unknown)

    def answered(self, row: StoredRow, body: Mapping[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""
        line = _result_line(row.custom_id, {"type": "succeeded", "message": body})
        return FinishedRow(row.number, OUTPUT, line, "completed", job_id, body["usage"])

    def failed(self, row: StoredRow, error: PenstockError, names: Mapping[str, str]) -> FinishedRow:
        """Return a failed row."""
        rename(error, names)
        details = error_body(message_of_error(error), status_of(error), None)
        return FinishedRow(
            row.number, OUTPUT, _result_line(row.custom_id, {"type": "errored", "error": details}), "failed"
        )

    def stopped(self, row: StoredRow, reason: PenstockError) -> FinishedRow:
        """Return a row that was not answered."""
        line = _result_line(row.custom_id, {"type": _STOPPED_RESULTS[reason.code]})
        return FinishedRow(row.number, OUTPUT, line, "stopped")


def _result_line(custom_id: str, result: Mapping[str, Any]) -> bytes:
    return _line({"custom_id": custom_id, "result": result})


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
