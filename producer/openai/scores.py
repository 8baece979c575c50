"""The fields of bodies of `/v1/rerank`, `/v1/score` and `/v1/classify`, and the JSON of their answers in parts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, to_json

from penstock.contract.fields import WHOLE_NUMBER, Whole, Wire, only
from penstock.contract.tasks import Classify, Embed, Entity, Score, TextTokens
from penstock.producer.openai.embeddings import MAX_INPUTS, EmbedFields, Inputs, TextFields, numbers_of
from penstock.producer.openai.json_parts import Text, json_parts
from penstock.producer.text_bodies import FIRST_PROMPT, PAIRED_PROMPT


class RerankDocument(Wire):
    """A document given as an object."""

    text: str


def texts_of(value: object) -> object:
    """Return a list for a single text."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_INPUTS), BeforeValidator(texts_of)]
Documents = Annotated[list[str | RerankDocument], FailFast(), Field(min_length=1, max_length=MAX_INPUTS - 1)]


class ComparedFields(EmbedFields):
    """The fields that bodies share whose texts are compared: by scores of pairs, or else by their embeddings."""

    max_tokens_per_query: Annotated[TextTokens, WHOLE_NUMBER] | None = None
    """Keep only that many tokens of the query. Needs a model that scores pairs."""
    max_tokens_per_doc: Annotated[TextTokens, WHOLE_NUMBER] | None = None
    """Keep only that many tokens of each document. Needs a model that scores pairs."""

    def task(self) -> Score:
        """Return what a job does with each pair of texts."""
        limits = {"max_tokens_per_query": self.max_tokens_per_query, "max_tokens_per_doc": self.max_tokens_per_doc}
        return Score(texts=("",), **limits, **self.cut())

    def other_tasks(self) -> list[Embed]:
        """Return what a job does with each text if the model scores no pairs."""
        return [self.embed()]


class RerankFields(ComparedFields):
    """The fields of a `/v1/rerank` body."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    query: str
    documents: Documents
    top_n: Annotated[Whole, Field(ge=0)] | None = None
    """Return only that many of the best documents. Default, and 0: all."""
    return_documents: bool | None = None
    """Return the documents' texts too. Default: true."""
    rank_fields: Annotated[Any, only(None)] = None
    max_chunks_per_doc: Annotated[Any, only(None)] = None

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "documents", FIRST_PROMPT: "query"}

    def prompts(self) -> list[str]:
        """Return the query, then the documents."""
        return [self.query, *(one if isinstance(one, str) else one.text for one in self.documents)]

    def options(self) -> dict[str, Any]:
        """Return the options of the answer."""
        has_documents = self.return_documents is not False
        return {"top_n": self.top_n or len(self.documents), "has_documents": has_documents}


class ScoreFields(ComparedFields):
    """The fields of a `/v1/score` body."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

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

    def prompts(self) -> list[str]:
        """Return the text that all others are compared with and these, or one pair after another."""
        if len(self.text_1) == 1:
            return [*self.text_1, *self.text_2]
        return [text for pair in zip(self.text_1, self.text_2, strict=True) for text in pair]

    def options(self) -> dict[str, Any]:
        """Return whether the texts come in pairs."""
        return {"pairs": len(self.text_1) > 1}


class ClassifyFields(TextFields):
    """The fields of a `/v1/classify` body."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

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
        return Classify(raw=self.use_activation is False, **self.cut())


# The answers, which are those of Jina, Cohere and vLLM.


def list_head(job_id: str, created_s: int, model: str) -> bytes:
    """Return the part before the list of vLLM's answers."""
    return b'{"id":%b,"object":"list","created":%d,"model":%b,"data":[' % (to_json(job_id), created_s, to_json(model))


def rerank_head(job_id: str, model: str) -> bytes:
    """Return the part of the answer of `/v1/rerank` before its documents."""
    return b'{"id":%b,"model":%b,"results":[' % (to_json(job_id), to_json(model))


def best_first(scores: Sequence[float]) -> list[int]:
    """Return the indices of scores from the highest to the lowest; equal ones in their order."""
    return sorted(range(len(scores)), key=lambda at: -scores[at])


def ranked_parts(scores: Sequence[float], documents: Sequence[str] | None, top_n: int) -> Iterator[bytes]:
    """Yield the JSON of the best documents. `documents`: their texts, if the answer has them."""
    for place, at in enumerate(best_first(scores)[:top_n]):
        yield b'%b{"index":%d,' % (b"," if place else b"", at)
        if documents is not None:
            yield b'"document":'
            yield from json_parts({"text": Text(partial(_alone, documents[at]))})
            yield b","
        yield b'"relevance_score":%b}' % to_json(scores[at])


def _alone(text: str) -> tuple[str]:
    return (text,)


def score_part(at: int, score: float) -> bytes:
    """Return the JSON of one score of `/v1/score`."""
    return b'%b{"index":%d,"object":"score","score":%b}' % (b"," if at else b"", at, to_json(score))


def label_of(values: Sequence[float], labels: Sequence[str]) -> tuple[str, float]:
    """Return the label with the highest number, and that number."""
    best = max(range(len(values)), key=lambda at: values[at])
    return labels[best] if best < len(labels) else f"LABEL_{best}", values[best]


def label_parts(index: int, values: array[float], labels: Sequence[str]) -> Iterator[bytes]:
    """Yield the JSON of the labels of one text."""
    label, _ = label_of(values, labels)
    yield b'%b{"index":%d,"label":%b,"probs":' % (b"," if index else b"", index, to_json(label))
    yield from numbers_of(values)
    yield b',"num_classes":%d}' % len(values)


def shown_entity(one: Entity) -> dict[str, Any]:
    """Return the object of what a model found in a text, in the shape of transformers."""
    return {"entity_group": one.label, "score": one.score, "word": one.text, "start": one.start, "end": one.end}


def entity_part(index: int, entities: Sequence[dict[str, Any]], num_labels: int) -> bytes:
    """Return the JSON of what a model that labels tokens found in one text, in the shape of transformers."""
    head = b'%b{"index":%d,"num_classes":%d,"entities":' % (b"," if index else b"", index, num_labels)
    return head + to_json(entities) + b"}"
