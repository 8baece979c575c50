"""Bodies of requests for tasks: `/tokenize`, `/detokenize`, `/v1/embeddings`, `/rerank`, `/score` and `/classify`."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from penstock.contract.fields import EMBEDDINGS, Endpoint, Whole, Wire, only, with_option_fields
from penstock.contract.job import MAX_MESSAGES, QueueFields, QueueOptions, TokenId
from penstock.contract.priority import ClassName
from penstock.contract.tasks import MAX_TASK_TOKENS, Classify, Detokenize, Task, Tokenize
from penstock.contract.tools import MAX_TOOLS, NO_TOOLS, ToolUse
from penstock.gateway.request.bodies import class_of
from penstock.gateway.request.generation import FIRST_PROMPT, PAIRED_PROMPT, QueuedBody
from penstock.gateway.route_doc import EXAMPLE_MODEL
from penstock.producer.client.request import Prompt
from penstock.producer.openai.embeddings import MAX_INPUTS, EmbeddingFields, EmbedFields, Inputs, TaskFields, TextFields
from penstock.producer.openai.messages import ChatMessage, OfferedTool, named_calls


class TaskBody(TaskFields):
    """The base of bodies whose jobs need no engine."""

    stream: ClassVar[bool] = False

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

    def queueing(self) -> QueueOptions:
        """Return that the jobs are queued as the caller's usually are."""
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
        BeforeValidator(named_calls),
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


if TYPE_CHECKING:
    _QueuedBody = QueuedBody
else:
    _QueuedBody = with_option_fields(QueuedBody, EMBEDDINGS, QueueFields)


class _EmbeddingBody(_QueuedBody, EmbedFields):
    """What all bodies with texts to embed say over HTTP."""

    endpoint: ClassVar[Endpoint] = EMBEDDINGS
    stream: ClassVar[bool] = False

    priority: Annotated[ClassName | None, BeforeValidator(class_of)] = None


class EmbeddingRequest(_EmbeddingBody, EmbeddingFields):
    """Body of `POST /v1/embeddings`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "input": ["Once upon a time", "Long ago"]}]}
    )


class RerankDocument(Wire):
    """A document given as an object."""

    text: str


def _texts_of(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_INPUTS), BeforeValidator(_texts_of)]


class RerankRequest(_EmbeddingBody):
    """Body of `POST /rerank`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": EXAMPLE_MODEL, "query": "A story", "documents": ["Long ago", "One, two, three"]}]
        },
        use_attribute_docstrings=True,
    )

    query: str
    documents: Annotated[list[str | RerankDocument], FailFast(), Field(min_length=1, max_length=MAX_INPUTS - 1)]
    top_n: Annotated[Whole, Field(ge=0)] | None = None
    """Return only that many of the best documents. Default, and 0: all."""
    return_documents: bool | None = None
    """Return the documents' texts too. Default: true."""
    rank_fields: Annotated[Any, only(None)] = None
    max_chunks_per_doc: Annotated[Any, only(None)] = None
    max_tokens_per_doc: Annotated[Any, only(None)] = None

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "documents", FIRST_PROMPT: "query"}

    def prompts(self) -> list[Prompt]:
        """Return the query, then the documents."""
        return [self.query, *(one if isinstance(one, str) else one.text for one in self.documents)]

    def options(self) -> dict[str, Any]:
        """Return the options of the answer."""
        has_documents = self.return_documents is not False
        return {"top_n": self.top_n or len(self.documents), "has_documents": has_documents}


class ScoreRequest(_EmbeddingBody):
    """Body of `POST /score`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "text_1": "A story", "text_2": ["Long ago", "42"]}]},
        use_attribute_docstrings=True,
        populate_by_name=True,
    )

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    """One text, which is compared with each of the others, or as many texts as `text_2` has."""
    text_2: Annotated[Texts, Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))]

    @field_validator("text_2")
    @classmethod
    def _pairs(cls, value: list[str], info: ValidationInfo) -> list[str]:
        num_first = len(info.data.get("text_1", ()))
        num_texts = len(value) + (len(value) if num_first > 1 else 1)
        if num_first > 1 and num_first != len(value):
            raise PydanticCustomError("pairs", "must have as many texts as text_1, or text_1 must be one text")
        if num_texts > MAX_INPUTS:
            raise PydanticCustomError("too_many", "the texts must be at most {limit} in all", {"limit": MAX_INPUTS})
        return value

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "text_2", (FIRST_PROMPT if len(self.text_1) == 1 else PAIRED_PROMPT): "text_1"}

    def prompts(self) -> list[Prompt]:
        """Return the text that all others are compared with and these, or one pair after another."""
        if len(self.text_1) == 1:
            return [*self.text_1, *self.text_2]
        return [text for pair in zip(self.text_1, self.text_2, strict=True) for text in pair]

    def options(self) -> dict[str, Any]:
        """Return whether the texts come in pairs."""
        return {"pairs": len(self.text_1) > 1}


class ClassifyRequest(_QueuedBody, TextFields):
    """Body of `POST /classify`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "input": ["A lovely film", "A dull one"]}]},
        use_attribute_docstrings=True,
        populate_by_name=True,
    )
    endpoint: ClassVar[Endpoint] = EMBEDDINGS
    stream: ClassVar[bool] = False

    priority: Annotated[ClassName | None, BeforeValidator(class_of)] = None
    input: Inputs
    """A text, a list of token ids, or a list of either."""
    use_activation: Annotated[bool | None, Field(validation_alias=AliasChoices("use_activation", "activation"))] = None
    """Return probabilities; false: the model's numbers (logits) as they are. Default: true."""

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "input"}

    def prompts(self) -> list[str | list[int]]:
        """Return the texts."""
        return [*self.input]

    def task(self) -> Classify:
        """Return what a job does with each text."""
        return Classify(raw=self.use_activation is False, truncate_prompt_tokens=self.truncate_prompt_tokens)
