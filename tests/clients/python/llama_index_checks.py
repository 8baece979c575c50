"""LlamaIndex: its classes for text-embeddings-inference, embeddings and reranker, and for servers like OpenAI's."""

from __future__ import annotations

from clients.python.checks import API, KEY, MODEL, URL, check, main
from clients.python.search import DOCUMENTS, LONG, NEAREST, QUERY, require_ranking, require_vectors
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

embedder = TextEmbeddingsInference(model_name=MODEL, base_url=URL)
NODES = [TextNode(id_=str(at), text=text) for at, text in enumerate(DOCUMENTS)]


@check
def texts_and_queries_have_their_vectors() -> None:
    require_vectors(embedder.get_text_embedding_batch(DOCUMENTS), DOCUMENTS)
    require_vectors([embedder.get_query_embedding(QUERY)], [QUERY])
    assert len(embedder.get_text_embedding(LONG)) == 384


@check
async def the_asynchronous_calls_get_the_same() -> None:
    require_vectors(await embedder.aget_text_embedding_batch(DOCUMENTS), DOCUMENTS)


@check
def servers_like_openais_are_spoken_to_too() -> None:
    like = OpenAILikeEmbedding(model_name=MODEL, api_base=API, api_key=KEY)
    require_vectors(like.get_text_embedding_batch(DOCUMENTS), DOCUMENTS)


@check
def an_index_finds_the_document_that_answers_and_the_reranker_orders_all() -> None:
    index = VectorStoreIndex(NODES, embed_model=embedder)
    found = index.as_retriever(similarity_top_k=len(NODES)).retrieve(QUERY)
    assert found[0].node.node_id == str(NEAREST)
    ranked = TextEmbeddingInference(base_url=URL, top_n=2).postprocess_nodes(found, query_str=QUERY)
    require_ranking([(int(one.node.node_id), one.score) for one in ranked], top_n=2)


@check
def the_reranker_keeps_scores_with_their_nodes() -> None:
    given = [NodeWithScore(node=node, score=0.0) for node in NODES]
    ranked = TextEmbeddingInference(base_url=URL, top_n=len(NODES)).postprocess_nodes(given, query_str=QUERY)
    require_ranking([(int(one.node.node_id), one.score) for one in ranked])


if __name__ == "__main__":
    main(
        "llama-index-core",
        "llama-index-embeddings-text-embeddings-inference",
        "llama-index-postprocessor-tei-rerank",
        "llama-index-embeddings-openai-like",
    )
