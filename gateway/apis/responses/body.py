"""Schemas of the bodies of `POST /v1/responses` and of `POST /v1/responses/compact`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.fields import COMPACT, NO_EFFECT, RESPONSES, Endpoint, Wire, only, with_option_fields
from penstock.contract.job import QueueFields
from penstock.contract.priority import ClassName
from penstock.contract.sampling import SamplingParams
from penstock.contract.tools import NO_TOOLS, ToolUse
from penstock.gateway.request.bodies import BodyOfJob
from penstock.gateway.request.generation import QueuedBody
from penstock.producer.openai.bodies import CLASS_OF_TIER, effort_variables
from penstock.producer.responses.body import AnyResponseFields, ResponseFields, conversation_options
from penstock.producer.responses.compaction import MAX_SUMMARY_TOKENS, MIN_THRESHOLD, asking
from penstock.producer.responses.conversation import messages_of
from penstock.producer.responses.items import AnyItem, items_or_none


class _QueuedBody(AnyResponseFields, QueuedBody):
    """What both bodies say of the queue."""

    @property
    def asked_class(self) -> ClassName | None:
        """The class that the body asks for: the one that it names, or else the one that the tier stands for."""
        return self.priority or CLASS_OF_TIER.get(self.service_tier or "")


if TYPE_CHECKING:
    _QueuedResponse = _QueuedBody
    _QueuedCompact = _QueuedBody
else:
    _QueuedResponse = with_option_fields(_QueuedBody, RESPONSES, QueueFields)
    _QueuedCompact = with_option_fields(_QueuedBody, COMPACT, QueueFields)


class _ContextEntry(Wire):
    """What is done with a conversation that has become long."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=MIN_THRESHOLD)] | None = None
    """Tokens of the prompt from which on the conversation is shortened."""


class ResponseBody(ResponseFields, _QueuedResponse):
    """Body of `POST /v1/responses`."""

    endpoint: ClassVar[Endpoint] = RESPONSES
    progress_needs: ClassVar[tuple[str, ...]] = ("stream", "background")

    truncation: Literal["auto", "disabled"] | None = None
    context_management: Annotated[list[_ContextEntry] | None, FailFast(), Field(max_length=1)] = None

    def options(self) -> dict[str, Any]:
        """Return what only this API needs. A threshold of 0 is the default."""
        entry = next(iter(self.context_management or ()), None)
        return super().options() | {"compact_threshold": None if entry is None else entry.compact_threshold or 0}


class ResponseOfJob(BodyOfJob, ResponseBody):
    """A response that a job holds. It is not stored: the job alone keeps its result."""

    background: Annotated[Any, only(None, False)] = None
    store: Annotated[Any, only(None, False)] = None
    previous_response_id: Annotated[Any, only(None)] = None
    # A job is queued as it is; only this API's route counts tokens first.
    truncation: Annotated[Any, only(None, "disabled")] = None
    context_management: Annotated[Any, only(None)] = None

    def options(self) -> dict[str, Any]:
        """Return what is needed to build the conversation. `background` is an option of the job."""
        return {name: value for name, value in super().options().items() if name != "background"}


class CompactBody(_QueuedCompact):
    """Body of `POST /v1/responses/compact`. Fields without a comment are those of OpenAI's API and of Codex CLI."""

    endpoint: ClassVar[Endpoint] = COMPACT

    input: Annotated[list[AnyItem], PlainValidator(items_or_none), Field(default_factory=list)]
    # They shape an answer, and the summary has a form of its own.
    tools: Annotated[list[Any] | None, NO_EFFECT] = None
    parallel_tool_calls: Annotated[bool | None, NO_EFFECT] = None
    reasoning: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    text: Annotated[dict[str, Any] | None, NO_EFFECT] = None

    stream: ClassVar[bool] = False

    @model_validator(mode="after")
    def _has_a_conversation(self) -> Self:
        if not self.input and self.previous_response_id is None:
            raise PydanticCustomError("no_conversation", "send input, previous_response_id, or both")
        return self

    @property
    def dropped(self) -> list[str]:
        """The names of the items that are ignored, for a header of the answer."""
        return list(dict.fromkeys(name for item in self.input for name in item.ignored))

    @property
    def template_kwargs(self) -> str:
        """The variables for the chat template as JSON text. The summary is written without reasoning, if possible."""
        return json.dumps(effort_variables("none"))

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return a list with the messages of the input, and the request for the summary as the last one."""
        return [asking(messages_of(self.input).messages)]

    def tool_use(self) -> ToolUse:
        """Return that the model may call nothing."""
        return NO_TOOLS

    def params(self) -> SamplingParams:
        """Return the sampling options of the summary. Raises pydantic's ValidationError."""
        return SamplingParams(max_tokens=MAX_SUMMARY_TOKENS, cache_salt=self.cache_salt)

    def options(self) -> dict[str, Any]:
        """Return what only this API needs: the rest of the conversation, and the messages that the answer keeps."""
        kept = [item for item in self.input if item.is_of_user]
        return {
            **conversation_options(self, messages_of(self.input)),
            "kept": [[item.id or "", json.dumps(item.stored(), ensure_ascii=False)] for item in kept],
        }
