"""OpenAI's official client: embeddings of an encoder."""

from __future__ import annotations

import io
import json
import time

import openai
from clients.python.checks import API, KEY, MODEL, check, error_of, main
from clients.python.search import (
    DIMENSIONS,
    DOCUMENTS,
    LONG,
    NEAREST,
    QUERY,
    nearest,
    post,
    require_equal,
    require_unit_length,
    require_vectors,
)

client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
BATCH_TIMEOUT_S = 60.0


@check
def base64_and_numbers_are_the_same_vectors() -> None:
    """By default, the client asks for base64 and decodes it."""
    packed = client.embeddings.create(model=MODEL, input=DOCUMENTS)
    require_vectors([one.embedding for one in packed.data], DOCUMENTS)
    plain = client.embeddings.create(model=MODEL, input=DOCUMENTS, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        require_equal(one.embedding, other.embedding)
    assert [one.index for one in packed.data] == [*range(len(DOCUMENTS))]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > len(DOCUMENTS)


@check
def the_nearest_document_answers_the_query() -> None:
    vectors = [one.embedding for one in client.embeddings.create(model=MODEL, input=[QUERY, *DOCUMENTS]).data]
    assert len(vectors[0]) == DIMENSIONS
    assert nearest(vectors[0], vectors[1:]) == NEAREST


@check
def token_ids_have_the_vector_of_their_text() -> None:
    (tokens,) = post("tokenize", model=MODEL, inputs=QUERY)
    ids = [one["id"] for one in tokens]
    for given in (ids, [ids]):
        require_vectors([one.embedding for one in client.embeddings.create(model=MODEL, input=given).data], [QUERY])


@check
def fewer_dimensions_are_normalized_again() -> None:
    (one,) = client.embeddings.create(model=MODEL, input=QUERY, dimensions=64).data
    require_vectors([one.embedding], [QUERY], dimensions=64)
    assert len(one.embedding) == 64
    require_unit_length(one.embedding)


@check
def a_text_beyond_the_limit_is_named() -> None:
    given = {"model": MODEL, "input": [QUERY, LONG]}
    error = error_of(openai.BadRequestError, lambda: client.embeddings.create(**given))
    assert error.param == "input[1]"
    assert "256" in error.message
    cut = client.embeddings.create(**given, extra_body={"truncate_prompt_tokens": -1})
    assert len(cut.data) == 2


@check
def what_the_model_cannot_do_is_refused() -> None:
    messages = [{"role": "user", "content": QUERY}]
    refused = error_of(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=messages))
    assert "cannot generate text" in refused.message
    refused = error_of(
        openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=QUERY, dimensions=DIMENSIONS + 1)
    )
    assert refused.param == "dimensions"
    assert error_of(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=[])).param == "input"


@check
def the_list_of_models_says_that_it_embeds() -> None:
    found = {one.id: one for one in client.models.list()}
    assert found[MODEL].to_dict()["capabilities"] == ["embed"]
    assert found[MODEL].to_dict()["dimensions"] == DIMENSIONS


@check
def rows_of_a_batch_file_have_the_same_vectors() -> None:
    rows = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": text}}
        for at, text in enumerate(DOCUMENTS)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("rows.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    until = time.monotonic() + BATCH_TIMEOUT_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, f"the batch is still {batch.status}"
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id, batch
    lines = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    found = {line["custom_id"]: line["response"]["body"]["data"][0]["embedding"] for line in lines}
    require_vectors([found[str(at)] for at in range(len(DOCUMENTS))], DOCUMENTS)


if __name__ == "__main__":
    main("openai")
