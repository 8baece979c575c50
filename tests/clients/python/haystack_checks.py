"""Haystack: its embedders and its ranker for text-embeddings-inference, and its embedders for OpenAI."""

from __future__ import annotations

import os

# The Hub's client would not call the server either.
os.environ.pop("HF_HUB_OFFLINE", None)
from clients.python.checks import API, KEY, MODEL, URL, check, main
from clients.python.search import DOCUMENTS, LONG, NEAREST, QUERY, require_ranking, require_vectors
from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

DOCS = [Document(content=text) for text in DOCUMENTS]
OF_OPENAI = {"api_key": Secret.from_token(KEY), "model": MODEL, "api_base_url": API, "max_retries": 0}
OF_TEI = {"api_type": "text_embeddings_inference", "api_params": {"url": URL}, "normalize": True}
"""Without `normalize`, it asks for vectors as the model pools them."""
PLACES = {text: at for at, text in enumerate(DOCUMENTS)}


@check
def openai_embedders_get_the_vectors() -> None:
    found = OpenAIDocumentEmbedder(**OF_OPENAI).run(DOCS)
    require_vectors([one.embedding for one in found["documents"]], DOCUMENTS)
    require_vectors([OpenAITextEmbedder(**OF_OPENAI).run(QUERY)["embedding"]], [QUERY])


@check
def embedders_of_text_embeddings_inference_get_the_vectors() -> None:
    found = HuggingFaceAPIDocumentEmbedder(**OF_TEI, progress_bar=False).run(DOCS)
    require_vectors([one.embedding for one in found["documents"]], DOCUMENTS)
    require_vectors([HuggingFaceAPITextEmbedder(**OF_TEI).run(QUERY)["embedding"]], [QUERY])
    assert len(HuggingFaceAPITextEmbedder(**OF_TEI, truncate=True).run(LONG)["embedding"]) == 384


@check
def the_ranker_orders_documents() -> None:
    found = HuggingFaceTEIRanker(url=URL, top_k=2).run(QUERY, DOCS)["documents"]
    require_ranking([(PLACES[one.content], one.score) for one in found], top_n=2)


@check
async def the_asynchronous_ranker_gets_the_same() -> None:
    found = (await HuggingFaceTEIRanker(url=URL).run_async(QUERY, DOCS))["documents"]
    require_ranking([(PLACES[one.content], one.score) for one in found])


@check
def a_pipeline_finds_the_document_that_answers() -> None:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    store.write_documents(HuggingFaceAPIDocumentEmbedder(**OF_TEI, progress_bar=False).run(DOCS)["documents"])
    line = Pipeline()
    line.add_component("embedder", HuggingFaceAPITextEmbedder(**OF_TEI))
    line.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=2))
    line.connect("embedder.embedding", "retriever.query_embedding")
    found = line.run({"embedder": {"text": QUERY}})["retriever"]["documents"]
    assert found[0].content == DOCUMENTS[NEAREST]


if __name__ == "__main__":
    main("haystack-ai", "huggingface-api-haystack")
