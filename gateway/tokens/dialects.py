"""vLLM's answers of `/tokenize` and `/detokenize`, rendered in parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

from pydantic_core import to_json

from penstock.contract.errors import InvariantError, PenstockError
from penstock.contract.output import Usage
from penstock.gateway.openai.errors import error_body
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder
from penstock.gateway.stream.sse import event
from penstock.producer.openai.json_parts import Text, json_parts
from penstock.queue.packed_result import PackedResult
from penstock.queue.task_output import PackedOutput

VALUES_PER_PART = 512
"""Tokens that are rendered at once, which takes less than 0.1 ms."""


class _TaskEncoder(WholeEncoder):
    """Encodes the output of a request's only job."""

    def head(self) -> bytes:
        """Return nothing: the output is the whole answer."""
        return b""

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the parts of the answer."""
        if result.output is None:
            raise InvariantError(f"the result of job {result.job_id} has no output")
        return self._parts(result.output)

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return nothing."""
        return b""

    @abstractmethod
    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
        """Yield the parts of the answer."""


class _TokenizeEncoder(_TaskEncoder):
    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
        yield b'{"count":%d,"max_model_len":%d,"tokens":' % (output.num_tokens, output.max_model_len)
        yield from _list_parts(output.token_ids())
        yield b',"token_strs":'
        if output.has_strs:
            yield from _list_parts(output.token_strs())
        else:
            yield b"null"
        yield b"}"


class _DetokenizeEncoder(_TaskEncoder):
    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
        return json_parts({"prompt": Text(output.text_parts)})


def _list_parts(values: Iterator[int] | Iterator[str]) -> Iterator[bytes]:
    """Yield a JSON array in parts."""
    yield b"["
    is_first = True
    while batch := list(islice(values, VALUES_PER_PART)):
        yield (b"" if is_first else b",") + to_json(batch)[1:-1]
        is_first = False
    yield b"]"


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
