"""Answers of jobs with a task: one JSON object, never a stream."""

from __future__ import annotations

from collections.abc import Callable

from penstock.contract.errors import InvariantError, PenstockError
from penstock.gateway.openai.errors import error_body
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder
from penstock.gateway.stream.sse import event


class TaskDialect(Dialect):
    """Answers with a task's output. Errors have OpenAI's shape."""

    parses_text = False

    def __init__(self, encoder: Callable[[AnswerHead], WholeEncoder], *, shows_prompts: bool = False) -> None:
        """`encoder` returns the encoder of one answer. `shows_prompts`: whether answers may contain the prompts."""
        self._encoder = encoder
        self.shows_prompts = shows_prompts

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Raise InvariantError, because no body of these routes asks for a stream."""
        raise InvariantError("a task has no stream")

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of the answer."""
        return self._encoder(head)

    def error_event(self, error: PenstockError) -> bytes:
        """Return the error as an event."""
        return event(error_body(error))
