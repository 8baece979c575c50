"""Cohere's official client: rerank, in its second and its first version."""

from __future__ import annotations

from typing import Any

import cohere
from clients.python.checks import KEY, MODEL, URL, check, error_of, main
from clients.python.search import DOCUMENTS, LONG, QUERY, RERANKER, require_ranking

GIVEN = {"query": QUERY, "documents": DOCUMENTS}
new = cohere.ClientV2(api_key=KEY, base_url=URL)


def places(answer: Any) -> list[tuple[int, float]]:
    return [(one.index, one.relevance_score) for one in answer.results]


@check
def a_cross_encoder_orders_documents() -> None:
    require_ranking(places(new.rerank(model=RERANKER, **GIVEN)))
    require_ranking(places(new.rerank(model=RERANKER, top_n=2, **GIVEN)), top_n=2)


@check
def an_embedder_orders_documents_by_the_cosine() -> None:
    require_ranking(places(new.rerank(model=MODEL, **GIVEN)), MODEL)


@check
def the_first_version_returns_documents() -> None:
    old = cohere.Client(api_key=KEY, base_url=URL)
    answer = old.rerank(model=RERANKER, return_documents=True, **GIVEN)
    require_ranking(places(answer))
    assert [one.document.text for one in answer.results] == [DOCUMENTS[one.index] for one in answer.results]


@check
async def the_asynchronous_client_gets_the_same() -> None:
    require_ranking(places(await cohere.AsyncClientV2(api_key=KEY, base_url=URL).rerank(model=RERANKER, **GIVEN)))


@check
def an_empty_list_of_documents_is_refused() -> None:
    refused = error_of(cohere.BadRequestError, lambda: new.rerank(model=RERANKER, query=QUERY, documents=[]))
    assert "documents" in str(refused.body)


@check
def a_document_beyond_the_limit_is_named_or_cut() -> None:
    """Its `max_tokens_per_doc` cuts documents."""
    refused = error_of(cohere.BadRequestError, lambda: new.rerank(model=RERANKER, query=QUERY, documents=["a", LONG]))
    assert "documents[1]" in str(refused.body)
    cut = new.rerank(model=RERANKER, query=QUERY, documents=["a", LONG], max_tokens_per_doc=50)
    assert {one.index for one in cut.results} == {0, 1}


if __name__ == "__main__":
    main("cohere")
