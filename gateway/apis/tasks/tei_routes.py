"""The routes of text-embeddings-inference: `/embed`, `/predict`, `/similarity`, `/info` and `POST /`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.routing import BaseRoute, Route

from penstock.contract.errors import InvariantError, RequestError
from penstock.contract.output import Usage
from penstock.contract.tasks import SCORE
from penstock.gateway.apis.tasks.encoders import ComparedEncoder, text_of
from penstock.gateway.apis.tasks.schemas import FORM
from penstock.gateway.apis.tasks.tei_schemas import EmbedRequest, PredictRequest, RootRequest, SimilarityRequest
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import Services
from penstock.gateway.request.reading import caller_of
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.stream.answer import Generate
from penstock.gateway.stream.dialect import AnswerHead, TaskDialect, WholeEncoder
from penstock.gateway.stream.rows import RowEncoder
from penstock.producer.client import AsyncClient
from penstock.producer.client.pool_choice import choose_pool, is_made_for
from penstock.producer.openai.embeddings import MAX_INPUTS, numbers_of
from penstock.producer.openai.scores import best_first
from penstock.queue.broker.producer import ServedPool
from penstock.queue.results import PackedOutput, PackedResult

VERSION = version("penstock-llm")
_KINDS = "embed", SCORE, "classify"
"""The kinds of jobs that text-embeddings-inference knows."""


class _ListEncoder(RowEncoder):
    """The base of answers that are a list and nothing else."""

    def head(self) -> bytes:
        """Return the beginning of the list."""
        return b"["

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the end of the list."""
        return b"]"


class EmbedEncoder(_ListEncoder):
    """The answer of `/embed`."""

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        yield b"," if index else b""
        yield from numbers_of(values)


class PredictEncoder(_ListEncoder):
    """The answer of `/predict`: for each text its labels, the likeliest first. That of one text has no outer list."""

    def head(self) -> bytes:
        """Return the beginning of the list."""
        return b"" if self.answer.options["is_one"] else super().head()

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the end of the list."""
        return b"" if self.answer.options["is_one"] else super().tail(usages)

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        names = [*output.labels, *(f"LABEL_{at}" for at in range(len(output.labels), len(values)))]
        labels = [
            {"score": values[at], "label": names[at]} for at in best_first(values)[: self.answer.options["top_k"]]
        ]
        yield (b"," if index else b"") + to_json(labels)

    def entities_part(self, index: int, entities: list[dict[str, Any]], output: PackedOutput) -> bytes:
        return (b"," if index else b"") + to_json(entities)


class SimilarityEncoder(ComparedEncoder):
    """The answer of `/similarity`: a number for each sentence."""

    def head(self) -> bytes:
        """Return the beginning of the list."""
        return b"["

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the end of the list."""
        return b"]"

    def score_parts(self, at: int, score: float) -> Iterator[bytes]:
        yield (b"," if at else b"") + to_json(score)


class TeiRerankEncoder(SimilarityEncoder):
    """The answer of `/rerank` to `texts`. It is rendered after the last one."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._scores: list[float] = []

    def score_parts(self, at: int, score: float) -> Iterator[bytes]:
        self._scores.append(score)
        if 1 + len(self._scores) < len(self.answer.prompts):
            yield b""  # Between two parts, the writer lets other tasks run.
            return
        options = self.answer.options
        for place, best in enumerate(best_first(self._scores)[: options["top_n"]]):
            shown: dict[str, Any] = {"index": best, "score": self._scores[best]}
            if options["has_documents"]:
                shown["text"] = text_of(self.answer.prompts[1 + best])
            yield (b"," if place else b"") + to_json(shown)


class TeiTokenizeEncoder(WholeEncoder):
    """The answer of `/tokenize` to `inputs`: for each text its tokens, with their places in it."""

    def __init__(self, head: AnswerHead) -> None:
        self._texts = head.prompts

    def head(self) -> bytes:
        """Return the beginning of the list."""
        return b"["

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the tokens of the text at `index`."""
        output = result.output
        if output is None:
            raise InvariantError(f"the result of job {result.job_id} has no output")
        text = text_of(self._texts[index])
        yield b",[" if index else b"["
        tokens = zip(output.token_ids(), output.token_strs(), output.spans(), strict=True)
        for at, (token_id, name, span) in enumerate(tokens):
            shown: dict[str, Any] = {"id": token_id, "text": name, "special": True, "start": None, "stop": None}
            if span is not None:
                shown |= {"text": text[slice(*span)], "special": False, "start": span[0], "stop": span[1]}
            yield (b"," if at else b"") + to_json(shown)
        yield b"]"

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the end of the list."""
        return b"]"


_FORMS: dict[str, type[RowEncoder]] = {"rerank": TeiRerankEncoder, "similarity": SimilarityEncoder}


def _root_encoder(head: AnswerHead) -> WholeEncoder:
    """Return the encoder of an answer of `POST /`, whose shape follows from its body and from what the model does."""
    return _FORMS.get(head.options[FORM], _RootEncoder)(head)


class _RootEncoder(PredictEncoder):
    """The answer of `POST /` to texts: vectors, or labels."""

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        if output.kind == "classify":
            yield from super().row_parts(index, values, output)
            return
        yield b"," if index else b""
        yield from numbers_of(values)


class InfoRoute:
    """`GET /info`: what text-embeddings-inference says of its model."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.router = APIRouter()
        self.router.add_api_route("/info", self.info)

    async def info(self, request: Request) -> dict[str, Any]:
        """Return what a model is, as text-embeddings-inference does. `?model=` names one of several."""
        caller, asked = caller_of(request), request.query_params.get("model")
        async with soon():
            pools = [pool for pool in (await self._client.pools()).values() if caller.sees(pool.model)]
        if asked is None:
            made = [pool for pool in pools if pool.is_alive and any(is_made_for(pool, kind) for kind in _KINDS)]
            names = sorted({pool.model for pool in made})
            if len(names) > 1:
                raise RequestError(f"model must be named (?model=); served: {', '.join(names)}", param="model")
            asked = names[0] if names else None
        return _info(choose_pool(pools, asked, hides_models=bool(caller.models)))


def _info(pool: ServedPool) -> dict[str, Any]:
    return {
        "model_id": pool.model,
        "model_sha": None,
        "model_dtype": "float32",
        "model_type": _model_type(pool),
        "max_concurrent_requests": pool.max_open_jobs,
        "max_input_length": pool.max_model_len,
        "max_batch_tokens": pool.max_model_len,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }


def _model_type(pool: ServedPool) -> dict[str, Any]:
    labels: dict[str, Any] = {"id2label": {}, "label2id": {}}
    if SCORE in pool.kinds:
        return {"reranker": labels}
    return {"classifier": labels} if "classify" in pool.kinds else {"embedding": {"pooling": "mean"}}


# The routes.

_NUMBERS = list_of({"type": "number"})
_LABELS = list_of(object_of(score={"type": "number"}, label=TEXT))
_EMBED_DOC = RouteDoc("Return the embeddings of texts.", list_of(_NUMBERS))
_PREDICT_DOC = RouteDoc("Return the labels of texts.", {"anyOf": [_LABELS, list_of(_LABELS)]})
_SIMILARITY_DOC = RouteDoc("Return how alike a sentence and others are, by their embeddings.", _NUMBERS)
_ROOT_DOC = RouteDoc(
    "Do what the body and the model imply: embeddings, labels, similarities or an order of texts.",
    {"anyOf": [list_of(_NUMBERS), _NUMBERS, list_of(object_of(index=NUMBER, score={"type": "number"}))]},
)
TEI_BODIES = EmbedRequest, PredictRequest, SimilarityRequest, RootRequest
"""The schemas of the bodies."""


def tei_routes(services: Services) -> list[BaseRoute | APIRouter]:
    """Return the routes of text-embeddings-inference that no other API has."""
    reader, answers = services.reader, services.answers
    root = TaskDialect(_root_encoder, shows_prompts=True)
    of_path = {
        "/embed": Generate(EmbedRequest, TaskDialect(EmbedEncoder), reader, answers, _EMBED_DOC),
        "/predict": Generate(PredictRequest, TaskDialect(PredictEncoder), reader, answers, _PREDICT_DOC),
        "/similarity": Generate(SimilarityRequest, TaskDialect(SimilarityEncoder), reader, answers, _SIMILARITY_DOC),
        "/": Generate(RootRequest, root, reader, answers, _ROOT_DOC),
    }
    routes = [Route(path, one, methods=["POST"]) for path, one in of_path.items()]
    return [*routes, InfoRoute(services.client).router]
