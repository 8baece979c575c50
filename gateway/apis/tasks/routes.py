"""Routes of tasks, with their answers: tokens, embeddings, scores and labels of texts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.routing import BaseRoute, Route

from penstock.gateway.apis.tasks.encoders import ComparedEncoder, OneJobEncoder, text_of
from penstock.gateway.apis.tasks.schemas import (
    FORM,
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from penstock.gateway.apis.tasks.tei_routes import TEI_BODIES, TeiRerankEncoder, TeiTokenizeEncoder, tei_routes
from penstock.gateway.http.dialect import HttpDialect, JobBody, Services
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.stream.answer import Generate
from penstock.gateway.stream.dialect import AnswerHead, TaskDialect, WholeEncoder
from penstock.gateway.stream.rows import RowEncoder
from penstock.producer.openai.embeddings import embedding_parts, embeddings_head, vector_parts
from penstock.producer.openai.json_parts import Text, json_parts
from penstock.producer.openai.scores import entity_part, label_parts, ranked_parts, rerank_head, score_part
from penstock.producer.parsed_body import RequestBody
from penstock.queue.results import PackedOutput

# vLLM's answers of `/tokenize` and `/detokenize`, rendered in parts.

VALUES_PER_PART = 512
"""Tokens that are rendered at once, which takes less than 0.1 ms."""


def tokenize_encoder(head: AnswerHead) -> WholeEncoder:
    """Return the encoder of an answer of `/tokenize`: the shape is that of the body."""
    return TeiTokenizeEncoder(head) if head.options[FORM] == "tei" else TokenizeEncoder(head)


def rerank_encoder(head: AnswerHead) -> WholeEncoder:
    """Return the encoder of an answer of `/rerank`: the shape is that of the body."""
    return TeiRerankEncoder(head) if head.options[FORM] == "tei" else RerankEncoder(head)


class TokenizeEncoder(OneJobEncoder):
    """The answer of `/tokenize`."""

    def output_parts(self, output: PackedOutput) -> Iterator[bytes]:
        yield b'{"count":%d,"max_model_len":%d,"tokens":' % (output.num_tokens, output.max_model_len)
        yield from _list_parts(output.token_ids())
        yield b',"token_strs":'
        if output.has_strs:
            yield from _list_parts(output.token_strs())
        else:
            yield b"null"
        yield b"}"


class DetokenizeEncoder(OneJobEncoder):
    """The answer of `/detokenize`."""

    def output_parts(self, output: PackedOutput) -> Iterator[bytes]:
        return json_parts({"prompt": Text(output.text_parts)})


def _list_parts(values: Iterator[int] | Iterator[str]) -> Iterator[bytes]:
    """Yield a JSON array in parts."""
    yield b"["
    is_first = True
    while batch := list(islice(values, VALUES_PER_PART)):
        yield (b"" if is_first else b",") + to_json(batch)[1:-1]
        is_first = False
    yield b"]"


# `POST /tokenize` and `POST /detokenize`.

_TOKENIZED = object_of(
    count=NUMBER, max_model_len=NUMBER, tokens=list_of(NUMBER), token_strs={"anyOf": [list_of(TEXT), {"type": "null"}]}
)
_TOKENIZE = RouteDoc("Return the tokens of a text or a chat.", _TOKENIZED)
_DETOKENIZE = RouteDoc("Return the text of tokens, special tokens included.", object_of(prompt=TEXT))


# Answers of `/v1/embeddings`, `/rerank` and `/score`, rendered in parts.


class EmbeddingEncoder(RowEncoder):
    """OpenAI's answer of `/v1/embeddings`."""

    def head(self) -> bytes:
        """Return the part before the embeddings."""
        return embeddings_head(self.answer.model)

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        yield from embedding_parts(index, values, as_base64=self.answer.options["base64"])


class PoolingEncoder(RowEncoder):
    """vLLM's answer of `/pooling`."""

    def head(self) -> bytes:
        """Return the part before the vectors."""
        return self.list_head

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        yield b'%b{"index":%d,"object":"pooling","data":' % (b"," if index else b"", index)
        yield from vector_parts(values, as_base64=self.answer.options["base64"])
        yield b"}"


class ScoreEncoder(ComparedEncoder):
    """vLLM's answer of `/score`."""

    def head(self) -> bytes:
        """Return the part before the scores."""
        return self.list_head

    def score_parts(self, at: int, score: float) -> Iterator[bytes]:
        yield score_part(at, score)


class RerankEncoder(ComparedEncoder):
    """The answer of `/rerank` in the shape of Jina, Cohere and vLLM. It is rendered after the last document."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._scores: list[float] = []

    def head(self) -> bytes:
        """Return the JSON before the list of documents."""
        return rerank_head(self.answer.job_ids[0], self.answer.model)

    def score_parts(self, at: int, score: float) -> Iterator[bytes]:
        self._scores.append(score)
        if 1 + len(self._scores) == len(self.answer.prompts):
            yield from self._ranked()
        else:
            yield b""  # Between two parts, the writer lets other tasks run.

    def _ranked(self) -> Iterator[bytes]:
        options = self.answer.options
        documents = [*map(text_of, self.answer.prompts[1:])] if options["has_documents"] else None
        return ranked_parts(self._scores, documents, options["top_n"])


class ClassifyEncoder(RowEncoder):
    """vLLM's answer of `/classify`. A model that labels tokens adds what it found, in the shape of transformers."""

    def head(self) -> bytes:
        """Return the part before the labels."""
        return self.list_head

    def entities_part(self, index: int, entities: list[dict[str, Any]], output: PackedOutput) -> bytes:
        return entity_part(index, entities, len(output.labels))

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        return label_parts(index, values, output.labels)


# `POST /v1/embeddings`, `POST /rerank`, `POST /score`, `POST /classify` and `POST /pooling`.

_FLOAT = {"type": "number"}
_USAGE = object_of(prompt_tokens=NUMBER, total_tokens=NUMBER)
_VECTOR = {"anyOf": [list_of(_FLOAT), TEXT]}
_EMBEDDING = object_of(object={"const": "embedding"}, index=NUMBER, embedding=_VECTOR)
_EMBEDDINGS_DOC = RouteDoc(
    "Return the embeddings of texts: the model's final hidden states, pooled to vectors of length 1.",
    object_of(object={"const": "list"}, model=TEXT, data=list_of(_EMBEDDING), usage=_USAGE),
)
_RANKED = object_of(index=NUMBER, relevance_score=_FLOAT)
_RANKED["properties"]["document"] = object_of(text=TEXT)
_RERANK_DOC = RouteDoc(
    "Order documents by how well they fit a query: as a model scores both, or else by the cosine of embeddings.",
    object_of(id=TEXT, model=TEXT, results=list_of(_RANKED), usage=_USAGE),
)
_SCORE = object_of(index=NUMBER, object={"const": "score"}, score=_FLOAT)
_SCORE_DOC = RouteDoc(
    "Return how well texts fit each other: as a model scores pairs, or else the cosine of embeddings.",
    object_of(id=TEXT, object={"const": "list"}, created=NUMBER, model=TEXT, data=list_of(_SCORE), usage=_USAGE),
)


_LABELED = object_of(index=NUMBER, label=TEXT, probs=list_of(_FLOAT), num_classes=NUMBER)
_CLASSIFY_DOC = RouteDoc(
    "Return the labels of texts, by a model that classifies them.",
    object_of(id=TEXT, object={"const": "list"}, created=NUMBER, model=TEXT, data=list_of(_LABELED), usage=_USAGE),
)


_POOLED = object_of(index=NUMBER, object={"const": "pooling"}, data=_VECTOR)
_POOLING_DOC = RouteDoc(
    "Return what a model makes of texts: vectors, or the numbers of labels.",
    object_of(id=TEXT, object={"const": "list"}, created=NUMBER, model=TEXT, data=list_of(_POOLED), usage=_USAGE),
)


# The routes.


def _routes(services: Services) -> list[BaseRoute | APIRouter]:
    def generate(schema: type[RequestBody], dialect: TaskDialect, doc: RouteDoc) -> Generate:
        return Generate(schema, dialect, services.reader, services.answers, doc)

    rerank = generate(RerankRequest, TaskDialect(rerank_encoder, shows_prompts=True), _RERANK_DOC)
    score = generate(ScoreRequest, TaskDialect(ScoreEncoder), _SCORE_DOC)
    classify = generate(ClassifyRequest, TaskDialect(ClassifyEncoder), _CLASSIFY_DOC)
    of_path = {
        "/tokenize": generate(TokenizeRequest, TaskDialect(tokenize_encoder, shows_prompts=True), _TOKENIZE),
        "/detokenize": generate(DetokenizeRequest, TaskDialect(DetokenizeEncoder), _DETOKENIZE),
        "/v1/embeddings": generate(EmbeddingRequest, TaskDialect(EmbeddingEncoder), _EMBEDDINGS_DOC),
        "/pooling": generate(PoolingRequest, TaskDialect(PoolingEncoder), _POOLING_DOC),
        **dict.fromkeys(("/classify", "/v1/classify"), classify),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
        **dict.fromkeys(("/score", "/v1/score"), score),
    }
    return [*(Route(path, one, methods=["POST"]) for path, one in of_path.items()), *tei_routes(services)]


TASKS = HttpDialect(
    _routes,
    bodies=(
        *(TokenizeRequest, DetokenizeRequest, EmbeddingRequest, RerankRequest, ScoreRequest, ClassifyRequest),
        *(PoolingRequest, *TEI_BODIES),
    ),
    job_bodies={"/v1/embeddings": JobBody(EmbeddingRequest)},
)
