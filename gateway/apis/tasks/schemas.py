"""Bodies of requests for tasks: `/tokenize`, `/detokenize`, `/v1/embeddings`, `/rerank`, `/score` and `/classify`."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from penstock.contract.fields import EMBEDDINGS, Endpoint, Whole, only, with_option_fields
from penstock.contract.job import MAX_MESSAGES, QueueFields, QueueOptions, TokenId
from penstock.contract.priority import ClassName
from penstock.contract.tasks import (
    MAX_DIMENSIONS,
    MAX_TASK_TOKENS,
    WHOLE_CONTEXT,
    Classify,
    Detokenize,
    Embed,
    Score,
    Task,
    Tokenize,
    TruncationSide,
)
from penstock.contract.tools import MAX_TOOLS, NO_TOOLS, ToolUse
from penstock.gateway.request.bodies import class_of
from penstock.gateway.request.generation import QueuedBody
from penstock.gateway.route_doc import EXAMPLE_MODEL
from penstock.producer.client.request import Prompt
from penstock.producer.openai.embeddings import MAX_INPUTS, EmbeddingFields, EmbedFields, Inputs, TaskFields, TextFields
from penstock.producer.openai.messages import ChatMessage, OfferedTool, named_calls
from penstock.producer.openai.scores import ClassifyFields, RerankDocument, RerankFields, ScoreFields, texts_of
from penstock.producer.text_bodies import FIRST_PROMPT

FORM = "form"
"""The option that names the shape of an answer, where a path has several."""


def in_lower_case(value: object) -> object:
    """Return a text in lower case: clients of text-embeddings-inference write `Left` or `left`."""
    return value.lower() if isinstance(value, str) else value


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
    """Body of `POST /tokenize`: a text (`prompt`), a chat (`messages`), or texts (`inputs`).

    The answer to `inputs` has the shape of text-embeddings-inference.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "prompt": "Once upon a time"}]},
        use_attribute_docstrings=True,
    )

    prompt: str | None = None
    inputs: Annotated[
        list[str] | None, FailFast(), Field(min_length=1, max_length=MAX_INPUTS), BeforeValidator(texts_of)
    ] = None
    """Texts, for an answer with the place of each token in its text."""
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
        if [value, info.data.get("prompt"), info.data.get("inputs")].count(None) != 2:
            raise PydanticCustomError("one_prompt", "send either prompt or messages, or inputs")
        return value

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        if self.inputs is not None:
            return {"prompt": "inputs"}
        return {} if self.messages is None else {"prompt": "messages"}

    def prompts(self) -> list[Prompt]:
        """Return the texts, or a list with the text or the chat."""
        if self.inputs is not None:
            return [*self.inputs]
        return [self.prompt or ""] if self.messages is None else [[message.message() for message in self.messages]]

    def tool_use(self) -> ToolUse:
        """Return the tools that the chat offers."""
        return ToolUse(json.dumps([tool.offer() for tool in self.tools])) if self.tools else NO_TOOLS

    def task(self) -> Task:
        """Return the task."""
        return Tokenize(
            add_special_tokens=self.add_special_tokens,
            add_generation_prompt=self.add_generation_prompt is not False,
            return_token_strs=bool(self.return_token_strs) or self.inputs is not None,
            return_spans=self.inputs is not None,
        )

    def options(self) -> dict[str, Any]:
        """Return the shape of the answer."""
        return {FORM: "tokenize" if self.inputs is None else "tei"}


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


class TextBody(_QueuedBody, TextFields):
    """What all bodies with texts that a model computes whole say over HTTP."""

    endpoint: ClassVar[Endpoint] = EMBEDDINGS
    stream: ClassVar[bool] = False

    priority: Annotated[ClassName | None, BeforeValidator(class_of)] = None


class _EmbeddingBody(TextBody, EmbedFields):
    """What all bodies with texts to embed say over HTTP."""


class EmbeddingRequest(_EmbeddingBody, EmbeddingFields):
    """Body of `POST /v1/embeddings`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "input": ["Once upon a time", "Long ago"]}]}
    )


class TeiFields(TextFields):
    """The names that text-embeddings-inference has for shortening a long text."""

    truncate: bool | None = None
    """Shorten a longer text to what the model takes. Default: false, so that it is refused."""
    truncation_direction: Annotated[TruncationSide | None, BeforeValidator(in_lower_case)] = None
    """The end of a text that is cut off: `Right` or `Left`. Default: `Right`."""

    def cut(self) -> dict[str, Any]:
        """Return the options of the task that say how to shorten a long text."""
        kept = super().cut()
        if self.truncate and kept["truncate_prompt_tokens"] is None:
            kept["truncate_prompt_tokens"] = WHOLE_CONTEXT
        if self.truncation_direction is not None:
            kept["truncation_side"] = self.truncation_direction
        elif self.truncate and kept["truncation_side"] is None:
            kept["truncation_side"] = "right"
        return kept


class RerankRequest(_EmbeddingBody, TeiFields, RerankFields):
    """Body of `POST /rerank`: with `documents`, or with `texts` in the shape of text-embeddings-inference."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": EXAMPLE_MODEL, "query": "A story", "documents": ["Long ago", "One, two, three"]}]
        },
        use_attribute_docstrings=True,
    )

    documents: Annotated[
        list[str | RerankDocument] | None, FailFast(), Field(min_length=1, max_length=MAX_INPUTS - 1)
    ] = None  # type: ignore[assignment]
    texts: Annotated[
        list[str] | None, FailFast(), Field(min_length=1, max_length=MAX_INPUTS - 1, validate_default=True)
    ] = None
    """The documents, for an answer in the shape of text-embeddings-inference. The fields below belong to it."""
    raw_scores: bool | None = None
    """Return the model's numbers (logits) as they are. Default: false, their sigmoid."""
    return_text: bool | None = None
    """Return the documents' texts too. Default: false."""

    @field_validator("texts")
    @classmethod
    def _one_list(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        if "documents" in info.data and (value is None) == (info.data["documents"] is None):
            raise PydanticCustomError("one_list", "send either documents or texts")
        return value

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return super().names() if self.texts is None else {"prompt": "texts", FIRST_PROMPT: "query"}

    def prompts(self) -> list[str]:
        """Return the query, then the documents."""
        return super().prompts() if self.texts is None else [self.query, *self.texts]

    def task(self) -> Score:
        """Return what a job does with each pair of texts."""
        raw = self.raw_scores if self.texts is None else bool(self.raw_scores)
        return super().task().model_copy(update={"raw": raw})

    def options(self) -> dict[str, Any]:
        """Return the options of the answer."""
        if self.texts is None:
            return {**super().options(), FORM: "rerank"}
        return {"top_n": self.top_n or len(self.texts), "has_documents": bool(self.return_text), FORM: "tei"}


class ScoreRequest(_EmbeddingBody, ScoreFields):
    """Body of `POST /score`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "text_1": "A story", "text_2": ["Long ago", "42"]}]}
    )


class ClassifyRequest(TextBody, ClassifyFields):
    """Body of `POST /classify`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "input": ["A lovely film", "A dull one"]}]}
    )


class PoolingRequest(TextBody, EmbedFields):
    """Body of `POST /pooling`: vectors, or the numbers of labels, as the model gives them."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": EXAMPLE_MODEL, "input": ["Once upon a time", "Long ago"]}]},
        use_attribute_docstrings=True,
        populate_by_name=True,
    )

    input: Inputs
    """A text, a list of token ids, or a list of either."""
    kind: Annotated[Literal["embed", "classify"] | None, Field(validation_alias=AliasChoices("kind", "task"))] = None
    """`embed` or `classify`. Default: what the model does. An output for each token is not supported."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` stands for the bytes of the numbers: float32, little-endian. Default: `float`."""
    dimensions: Annotated[Whole, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Keep only the first dimensions of vectors, and normalize again."""
    normalize: bool | None = None
    """Whether vectors have length 1; only encoders may leave it out. Default: as the model's files say."""
    use_activation: Annotated[bool | None, Field(validation_alias=AliasChoices("use_activation", "activation"))] = None
    """Return probabilities of labels; false: the model's numbers (logits) as they are. Default: true."""

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "input"}

    def prompts(self) -> list[str | list[int]]:
        """Return the texts."""
        return [*self.input]

    def _tasks(self) -> list[Embed | Classify]:
        told = {"dimensions": self.dimensions, "normalize": self.normalize}
        classify = Classify(raw=self.use_activation is False, **self.cut())
        tasks: list[Embed | Classify] = [self.embed().model_copy(update=told), classify]
        return [one for one in tasks if self.kind in (None, one.kind)]

    def task(self) -> Embed | Classify:
        """Return what the job does with each text."""
        return self._tasks()[0]

    def other_tasks(self) -> list[Embed | Classify]:
        """Return what it does for a model without embeddings."""
        return self._tasks()[1:]

    def options(self) -> dict[str, Any]:
        """Return the encoding of the answer."""
        return {"base64": self.encoding_format == "base64"}
