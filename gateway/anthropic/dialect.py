"""Anthropic's messages as a dialect of the gateway."""

from __future__ import annotations

from penstock.contract.errors import PenstockError, RequestError
from penstock.gateway.anthropic.encoder import MessageStreamEncoder, MessageWholeEncoder
from penstock.gateway.anthropic.errors import error_event
from penstock.gateway.anthropic.events import PING
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder


class MessagesDialect(Dialect):
    """Answers of `/v1/messages`."""

    keep_alive = PING

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Return the encoder of a streamed answer. Raises RequestError if the caller wants to resume a stream."""
        if head.cut_at is not None:
            message = "after: a stream of this API has no event ids; repeat the request with its Idempotency-Key"
            raise RequestError(message, param="after")
        return MessageStreamEncoder(head)

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of a whole answer."""
        return MessageWholeEncoder(head)

    def error_event(self, error: PenstockError) -> bytes:
        """Return the error as the last event of a stream."""
        return error_event(error)
