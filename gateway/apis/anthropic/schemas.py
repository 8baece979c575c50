"""Schemas of the bodies of `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's fields, and the queue's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from penstock.contract.fields import COUNT_TOKENS, MESSAGES, NO_EFFECT, Endpoint, with_option_fields
from penstock.contract.job import QueueFields
from penstock.contract.sampling import SamplingParams
from penstock.gateway.request.generation import QueuedBody
from penstock.producer.anthropic.bodies import ConversationBody, MessageBody, OutputConfig

if TYPE_CHECKING:
    _Queued = QueuedBody
else:
    _Queued = with_option_fields(QueuedBody, MESSAGES, QueueFields)


class MessagesRequest(MessageBody, _Queued):
    """Body of `POST /v1/messages`."""

    endpoint: ClassVar[Endpoint] = MESSAGES


class CountTokensRequest(ConversationBody, QueuedBody):
    """Body of `POST /v1/messages/count_tokens`."""

    endpoint: ClassVar[Endpoint] = COUNT_TOKENS

    output_config: Annotated[OutputConfig | None, NO_EFFECT] = None

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream, which it never is."""
        return False

    def params(self) -> SamplingParams:
        """Return the sampling options of a job that ends after its prompt."""
        return SamplingParams(max_tokens=1, temperature=0.0, cache_salt=self.cache_salt)

    def options(self) -> dict[str, Any]:
        """Return that the answer has no options."""
        return {}
