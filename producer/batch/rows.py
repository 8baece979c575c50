"""The bodies of rows: those of their endpoints over HTTP, without what a row cannot say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field

from penstock.contract.errors import RequestError
from penstock.contract.fields import BATCH_ROWS, Wire, given_options, only, with_option_fields
from penstock.contract.job import QueueFields, QueueOptions
from penstock.producer.anthropic.bodies import MessageBody
from penstock.producer.openai.bodies import ChatBody, CompletionBody
from penstock.producer.openai.embeddings import EmbeddingFields
from penstock.producer.responses.body import ResponseFields
from penstock.producer.responses.items import messages_of

if TYPE_CHECKING:
    _Queued = Wire
else:
    _Queued = with_option_fields(Wire, BATCH_ROWS, QueueFields)


class QueuedRow(_Queued):
    """Fields of a row beside those of its endpoint. A row cannot stream and cannot choose its priority class.

    Durations count from the submission of the row.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: Annotated[Any, only(None, False)] = None
    service_tier: Annotated[Any, only(None, "auto", "default", "flex")] = None
    # The jobs of rows are background work, which waits for as long as it takes and has no reader.
    max_wait_s: Annotated[Any, only(None)] = None
    return_progress: Annotated[Any, only(None, False)] = None

    @property
    def asked_class(self) -> None:
        """The class that the body asks for: none, because rows are work of the class batch."""
        return None

    def queueing(self) -> QueueOptions:
        """Return how to queue the row's jobs. Raises pydantic's ValidationError."""
        given = given_options(self, QueueFields, BATCH_ROWS)
        QueueFields.model_validate(given)
        return cast(QueueOptions, given)


class ChatRow(QueuedRow, ChatBody):
    """A body of `/v1/chat/completions`."""

    stream_options: Annotated[Any, only(None)] = None


class CompletionRow(QueuedRow, CompletionBody):
    """A body of `/v1/completions`."""

    stream_options: Annotated[Any, only(None)] = None


class MessageRow(MessageBody, QueuedRow):
    """A body of `/v1/messages`."""

    stream: Annotated[Any, only(None, False)] = None


class EmbeddingRow(QueuedRow, EmbeddingFields):
    """A body of `/v1/embeddings`."""

    channel: Annotated[Any, only(None, False)] = None


class ResponseRow(QueuedRow, ResponseFields):
    """A body of `/v1/responses` whose response is not stored, so it neither continues one nor is continued."""

    store: Annotated[Any, only(None, False)] = None
    background: Annotated[Any, only(None, False)] = None
    previous_response_id: Annotated[Any, only(None)] = None
    stream_options: Annotated[Any, only(None)] = None

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return a list with the conversation. Raises RequestError for items that stand for stored ones."""
        found = messages_of(self.input)
        if found.references or found.seals:
            message = "input: a row cannot have items of type item_reference or compaction: they stand for stored ones"
            raise RequestError(message, code="unsupported_value", param="input")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [system + found.messages]

    def options(self) -> dict[str, Any]:
        """Return how to show the response. It ran as work of the class batch."""
        echo = self.echo() | {"store": False, "service_tier": "flex"}
        return {"echo": json.dumps(echo).encode(), "called": self.called()}
