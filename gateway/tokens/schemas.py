"""Bodies of `POST /tokenize` and `POST /detokenize`, with vLLM's names."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from penstock.contract.job import MAX_MESSAGES, QueueOptions, SamplingParams, TokenId
from penstock.contract.priority import ClassName
from penstock.contract.tasks import MAX_TASK_TOKENS, Detokenize, Task, Tokenize
from penstock.contract.tools import MAX_TOOLS
from penstock.gateway.route_doc import EXAMPLE_MODEL
from penstock.producer.client.request import Prompt
from penstock.producer.openai.fields import Wire, only
from penstock.producer.openai.messages import NO_TOOLS, ChatMessage, OfferedTool, ToolUse, few_calls


class TaskBody(Wire):
    """The base of bodies that ask for a task."""

    template_kwargs: ClassVar[None] = None
    stream: ClassVar[bool] = False
    echoes: ClassVar[bool] = False

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The served model. It may be omitted if only one model is served."""
    cache_salt: Annotated[Any, only(None)] = None

    @property
    def asked_class(self) -> ClassName | None:
        """The class that the body asks for."""
        return None

    @abstractmethod
    def task(self) -> Task:
        """Return what the job does with the prompt."""

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """Return the request's prompts. Each becomes one job."""

    @abstractmethod
    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""

    def params(self) -> SamplingParams:
        """Return the default sampling options, because a task samples nothing."""
        return SamplingParams()

    def tool_use(self) -> ToolUse:
        """Return the tools that a chat offers."""
        return NO_TOOLS

    def queueing(self) -> QueueOptions:
        """Return that the jobs are queued as the caller's usually are."""
        return {}

    def options(self) -> dict[str, Any]:
        """Return that the answer has no options."""
        return {}


class TokenizeRequest(TaskBody):
    """Body of `POST /tokenize`: a text (`prompt`) or a chat (`messages`)."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "prompt": "Once upon a time"}]},
        use_attribute_docstrings=True,
    )

    prompt: str | None = None
    messages: Annotated[
        list[ChatMessage] | None,
        FailFast(),
        Field(min_length=1, max_length=MAX_MESSAGES, validate_default=True),
        BeforeValidator(few_calls),
    ] = None
    tools: Annotated[list[OfferedTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    add_special_tokens: bool | None = None
    """Add the special tokens that the model expects around a text. Default: true for a prompt, false for messages."""
    add_generation_prompt: bool | None = None
    """End a chat where the assistant's answer begins. Default: true."""
    return_token_strs: bool | None = None
    """Also return the tokens as the vocabulary spells them. Default: false."""

    continue_final_message: Annotated[Any, only(None, False)] = None
    chat_template: Annotated[Any, only(None)] = None
    chat_template_kwargs: Annotated[Any, only(None, {})] = None
    mm_processor_kwargs: Annotated[Any, only(None, {})] = None

    @field_validator("messages")
    @classmethod
    def _one_prompt(cls, value: list[ChatMessage] | None, info: ValidationInfo) -> list[ChatMessage] | None:
        if (value is None) == (info.data.get("prompt") is None):
            raise PydanticCustomError("one_prompt", "send either prompt or messages")
        return value

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {} if self.messages is None else {"prompt": "messages"}

    def prompts(self) -> list[Prompt]:
        """Return a list with the text or the chat."""
        return [self.prompt or ""] if self.messages is None else [[message.message() for message in self.messages]]

    def tool_use(self) -> ToolUse:
        """Return the tools that the chat offers."""
        return ToolUse(json.dumps([tool.offer() for tool in self.tools])) if self.tools else NO_TOOLS

    def task(self) -> Task:
        """Return the task."""
        return Tokenize(
            add_special_tokens=self.add_special_tokens,
            add_generation_prompt=self.add_generation_prompt is not False,
            return_token_strs=bool(self.return_token_strs),
        )


class DetokenizeRequest(TaskBody):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "tokens": [72, 105]}]})
    tokens: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TASK_TOKENS), FailFast()]

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "tokens"}

    def prompts(self) -> list[Prompt]:
        """Return a list with the token ids."""
        return [self.tokens]

    def task(self) -> Task:
        """Return the task."""
        return Detokenize()
