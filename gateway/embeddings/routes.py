"""`POST /v1/embeddings`, `POST /rerank` and `POST /score`."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.embeddings.encoders import EmbeddingEncoder, RerankEncoder, ScoreEncoder
from penstock.gateway.generate import Generate
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.tokens.task_dialect import TaskDialect

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
    "Order documents by the cosine similarity of their embeddings to that of a query.",
    object_of(id=TEXT, model=TEXT, results=list_of(_RANKED), usage=_USAGE),
)
_SCORE = object_of(index=NUMBER, object={"const": "score"}, score=_FLOAT)
_SCORE_DOC = RouteDoc(
    "Return the cosine similarity of the embeddings of texts.",
    object_of(id=TEXT, object={"const": "list"}, created=NUMBER, model=TEXT, data=list_of(_SCORE), usage=_USAGE),
)
_RERANK = Generate("rerank", TaskDialect(RerankEncoder, shows_prompts=True), _RERANK_DOC)
_SCORE_APP = Generate("score", TaskDialect(ScoreEncoder), _SCORE_DOC)

ROUTES = (
    Route("/v1/embeddings", Generate("embedding", TaskDialect(EmbeddingEncoder), _EMBEDDINGS_DOC), methods=["POST"]),
    *(Route(path, _RERANK, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    *(Route(path, _SCORE_APP, methods=["POST"]) for path in ("/score", "/v1/score")),
)
