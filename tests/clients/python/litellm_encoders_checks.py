"""litellm: embeddings and rerank by each of its providers that take the URL of a server."""

from __future__ import annotations

import os
from typing import Any

from clients.python.checks import API, KEY, MODEL, URL, check, error_of, main
from clients.python.search import DOCUMENTS, LONG, QUERY, RERANKER, require_ranking, require_vectors

# Otherwise litellm fetches a list of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

GIVEN = {"query": QUERY, "documents": DOCUMENTS}


def vectors(provider: str, base: str, **options: Any) -> list[list[float]]:
    answer = litellm.embedding(
        model=f"{provider}/{MODEL}", input=DOCUMENTS, api_base=base, api_key=KEY, max_retries=0, **options
    )
    return [one["embedding"] for one in answer.data]


def ranking(provider: str, base: str, **options: Any) -> list[tuple[int, float]]:
    answer = litellm.rerank(model=f"{provider}/{RERANKER}", api_base=base, api_key=KEY, **GIVEN, **options)
    return [(one["index"], one["relevance_score"]) for one in answer.results]


@check
def openai_embeddings() -> None:
    require_vectors(vectors("openai", API), DOCUMENTS)


@check
def vllm_embeddings() -> None:
    require_vectors(vectors("hosted_vllm", API), DOCUMENTS)


@check
def infinity_embeddings() -> None:
    require_vectors(vectors("infinity", API), DOCUMENTS)


@check
def hugging_face_embeddings() -> None:
    """The task is named, because litellm otherwise asks the Hub for that of the model."""
    named = {"model": f"huggingface/{MODEL}", "input_type": "feature-extraction"}
    answer = litellm.embedding(**named, input=DOCUMENTS, api_base=URL, api_key=KEY)
    require_vectors([one["embedding"] for one in answer.data], DOCUMENTS)


@check
def jina_embeddings() -> None:
    require_vectors(vectors("jina_ai", API), DOCUMENTS)


@check
async def asynchronous_embeddings() -> None:
    answer = await litellm.aembedding(model=f"openai/{MODEL}", input=DOCUMENTS, api_base=API, api_key=KEY)
    require_vectors([one["embedding"] for one in answer.data], DOCUMENTS)


@check
def vllm_rerank() -> None:
    require_ranking(ranking("hosted_vllm", URL))
    require_ranking(ranking("hosted_vllm", URL, top_n=2), top_n=2)


@check
def cohere_rerank() -> None:
    require_ranking(ranking("cohere", URL))


@check
def infinity_rerank() -> None:
    """Infinity's documents are texts; those of Cohere, Jina and vLLM, as ours, are objects with a text."""
    require_ranking(ranking("infinity", URL, return_documents=False))


@check
def jina_rerank() -> None:
    require_ranking(ranking("jina_ai", URL))


@check
def hugging_face_rerank() -> None:
    """It sends the body of text-embeddings-inference."""
    require_ranking(ranking("huggingface", URL))


@check
def a_text_beyond_the_limit_is_a_bad_request() -> None:
    given: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": API, "api_key": KEY, "max_retries": 0}
    refused = error_of(litellm.BadRequestError, lambda: litellm.embedding(input=[QUERY, LONG], **given))
    assert "input[1]" in str(refused)


if __name__ == "__main__":
    main("litellm")
