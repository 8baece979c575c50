"""vLLM's answers of `/tokenize` and `/detokenize`, rendered in parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.contract.errors import InvariantError, PenstockError
from penstock.contract.job import Usage
from penstock.gateway.openai.errors import error_body
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder
from penstock.gateway.stream.sse import event
from penstock.producer.openai.json_parts import Rows, Text, json_parts
from penstock.queue.packed_result import PackedResult
from penstock.queue.task_output import PackedOutput


class _TaskEncoder(WholeEncoder):
    """Encodes the output of a request's only job."""

    def head(self) -> bytes:
        """Return nothing: the output is the whole answer."""
        return b""

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the parts of the answer."""
        if result.output is None:
            raise InvariantError(f"the result of job {result.job_id} has no output")
        yield from json_parts(self._fields(result.output))

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return nothing."""
        return b""

    @abstractmethod
    def _fields(self, output: PackedOutput) -> dict[str, Any]:
        """Return the members of the answer."""


class _TokenizeEncoder(_TaskEncoder):
    def _fields(self, output: PackedOutput) -> dict[str, Any]:
        return {
            "count": output.num_tokens,
            "max_model_len": output.max_model_len,
            "tokens": Rows(output.token_ids),
            "token_strs": Rows(output.token_strs) if output.has_strs else None,
        }


class _DetokenizeEncoder(_TaskEncoder):
    def _fields(self, output: PackedOutput) -> dict[str, Any]:
        return {"prompt": Text(lambda: (output.text,))}


class _TaskDialect(Dialect):
    parses_text = False
    encoder: type[_TaskEncoder]

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Raise InvariantError, because no body of these routes asks for a stream."""
        raise InvariantError("a task has no stream")

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of the answer."""
        return self.encoder()

    def error_event(self, error: PenstockError) -> bytes:
        """Return the error as an event."""
        return event(error_body(error))


class TokenizeDialect(_TaskDialect):
    """Answers of `/tokenize`."""

    encoder = _TokenizeEncoder


class DetokenizeDialect(_TaskDialect):
    """Answers of `/detokenize`."""

    encoder = _DetokenizeEncoder
