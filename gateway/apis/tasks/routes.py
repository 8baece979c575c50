"""Routes of tasks, with their answers: tokens, embeddings, scores and labels of texts."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from pydantic_core import to_json
from starlette.routing import Route

from penstock.contract.errors import InvariantError
from penstock.contract.job import PackedPrompt
from penstock.contract.output import Usage
from penstock.contract.tasks import SCORE
from penstock.gateway.apis.tasks.schemas import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from penstock.gateway.http.dialect import HttpDialect, JobBody, Services
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.stream.answer import Generate
from penstock.gateway.stream.dialect import AnswerHead, TaskDialect, WholeEncoder
from penstock.gateway.stream.rows import RowEncoder
from penstock.producer.client.request import Prompt
from penstock.producer.client.text_calls import similarity_of
from penstock.producer.openai.embeddings import embedding_parts, embeddings_head, numbers_of
from penstock.producer.openai.json_parts import Text, json_parts
from penstock.queue.results import PackedOutput, PackedResult
from penstock.queue.wire import unpack_all

# vLLM's answers of `/tokenize` and `/detokenize`, rendered in parts.

VALUES_PER_PART = 512
"""Tokens that are rendered at once, which takes less than 0.1 ms."""


class _TaskEncoder(WholeEncoder):
    """Encodes the output of a request's only job."""

    def __init__(self, head: AnswerHead) -> None:
        pass

    def head(self) -> bytes:
        """Return nothing: the output is the whole answer."""
        return b""

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the parts of the answer."""
        if result.output is None:
            raise InvariantError(f"the result of job {result.job_id} has no output")
        return self._parts(result.output)

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return nothing."""
        return b""

    @abstractmethod
    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
        """Yield the parts of the answer."""


class TokenizeEncoder(_TaskEncoder):
    """The answer of `/tokenize`."""

    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
        yield b'{"count":%d,"max_model_len":%d,"tokens":' % (output.num_tokens, output.max_model_len)
        yield from _list_parts(output.token_ids())
        yield b',"token_strs":'
        if output.has_strs:
            yield from _list_parts(output.token_strs())
        else:
            yield b"null"
        yield b"}"


class DetokenizeEncoder(_TaskEncoder):
    """The answer of `/detokenize`."""

    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
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


class ScoreEncoder(RowEncoder):
    """vLLM's answer of `/score`."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._first = array("f")
        """The embedding that the next ones are compared with."""
        self._num_scores = 0

    def head(self) -> bytes:
        """Return the part before the scores."""
        return self.list_head

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        if output.kind == SCORE:
            score = values[0]
        elif index % 2 == 0 if self.answer.options["pairs"] else index == 0:
            self._first = values
            return
        else:
            score = similarity_of(self._first, values, self.answer.similarity)
        at = self._num_scores
        self._num_scores += 1
        yield b'%b{"index":%d,"object":"score","score":%b}' % (b"," if at else b"", at, to_json(score))


class RerankEncoder(RowEncoder):
    """The answer of `/rerank` in the shape of Jina, Cohere and vLLM. It is rendered after the last document."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._query = array("f")
        self._scores: list[float] = []

    def head(self) -> bytes:
        """Return the JSON before the list of documents."""
        return b'{"id":%b,"model":%b,"results":[' % (self.id, self.model)

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        # An empty part lets the writer serve other requests: each comparison takes part of a millisecond.
        yield b""
        if output.kind == SCORE:
            self._scores.append(values[0])
        elif index == 0:
            self._query = values
            return
        else:
            self._scores.append(similarity_of(self._query, values, self.answer.similarity))
        if 1 + len(self._scores) == len(self.answer.prompts):
            yield from self._results()
        else:
            yield b""  # Between two parts, the writer lets other tasks run.

    def _results(self) -> Iterator[bytes]:
        order = sorted(range(len(self._scores)), key=lambda at: -self._scores[at])
        for place, at in enumerate(order[: self.answer.options["top_n"]]):
            yield b'%b{"index":%d,' % (b"," if place else b"", at)
            if self.answer.options["has_documents"]:
                document = _text_of(self.answer.prompts[1 + at])
                yield b'"document":'
                yield from json_parts({"text": Text(partial(_alone, document))})
                yield b","
            yield b'"relevance_score":%b}' % to_json(self._scores[at])


class ClassifyEncoder(RowEncoder):
    """vLLM's answer of `/classify`. A model that labels tokens adds what it found, in the shape of transformers."""

    def head(self) -> bytes:
        """Return the part before the labels."""
        return self.list_head

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the parts of the answer that follow from the texts of job `index`."""
        output = result.output
        if output is None or not (found := output.entities()):
            yield from super().parts_of(index, result)
            return
        for entities in found:
            at = self.num_texts
            self.num_texts += 1
            yield b'%b{"index":%d,"num_classes":%d,"entities":' % (b"," if at else b"", at, len(output.labels))
            yield to_json(entities) + b"}"

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        best = max(range(len(values)), key=lambda at: values[at])
        label = to_json(output.labels[best] if best < len(output.labels) else f"LABEL_{best}")
        yield b'%b{"index":%d,"label":%b,"probs":' % (b"," if index else b"", index, label)
        yield from numbers_of(values)
        yield b',"num_classes":%d}' % len(values)


def _alone(text: str) -> tuple[str]:
    return (text,)


def _text_of(prompt: Prompt) -> str:
    """Return the text of a prompt, which the parser process may have packed."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, PackedPrompt):
        raise InvariantError("a document is not a text")
    (text,) = unpack_all(prompt.data)
    return str(text)


# `POST /v1/embeddings`, `POST /rerank` and `POST /score`.

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


# The routes.


def _routes(services: Services) -> list[Route]:
    reader, answers = services.reader, services.answers
    tokenize = Generate(TokenizeRequest, TaskDialect(TokenizeEncoder), reader, answers, _TOKENIZE)
    detokenize = Generate(DetokenizeRequest, TaskDialect(DetokenizeEncoder), reader, answers, _DETOKENIZE)
    embeddings = Generate(EmbeddingRequest, TaskDialect(EmbeddingEncoder), reader, answers, _EMBEDDINGS_DOC)
    rerank = Generate(RerankRequest, TaskDialect(RerankEncoder, shows_prompts=True), reader, answers, _RERANK_DOC)
    score = Generate(ScoreRequest, TaskDialect(ScoreEncoder), reader, answers, _SCORE_DOC)
    classify = Generate(ClassifyRequest, TaskDialect(ClassifyEncoder), reader, answers, _CLASSIFY_DOC)
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/classify", classify, methods=["POST"]),
        *(Route(path, rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        *(Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")),
    ]


TASKS = HttpDialect(
    _routes,
    bodies=(TokenizeRequest, DetokenizeRequest, EmbeddingRequest, RerankRequest, ScoreRequest, ClassifyRequest),
    job_bodies={"/v1/embeddings": JobBody(EmbeddingRequest)},
)
