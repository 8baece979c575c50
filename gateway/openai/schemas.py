"""Bodies as they come over HTTP: what they say about the answer, who is asked, and how it is sent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from penstock.producer.openai.bodies import ChatBody, CompletionBody
from penstock.producer.openai.fields import Wire, only


class StreamOptions(Wire):
    """Options that only mean something while streaming."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(None, False)] = None


class _Asked(Wire):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("unsupported_value", "only allowed when stream is true")
        return value

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(ChatBody, _Asked):
    """Body of `POST /v1/chat/completions`."""


class CompletionRequest(CompletionBody, _Asked):
    """Body of `POST /v1/completions`."""
