"""Bodies of text-embeddings-inference's routes: `/embed`, `/predict`, `/similarity` and `POST /`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import (
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from penstock.contract.fields import Whole, Wire, only
from penstock.contract.tasks import MAX_DIMENSIONS, Classify, Embed, PromptName, Score, Task, TruncationSide
from penstock.gateway.apis.tasks.schemas import FORM, TeiFields, TextBody, in_lower_case
from penstock.producer.openai.bodies import prompts_of
from penstock.producer.openai.embeddings import MAX_INPUTS, EmbedFields, Inputs
from penstock.producer.text_bodies import FIRST_PROMPT

_EXAMPLE: JsonDict = {"inputs": ["Once upon a time", "Long ago"]}


class _EmbedFields(TeiFields, EmbedFields):
    """The fields of texts to embed."""

    normalize: bool | None = None
    """Whether vectors have length 1; only encoders may leave it out. Default: true."""
    dimensions: Annotated[Whole, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Keep only the first dimensions, and normalize again."""

    def embed(self) -> Embed:
        """Return the embedding of each text."""
        told = {"dimensions": self.dimensions, "normalize": self.normalize is not False}
        return super().embed().model_copy(update=told)


class EmbedRequest(TextBody, _EmbedFields):
    """Body of `POST /embed`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]}, use_attribute_docstrings=True)

    inputs: Inputs
    """A text, a list of token ids, or a list of either."""

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "inputs"}

    def prompts(self) -> list[str | list[int]]:
        """Return the texts."""
        return [*self.inputs]

    def task(self) -> Embed:
        """Return what a job does with each text."""
        return self.embed()


@dataclass(frozen=True, slots=True)
class PredictInputs:
    """Texts to label."""

    texts: tuple[str, ...]
    is_one: bool
    """Whether the body has one text, and no list of them."""


def _predict_inputs(value: object) -> PredictInputs:
    """Return the texts of a field that holds one text, or a list of lists with one text each."""
    if isinstance(value, str):
        return PredictInputs((value,), is_one=True)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        raise PydanticCustomError("texts", "must be a text, or a list of 1 to {limit} lists", {"limit": MAX_INPUTS})
    if all(isinstance(one, str) for one in value):
        if len(value) == 1:
            return PredictInputs((value[0],), is_one=True)
        message = "a list of texts is a pair, which /score and /rerank take; send each text in a list of its own"
        raise PydanticCustomError("pairs", message)
    for at, one in enumerate(value):
        if not (isinstance(one, list) and len(one) == 1 and isinstance(one[0], str)):
            raise PydanticCustomError("texts", "item {at} must be a list with one text", {"at": at})
    return PredictInputs(tuple(one[0] for one in value), is_one=False)


class HubParameters(Wire):
    """The parameters of the Hub's clients, where they put them into an object."""

    truncate: bool | None = None
    truncation_direction: Annotated[TruncationSide | None, BeforeValidator(in_lower_case)] = None
    prompt_name: PromptName | None = None
    top_k: Annotated[Whole, Field(ge=1)] | None = None
    """Only that many of the best labels."""
    function_to_apply: Annotated[Any, only(None)] = None

    def told(self) -> dict[str, Any]:
        """Return the fields that a body has beside it, too."""
        return self.model_dump(exclude_none=True, exclude={"top_k", "function_to_apply"})


_PredictJson: TypeAlias = str | list[str] | list[list[str]]


class PredictRequest(TextBody, TeiFields):
    """Body of `POST /predict`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": [["A lovely film"], ["A dull one"]]}]}, use_attribute_docstrings=True
    )

    inputs: Annotated[PredictInputs, PlainValidator(_predict_inputs, json_schema_input_type=_PredictJson)]
    """A text, or a list with a list of one text for each."""
    raw_scores: bool | None = None
    """Return the model's numbers (logits) as they are. Default: false."""
    parameters: HubParameters | None = None
    """`top_k`, `truncate` and `truncation_direction`, as the Hub's clients send them. The answer is then nested."""

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "inputs"}

    def prompts(self) -> list[str]:
        """Return the texts."""
        return [*self.inputs.texts]

    def task(self) -> Classify:
        """Return what a job does with each text."""
        told = {} if self.parameters is None else self.parameters.told()
        return Classify(raw=bool(self.raw_scores), **self.model_copy(update=told).cut())

    def options(self) -> dict[str, Any]:
        """Return whether the answer is that of one text, and how many labels it has."""
        top_k = None if self.parameters is None else self.parameters.top_k
        return {"is_one": self.inputs.is_one and self.parameters is None, "top_k": top_k}


class ComparedSentences(Wire):
    """A sentence, and those that are compared with it."""

    source_sentence: str
    sentences: Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_INPUTS - 1)]


_NAMES_OF_SENTENCES = {"prompt": "inputs.sentences", FIRST_PROMPT: "inputs.source_sentence"}


class SimilarityRequest(TextBody, _EmbedFields):
    """Body of `POST /similarity`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": {"source_sentence": "A cat", "sentences": ["A dog", "Rain"]}}]},
        use_attribute_docstrings=True,
    )

    inputs: ComparedSentences
    """A sentence, and those that are compared with it."""
    parameters: HubParameters | None = None
    """`truncate`, `truncation_direction` and `prompt_name`, which may also stand beside it."""

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return _NAMES_OF_SENTENCES

    def prompts(self) -> list[str]:
        """Return the sentence, then the others."""
        return [self.inputs.source_sentence, *self.inputs.sentences]

    def task(self) -> Embed:
        """Return what a job does with each sentence."""
        told = {} if self.parameters is None else self.parameters.told()
        return self.model_copy(update=told).embed()


_RootInputs: TypeAlias = list[str | list[int]] | ComparedSentences
_RootJson: TypeAlias = str | list[str] | list[int] | list[list[int]] | ComparedSentences


def _root_inputs(value: object) -> _RootInputs | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        return prompts_of(value, MAX_INPUTS)
    try:
        return ComparedSentences.model_validate(value)
    except ValidationError:
        message = "as an object, it must have a text as source_sentence, and 1 to {limit} texts as sentences"
        raise PydanticCustomError("sentences", message, {"limit": MAX_INPUTS - 1}) from None


class RootRequest(TextBody, _EmbedFields):
    """Body of `POST /`: of `/embed`, `/predict`, `/similarity` or `/rerank`, told apart by its fields and the model."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]}, use_attribute_docstrings=True)

    inputs: Annotated[_RootInputs | None, PlainValidator(_root_inputs, json_schema_input_type=_RootJson | None)] = None
    """Texts to embed or to label, or a sentence with those that are compared with it."""
    query: str | None = None
    """The text for which `texts` are ordered."""
    texts: Annotated[
        list[str] | None, FailFast(), Field(min_length=1, max_length=MAX_INPUTS - 1, validate_default=True)
    ] = None
    raw_scores: bool | None = None
    """Return the model's numbers (logits) as they are. Default: false."""
    return_text: bool | None = None
    """Return the ordered texts too. Default: false."""
    parameters: HubParameters | None = None
    """`truncate`, `truncation_direction` and `prompt_name`, which may also stand beside it."""

    @field_validator("texts")
    @classmethod
    def _one_kind(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        if "inputs" in info.data and "query" in info.data:
            told = [info.data["inputs"] is not None, info.data["query"] is not None, value is not None]
            if told not in ([True, False, False], [False, True, True]):
                raise PydanticCustomError("one_kind", "send either inputs, or query and texts")
        return value

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        if self.texts is not None:
            return {"prompt": "texts", FIRST_PROMPT: "query"}
        return _NAMES_OF_SENTENCES if isinstance(self.inputs, ComparedSentences) else {"prompt": "inputs"}

    def prompts(self) -> list[str | list[int]]:
        """Return the texts."""
        if self.texts is not None:
            return [self.query or "", *self.texts]
        if isinstance(self.inputs, ComparedSentences):
            return [self.inputs.source_sentence, *self.inputs.sentences]
        return [*(self.inputs or [])]

    def _told(self) -> RootRequest:
        told = {} if self.parameters is None else self.parameters.told()
        return self.model_copy(update=told)

    def task(self) -> Task:
        """Return what a job does with each text, or with each pair."""
        told = self._told()
        return told.embed() if self.texts is None else Score(texts=("",), raw=bool(self.raw_scores), **told.cut())

    def other_tasks(self) -> list[Task]:
        """Return what it does for a model that cannot do that: labels in place of embeddings."""
        told = self._told()
        if self.texts is not None:
            return [told.embed()]
        if isinstance(self.inputs, ComparedSentences):
            return []
        return [Classify(raw=bool(self.raw_scores), **told.cut())]

    def options(self) -> dict[str, Any]:
        """Return the options of the answer."""
        if self.texts is not None:
            return {FORM: "rerank", "top_n": len(self.texts), "has_documents": bool(self.return_text)}
        top_k = {"top_k": None if self.parameters is None else self.parameters.top_k}
        return {FORM: "similarity" if isinstance(self.inputs, ComparedSentences) else "rows", "is_one": False, **top_k}
