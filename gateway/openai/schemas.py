"""Schemas of HTTP request bodies: the fields of OpenAI's bodies plus model, streaming and priority."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from penstock.contract.priority import ClassName
from penstock.gateway.route_doc import EXAMPLE_MODEL
from penstock.producer.openai.bodies import ChatBody, CompletionBody
from penstock.producer.openai.fields import NO_EFFECT, Wire
from penstock.producer.openai.generation_body import GenerationBody

_CLASS_OF_TIER: dict[str, ClassName] = {"flex": "batch", "priority": "interactive"}
"""OpenAI's service tiers that ask for a class. The other tiers ask for the caller's usual class."""


def class_of(value: object) -> object:
    """Return the class for vLLM's integer priority, of which a lower one is more urgent and 0 is the default."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not isinstance(value, int | float) or isinstance(value, bool) or not is_whole:
        return value
    return "interactive" if value < 0 else "batch" if value > 0 else "standard"


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


class _HttpFields(GenerationBody):
    """Fields of an HTTP body that a row of a batch file lacks or restricts."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[ClassName | None, BeforeValidator(class_of)] = None
    deadline_s: float | None = None
    not_before_s: float | None = None
    return_progress: bool | None = None
    """Whether events report queue position and prompt progress before the first tokens, as llama.cpp's server does."""

    @field_validator("stream_options", "return_progress")
    @classmethod
    def _needs_stream(cls, value: object, info: ValidationInfo) -> object:
        if value and not info.data.get("stream"):
            raise PydanticCustomError("unsupported_value", "allowed only when stream is true")
        return value

    @field_validator("priority")
    @classmethod
    def _of_one_tier(cls, value: ClassName | None, info: ValidationInfo) -> ClassName | None:
        asked = _CLASS_OF_TIER.get(info.data.get("service_tier") or "")
        if value is not None and asked not in (None, value):
            raise PydanticCustomError("unsupported_value", "conflicts with service_tier; send one of them")
        return value

    @property
    def asked_class(self) -> ClassName | None:
        """The class that the body asks for."""
        return self.priority or _CLASS_OF_TIER.get(self.service_tier or "")

    def options(self) -> dict[str, Any]:
        """Return the times of the job, and the options of the answer that no other API has."""
        options: dict[str, Any] = {"deadline_s": self.deadline_s, "not_before_s": self.not_before_s}
        options["return_progress"] = bool(self.return_progress)
        if self.stream_options is not None:
            options |= self.stream_options.model_dump(exclude_none=True)
        if self.service_tier is not None:
            options["service_tier"] = self.service_tier if self.service_tier in _CLASS_OF_TIER else "default"
        return options


class ChatRequest(ChatBody, _HttpFields):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_CHAT_EXAMPLE]})


class CompletionRequest(CompletionBody, _HttpFields):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_COMPLETION_EXAMPLE]})
