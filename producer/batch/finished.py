"""The lines that finished rows become: in OpenAI's shape, of files and of `/v1/batches`, and in Anthropic's."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.contract.errors import PenstockError
from penstock.producer.anthropic.message import error_body, message_of_error, status_of
from penstock.producer.batch.lines import InputRow
from penstock.producer.batch.request import request_of, request_of_line
from penstock.producer.openai.json_parts import json_line
from penstock.producer.parsed_body import ParsedBody
from penstock.queue.files.batch import CANCELLED_ROW, EXPIRED_ROW, MESSAGES_ENDPOINT

OUTPUT, ERROR = "output", "error"
KINDS = (OUTPUT, ERROR)
_STOPPED = {
    CANCELLED_ROW: "the batch was cancelled before this request was answered",
    EXPIRED_ROW: "the completion window of the batch ended before this request was answered",
}
_STOPPED_RESULTS = {CANCELLED_ROW: "canceled", EXPIRED_ROW: "expired"}
"""Code of a row that was not answered because its batch ended early → Anthropic's type of its result."""


def row_id_of(batch_id: str, custom_id: str) -> str:
    """Return a row's id, which is also the idempotency key of its job."""
    return "batch_req_" + hashlib.blake2b(f"{batch_id}\0{custom_id}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A row with its line for the output or the error file."""

    row: InputRow
    kind: str
    """Which file it belongs to."""
    line: bytes
    outcome: Literal["completed", "failed", "stopped"]
    """`stopped`: its batch ended before it was answered."""
    job_id: str | None = None
    """The job whose result the line has."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    num_made: int = 0
    """Rows of a flow that it has made by its `for_each`."""


class RowFormat(ABC):
    """The rows of one API's batches."""

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id

    def key_of(self, row: InputRow) -> str:
        """Return the row's id, which is also the idempotency key of its job."""
        return row_id_of(self._batch_id, row.custom_id)

    @abstractmethod
    def request_of(self, row: InputRow) -> ParsedBody:
        """Return the request of a row. Raises RequestError."""

    @abstractmethod
    def answered(self, row: InputRow, body: dict[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""

    @abstractmethod
    def failed(self, row: InputRow, error: PenstockError) -> FinishedRow:
        """Return a failed row."""

    @abstractmethod
    def stopped(self, row: InputRow, code: str) -> FinishedRow:
        """Return a row that was not answered before its batch was canceled or its window ended."""


class OpenAiRows(RowFormat):
    """The rows of OpenAI's batches: answers are in the output file, all else in the error file."""

    def __init__(self, batch_id: str, *, shows_lines: bool) -> None:
        """`shows_lines`: whether a row without an answer has the number of its line in the input."""
        super().__init__(batch_id)
        self._shows_lines = shows_lines

    def request_of(self, row: InputRow) -> ParsedBody:
        """Return the request of a row. Raises RequestError."""
        return request_of_line(row.fields)

    def answered(self, row: InputRow, body: dict[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""
        response = {"status_code": 200, "request_id": job_id, "body": body}
        line = json_line({**self._head(row), "response": response, "error": None})
        return FinishedRow(row.without_body(), OUTPUT, line, "completed", job_id, body.get("usage") or {})

    def made(self, row: InputRow, num_made: int) -> FinishedRow:
        """Return a row of a flow that has made others instead of asking a model."""
        body = {"object": "flow.rows", "count": num_made}
        response = {"status_code": 200, "request_id": self.key_of(row), "body": body}
        line = json_line({**self._head(row), "response": response, "error": None})
        return FinishedRow(row.without_body(), OUTPUT, line, "completed", num_made=num_made)

    def failed(self, row: InputRow, error: PenstockError) -> FinishedRow:
        """Return a failed row."""
        return FinishedRow(row.without_body(), ERROR, self._error_line(row, error), "failed")

    def stopped(self, row: InputRow, code: str) -> FinishedRow:
        """Return a row that was not answered."""
        return FinishedRow(
            row.without_body(), ERROR, self._error_line(row, PenstockError(_STOPPED[code], code=code)), "stopped"
        )

    def _error_line(self, row: InputRow, error: PenstockError) -> bytes:
        place = {"line": row.line} if self._shows_lines else {}
        details = {"code": error.code, "message": error.message, "param": error.param}
        return json_line({**place, **self._head(row), "response": None, "error": details})

    def _head(self, row: InputRow) -> dict[str, str]:
        return {"id": self.key_of(row), "custom_id": row.custom_id}


class MessageRows(RowFormat):
    """The rows of Anthropic's message batches: all results are in one file."""

    def __init__(self, batch_id: str, *, ignores_unknown: bool) -> None:
        super().__init__(batch_id)
        self._ignores_unknown = ignores_unknown

    def request_of(self, row: InputRow) -> ParsedBody:
        """Return the request of a row. Raises RequestError."""
        return request_of(MESSAGES_ENDPOINT, row.fields["body"], ignores_unknown=self._ignores_unknown)

    def answered(self, row: InputRow, body: dict[str, Any], job_id: str) -> FinishedRow:
        """Return an answered row."""
        line = _result_line(row, {"type": "succeeded", "message": body})
        return FinishedRow(row.without_body(), OUTPUT, line, "completed", job_id, body["usage"])

    def failed(self, row: InputRow, error: PenstockError) -> FinishedRow:
        """Return a failed row."""
        details = error_body(message_of_error(error), status_of(error), None)
        return FinishedRow(
            row.without_body(), OUTPUT, _result_line(row, {"type": "errored", "error": details}), "failed"
        )

    def stopped(self, row: InputRow, code: str) -> FinishedRow:
        """Return a row that was not answered."""
        return FinishedRow(row.without_body(), OUTPUT, _result_line(row, {"type": _STOPPED_RESULTS[code]}), "stopped")


def _result_line(row: InputRow, result: Mapping[str, Any]) -> bytes:
    return json_line({"custom_id": row.custom_id, "result": result})
