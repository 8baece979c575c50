"""Schemas of HTTP request bodies: the fields of OpenAI's bodies plus model, streaming and priority."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from penstock.contract.priority import ClassName
from penstock.gateway.route_doc import EXAMPLE_MODEL
from penstock.producer.openai.bodies import ChatBody, CompletionBody
from penstock.producer.openai.fields import Wire, only

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
    include_obfuscation: Annotated[Any, only(None, False)] = None


class _HttpFields(Wire):
    """Fields of an HTTP body that a row of a batch file lacks or restricts."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: ClassName | None = None

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("unsupported_value", "allowed only when stream is true")
        return value

    def options(self) -> dict[str, Any]:
        """Return the options of the answer that no other API has."""
        return self.stream_options.model_dump(exclude_none=True) if self.stream_options is not None else {}


class ChatRequest(ChatBody, _HttpFields):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_CHAT_EXAMPLE]})


class CompletionRequest(CompletionBody, _HttpFields):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_COMPLETION_EXAMPLE]})
