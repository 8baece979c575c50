"""LangChain's `HuggingFaceEndpointEmbeddings`, with clients that have the URL of a server.

The class takes no URL itself since its release 1.0.
"""

from __future__ import annotations

import os

# The Hub's client would not call the server either.
os.environ.pop("HF_HUB_OFFLINE", None)
from clients.python.checks import KEY, URL, check, error_of, main
from clients.python.search import DOCUMENTS, LONG, NEAREST, QUERY, require_vectors
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import HuggingFaceEndpointEmbeddings


def embeddings(**options: object) -> HuggingFaceEndpointEmbeddings:
    made = HuggingFaceEndpointEmbeddings(model="some/model", huggingfacehub_api_token=KEY, **options)
    made.client, made.async_client = InferenceClient(model=URL), AsyncInferenceClient(model=URL)
    return made


@check
def documents_and_queries_have_their_vectors() -> None:
    require_vectors(embeddings().embed_documents(DOCUMENTS), DOCUMENTS)
    require_vectors([embeddings().embed_query(QUERY)], [QUERY])


@check
async def the_asynchronous_calls_get_the_same() -> None:
    require_vectors(await embeddings().aembed_documents(DOCUMENTS), DOCUMENTS)
    require_vectors([await embeddings().aembed_query(QUERY)], [QUERY])


@check
def a_store_finds_the_document_that_answers() -> None:
    store = InMemoryVectorStore(embeddings())
    store.add_texts(DOCUMENTS)
    (found,) = store.similarity_search(QUERY, k=1)
    assert found.page_content == DOCUMENTS[NEAREST]


@check
def a_text_beyond_the_limit_is_refused_or_cut() -> None:
    assert error_of(HfHubHTTPError, lambda: embeddings().embed_query(LONG)).response.status_code == 400
    assert len(embeddings(model_kwargs={"truncate": True}).embed_query(LONG)) == 384


if __name__ == "__main__":
    main("langchain-huggingface", "huggingface-hub")
