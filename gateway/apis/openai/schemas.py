"""Schemas of HTTP request bodies: the fields of OpenAI's bodies plus model, streaming and priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from penstock.contract.fields import NO_EFFECT, OPENAI, WRONG_MEMBER, Endpoint, Wire, with_option_fields
from penstock.contract.job import QueueFields
from penstock.contract.priority import ClassName
from penstock.gateway.request.bodies import BodyOfJob, class_of
from penstock.gateway.request.generation import QueuedBody
from penstock.gateway.route_doc import EXAMPLE_MODEL
from penstock.producer.openai.bodies import CLASS_OF_TIER, ChatBody, CompletionBody, GenerationBody

_CHAT_EXAMPLE: JsonDict = {
    "model": EXAMPLE_MODEL,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_completion_tokens": 32,
    "stream": True,
}
_COMPLETION_EXAMPLE: JsonDict = {"model": EXAMPLE_MODEL, "prompt": "Once upon a time", "max_tokens": 16}


class StreamOptions(Wire):
    """OpenAI's `stream_options`, which are valid only in a streaming request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether each event has the usage so far, as in vLLM."""
    include_event_ids: bool | None = None
    """Whether each event has an id, after which the stream can be resumed."""
    include_obfuscation: Annotated[bool | None, NO_EFFECT] = None


if TYPE_CHECKING:
    _QueuedBody = QueuedBody
else:
    _QueuedBody = with_option_fields(QueuedBody, OPENAI, QueueFields)


class _HttpFields(GenerationBody, _QueuedBody):
    """Fields of an HTTP body that a row of a batch file lacks or restricts."""

    endpoint: ClassVar[Endpoint] = OPENAI
    progress_needs: ClassVar[tuple[str, ...]] = ("stream",)

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[ClassName | None, BeforeValidator(class_of)] = None

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, value: object, info: ValidationInfo) -> object:
        if value and not info.data.get("stream"):
            raise PydanticCustomError("unsupported_value", "allowed only when stream is true")
        return value

    @model_validator(mode="after")
    def _of_one_tier(self) -> Self:
        if self.priority is not None and CLASS_OF_TIER.get(self.service_tier or "") not in (None, self.priority):
            message = "conflicts with service_tier; send one of them"
            raise PydanticCustomError("unsupported_value", message, {WRONG_MEMBER: "priority"})
        return self

    @property
    def asked_class(self) -> ClassName | None:
        """The class that the body asks for."""
        return self.priority or CLASS_OF_TIER.get(self.service_tier or "")

    def options(self) -> dict[str, Any]:
        """Return the options of the answer that no other API has."""
        options = {} if self.stream_options is None else self.stream_options.model_dump(exclude_none=True)
        if self.service_tier is not None:
            options["service_tier"] = self.service_tier if self.service_tier in CLASS_OF_TIER else "default"
        return options


class ChatRequest(ChatBody, _HttpFields):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_CHAT_EXAMPLE]})


class CompletionRequest(CompletionBody, _HttpFields):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_COMPLETION_EXAMPLE]})


class ChatOfJob(BodyOfJob, ChatRequest):
    """A chat that a job holds."""


class CompletionOfJob(BodyOfJob, CompletionRequest):
    """A completion that a job holds."""
