"""The Hub's client, `InferenceClient`, with the URL of a server in place of a model."""

from __future__ import annotations

import os

# The Hub's client would not call the server either.
os.environ.pop("HF_HUB_OFFLINE", None)
from clients.python.checks import KEY, URL, check, error_of, main
from clients.python.search import DOCUMENTS, LONG, NEAREST, QUERY, nearest, require_equal, require_vectors, vectors_of
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

client = InferenceClient(model=URL, token=KEY)


@check
def features_are_the_vectors_of_texts() -> None:
    found = client.feature_extraction(DOCUMENTS)
    assert found.shape == (len(DOCUMENTS), 384)
    require_vectors(found.tolist(), DOCUMENTS)
    require_vectors(client.feature_extraction(QUERY).tolist(), [QUERY])


@check
async def the_asynchronous_client_gets_the_same() -> None:
    found = await AsyncInferenceClient(model=URL, token=KEY).feature_extraction(DOCUMENTS)
    require_vectors(found.tolist(), DOCUMENTS)


@check
def a_path_of_the_server_may_be_named() -> None:
    require_vectors(InferenceClient(model=f"{URL}/embed").feature_extraction(DOCUMENTS).tolist(), DOCUMENTS)


@check
def truncation_keeps_the_side_that_is_asked_for() -> None:
    refused = error_of(HfHubHTTPError, lambda: client.feature_extraction(LONG, truncate=False))
    assert refused.response.status_code == 400
    first, last = (
        client.feature_extraction(f"kettle {LONG} river", truncate=True, truncation_direction=side).tolist()
        for side in ("right", "left")
    )
    assert first != last


@check
def options_of_embeddings_are_honored() -> None:
    require_vectors(client.feature_extraction(QUERY, normalize=True).tolist(), [QUERY])
    require_vectors(client.feature_extraction(QUERY, dimensions=64).tolist(), [QUERY], dimensions=64)
    refused = error_of(HfHubHTTPError, lambda: client.feature_extraction(QUERY, prompt_name="poem"))
    assert refused.response.status_code == 400


@check
def similarity_finds_the_document_that_answers() -> None:
    found = client.sentence_similarity(QUERY, DOCUMENTS)
    query, *documents = vectors_of([QUERY, *DOCUMENTS])
    require_equal(found, [sum(a * b for a, b in zip(query, one, strict=True)) for one in documents])
    assert found.index(max(found)) == NEAREST == nearest(query, documents)


@check
def labels_have_scores() -> None:
    labels = InferenceClient(model=f"{URL}/predict").text_classification(QUERY, top_k=1)
    assert [one.label for one in labels] == ["LABEL_0"]
    assert 0 <= labels[0].score <= 1


@check
def the_server_is_healthy() -> None:
    assert InferenceClient(model=URL, provider="hf-inference").health_check()


if __name__ == "__main__":
    main("huggingface-hub")
