"""The Responses API as a dialect of the gateway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.contract.errors import PenstockError
from penstock.contract.output import Usage
from penstock.gateway.openai.errors import error_body
from penstock.gateway.responses.events import ResponseEncoder
from penstock.gateway.responses.output import OutputReader, reading_of
from penstock.gateway.responses.record import StoredResponse
from penstock.gateway.responses.render import end_of, output_parts, response_head, response_tail
from penstock.gateway.stream.dialect import AnswerHead, Dialect, WholeEncoder
from penstock.gateway.stream.sse import KEEP_ALIVE, event
from penstock.queue.packed_result import PackedResult


class ResponseDialect(Dialect):
    """Answers of `/v1/responses`. The options of an answer's head are `answer_options`."""

    keep_alive = KEEP_ALIVE
    """The events have sequence numbers in place of ids of server-sent events."""

    def stream(self, head: AnswerHead) -> ResponseEncoder:
        """Return the encoder of a streamed answer."""
        return ResponseEncoder(head.job_ids[0], head.options["record"], head.options["starting_after"])

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of a whole answer."""
        return ResponseWholeEncoder(head.job_ids[0], head.options["record"], head.options["finished_s"])

    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails before its first event."""
        return event({"type": "error", "sequence_number": 0, **error_body(error)["error"]})


def answer_options(record: StoredResponse, *, starting_after: int = -1, finished_s: int = 0) -> dict[str, Any]:
    """Return the options of an answer: its record, the last event that the caller has, and when the job ended."""
    return {"record": record, "starting_after": starting_after, "finished_s": finished_s}


class ResponseWholeEncoder(WholeEncoder):
    """Encodes a response whose job is done."""

    def __init__(self, job_id: str, record: StoredResponse, finished_s: int) -> None:
        self._job_id = job_id
        self._record = record
        self._finished_s = finished_s
        self._members: dict[str, Any] = {}

    def head(self) -> bytes:
        """Return the part before the output."""
        return b"".join(response_head(self._job_id, self._record))

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the items of the output. Empty parts come while the text is parsed."""
        reader = OutputReader(self._job_id, self._record.form, self._record.called)
        for _ in reading_of(result, reader):
            yield b""
        self._members = end_of(self._record, result.outcome, self._finished_s, result.usage, reader).members
        yield from output_parts(reader.items, result.choices[0].logprobs)

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the part after the output."""
        return response_tail(self._members)
