"""`/v1/embeddings`, `/rerank` and `/score` over HTTP, and embeddings through the Python clients."""

from __future__ import annotations

import base64
import json
import struct
from operator import mul
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fakes.announced_pools import announcing
from fakes.processes.reference_engine import FAKE_DIMENSIONS, fake_embedding

from penstock import AsyncClient, Client, RequestError, UnsupportedKindError
from penstock.contract.job import SamplingParams
from penstock.contract.pool import PoolRecord
from penstock.contract.tasks import Embed, Embedding
from penstock.contract.tenant import Terms
from penstock.gateway.request.jobs import check_num_jobs
from penstock.gateway.request_line import MAX_JOBS_SHOWN
from penstock.producer.openai.embeddings import MAX_INPUTS
from penstock.producer.parsed_body import ParsedBody
from penstock.queue.broker.connection import connect
from penstock.queue.broker.producer import ServedPool
from tests.gateway.conftest import MAX_MODEL_LEN, MODEL, EchoEngine, Stack


def wanted(text: str | list[int], **options: Any) -> list[float]:
    ids = list(text.encode()) if isinstance(text, str) else text
    return fake_embedding(ids, Embed(**options))


def similarity(first: str, second: str, **options: Any) -> float:
    cosine: float = sum(map(mul, wanted(first, **options), wanted(second, **options)))
    return cosine


def near(numbers: list[float]) -> Any:
    return pytest.approx(numbers, abs=1e-6)


def refusal(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_text_is_embedded_in_openais_shape(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"model": MODEL, "input": "Hello"})
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "list",
        "model": MODEL,
        "data": [{"object": "embedding", "index": 0, "embedding": near(wanted("Hello"))}],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert answer.headers["X-Penstock-Job"].startswith("echo.")


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("one", ["one"]),
        (["one", "three", "one"], ["one", "three", "one"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        (["one", [5, 6, 7]], ["one", [5, 6, 7]]),
    ],
)
def test_every_form_of_input_is_embedded_in_its_order(http: httpx.Client, given: Any, texts: list[Any]) -> None:
    found = http.post("/v1/embeddings", json={"model": MODEL, "input": given}).json()
    assert [one["index"] for one in found["data"]] == list(range(len(texts)))
    assert [one["embedding"] for one in found["data"]] == [near(wanted(text)) for text in texts]
    assert found["usage"]["prompt_tokens"] == sum(map(len, texts))


def test_base64_holds_the_same_numbers(http: httpx.Client) -> None:
    found = http.post("/v1/embeddings", json={"model": MODEL, "input": "Hello", "encoding_format": "base64"}).json()
    data = base64.b64decode(found["data"][0]["embedding"])
    assert list(struct.unpack(f"<{FAKE_DIMENSIONS}f", data)) == near(wanted("Hello"))


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_pooling_and_dimensions_reach_the_engine(http: httpx.Client, pooling: str) -> None:
    body = {"model": MODEL, "input": "Hi you", "pooling": pooling, "dimensions": 7}
    found = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert found == near(wanted("Hi you", pooling=pooling, dimensions=7))
    assert found != near(wanted("Hi you", dimensions=7)) or pooling == "mean"


def test_long_text_is_refused_or_cut_to_its_last_tokens(http: httpx.Client) -> None:
    text = "a" * MAX_MODEL_LEN + "xyz"
    status, param, message = refusal(http.post("/v1/embeddings", json={"model": MODEL, "input": ["b", text]}))
    assert (status, param) == (400, "input[1]")
    assert "maximum context length" in message
    body = {"model": MODEL, "input": text, "truncate_prompt_tokens": 4}
    found = http.post("/v1/embeddings", json=body).json()
    assert found["data"][0]["embedding"] == near(wanted("axyz"))
    assert found["usage"]["prompt_tokens"] == 4
    for limit in (-1, -1.0):
        found = http.post("/v1/embeddings", json={**body, "truncate_prompt_tokens": limit}).json()
        assert found["data"][0]["embedding"] == near(wanted(text[-MAX_MODEL_LEN:]))


LONG = "a" * (MAX_MODEL_LEN + 1)
"""Too long for the node, which counts tokens."""
LONGER = "a" * 65 * MAX_MODEL_LEN
"""Too long even if each token had as many bytes as the longest one, so the queue refuses it."""


@pytest.mark.parametrize("long", [LONG, LONGER], ids=["by the node", "by the queue"])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("v1/embeddings", {"input": ["b", "c", "?"]}, "input[2]"),
        ("v1/embeddings", {"input": "?"}, "input"),
        ("v1/embeddings", {"input": ["?"]}, "input"),
        ("rerank", {"query": "?", "documents": ["b"]}, "query"),
        ("rerank", {"query": "b", "documents": ["c", {"text": "?"}]}, "documents[1]"),
        ("score", {"text_1": "?", "text_2": ["b"]}, "text_1"),
        ("score", {"text_1": "b", "text_2": ["?", "c"]}, "text_2[0]"),
        ("score", {"text_1": ["b", "?"], "text_2": ["c", "d"]}, "text_1[1]"),
        ("score", {"text_1": ["b", "c"], "text_2": ["d", "?"]}, "text_2[1]"),
        ("v1/completions", {"prompt": ["b", "?"]}, "prompt[1]"),
    ],
)
def test_refusal_names_the_text_among_several(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, long: str
) -> None:
    given = json.loads(json.dumps({"model": MODEL, **body}).replace("?", long))
    status, found, message = refusal(http.post(f"/{path}", json=given))
    assert (status, found) == (400, param)
    assert "maximum context length" in message


def test_stream_names_the_prompt_that_its_node_refuses(http: httpx.Client) -> None:
    """The refusal is the answer, or an event if the stream has begun."""
    body = {"model": MODEL, "prompt": ["b", LONG], "stream": True}
    assert '"param":"prompt[1]"' in http.post("/v1/completions", json=body).text


def test_text_may_fill_the_context(http: httpx.Client) -> None:
    text = "ab" * (MAX_MODEL_LEN // 2)
    found = http.post("/v1/embeddings", json={"model": MODEL, "input": text}).json()
    assert found["data"][0]["embedding"] == near(wanted(text))


def test_model_may_be_omitted_if_only_one_is_served(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"input": "Hello"}).json()["model"] == MODEL


def test_adapter_is_named_as_the_model(http: httpx.Client, engine: EchoEngine) -> None:
    assert http.post("/v1/embeddings", json={"model": "echo-tuned", "input": "Hello"}).status_code == 200
    assert engine.last_adapter is not None
    assert engine.last_adapter.name == "echo-tuned"


@pytest.mark.parametrize("count", [MAX_JOBS_SHOWN + 1, pytest.param(MAX_INPUTS, marks=pytest.mark.slow)])
def test_as_many_texts_as_openai_allows_are_one_request(http: httpx.Client, count: int) -> None:
    texts = [f"text {number}" for number in range(count)]
    answer = http.post("/v1/embeddings", json={"model": MODEL, "input": texts, "priority": "batch"}, timeout=120)
    assert answer.status_code == 200
    got = [one["embedding"] for one in answer.json()["data"]]
    np.testing.assert_allclose(got, [wanted(text) for text in texts], rtol=0, atol=1e-6)
    assert len(answer.headers["X-Penstock-Job"].split(", ")) == MAX_JOBS_SHOWN


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("v1/embeddings", {}, "input", "required"),
        ("v1/embeddings", {"input": []}, "input", f"a list of 1 to {MAX_INPUTS} of either"),
        ("v1/embeddings", {"input": ["x"] * (MAX_INPUTS + 1)}, "input", f"a list of 1 to {MAX_INPUTS} of either"),
        ("v1/embeddings", {"input": [[]]}, "input", "must be a string"),
        ("v1/embeddings", {"input": ["x", {"text": "x"}]}, "input", "item 1 must be a string"),
        ("v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ("v1/embeddings", {"input": "x", "pooling": "max"}, "pooling", "'mean', 'last' or 'cls'"),
        ("v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions", "at least 1"),
        ("v1/embeddings", {"input": "x", "dimensions": 9}, "dimensions", "this model's embeddings have 8"),
        ("v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ("v1/embeddings", {"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
        ("v1/embeddings", {"input": "x", "normalize": False}, "normalize", "have length 1"),
        ("v1/embeddings", {"input": "x", "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
        ("v1/embeddings", {"input": "x", "stream": True}, "stream", "unknown field"),
        ("rerank", {"query": "x", "documents": []}, "documents", "at least 1"),
        ("rerank", {"query": "x", "documents": ["x"] * MAX_INPUTS}, "documents", f"at most {MAX_INPUTS - 1}"),
        ("rerank", {"documents": ["x"]}, "query", "required"),
        ("rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n", "at least 0"),
        ("rerank", {"query": "x", "documents": ["x"], "rank_fields": ["t"]}, "rank_fields", "not supported"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "as many texts as text_1"),
        ("score", {"text_1": "a"}, "text_2", "required"),
        ("score", {"text_1": ["a"] * 1025, "text_2": ["a"] * 1025}, "text_2", f"at most {MAX_INPUTS} in all"),
    ],
)
def test_wrong_body_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    status, found, text = refusal(http.post(f"/{path}", json={"model": MODEL, **body}))
    assert (status, found) == (400, param)
    assert message in text


def test_unknown_model_is_refused(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"model": "nope", "input": "x"}).status_code == 404


def test_openais_client_gets_the_vectors(api: openai.OpenAI) -> None:
    """By default it asks for base64 and decodes it."""
    found = api.embeddings.create(model=MODEL, input=["Hello", "you"], user="me")
    assert [one.embedding for one in found.data] == [near(wanted("Hello")), near(wanted("you"))]
    assert found.usage.prompt_tokens == found.usage.total_tokens == 8
    as_floats = api.embeddings.create(model=MODEL, input="Hello", encoding_format="float")
    assert as_floats.data[0].embedding == near(wanted("Hello"))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_similarity_to_the_query(http: httpx.Client, path: str) -> None:
    documents = ["zzz", "Hello you", "Hello"]
    found = http.post(path, json={"model": MODEL, "query": "Hello!", "documents": documents}).json()
    scores = [similarity("Hello!", document) for document in documents]
    order = sorted(range(3), key=lambda at: -scores[at])
    assert order[-1] == 0
    assert found["results"] == [
        {"index": at, "document": {"text": documents[at]}, "relevance_score": pytest.approx(scores[at], abs=1e-6)}
        for at in order
    ]
    assert found["model"] == MODEL
    assert found["usage"] == {"prompt_tokens": 6 + 3 + 9 + 5, "total_tokens": 23}


def test_best_documents_come_alone_and_without_text_if_asked_for(http: httpx.Client) -> None:
    body = {"model": MODEL, "query": "Hello!", "documents": ["zzz", {"text": "Hello"}], "top_n": 1}
    (found,) = http.post("/rerank", json=body).json()["results"]
    assert found["document"] == {"text": "Hello"}
    (found,) = http.post("/rerank", json={**body, "return_documents": False, "pooling": "cls"}).json()["results"]
    assert found == {"index": 1, "relevance_score": pytest.approx(1, abs=1e-6)}


def test_large_documents_come_back_whole(http: httpx.Client) -> None:
    """The parser process reads a body of this size."""
    documents = [f"{number} " + 'é"\n' * 60_000 for number in range(12)]
    body = {"model": MODEL, "query": "x", "documents": documents, "truncate_prompt_tokens": 9}
    found = http.post("/rerank", json=body).json()["results"]
    assert sorted(one["index"] for one in found) == list(range(12))
    assert all(one["document"]["text"] == documents[one["index"]] for one in found)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_texts_are_scored_in_vllms_shape(http: httpx.Client, path: str, names: tuple[str, str]) -> None:
    first, second = names
    found = http.post(path, json={"model": MODEL, first: "Hello", second: ["Hello", "zzz"]}).json()
    assert [(one["index"], one["object"]) for one in found["data"]] == [(0, "score"), (1, "score")]
    assert [one["score"] for one in found["data"]] == near([1.0, similarity("Hello", "zzz")])
    pairs = http.post(path, json={"model": MODEL, first: ["a", "b"], second: ["a", "zzz"]}).json()
    assert [one["score"] for one in pairs["data"]] == near([1.0, similarity("b", "zzz")])
    assert (found["object"], found["usage"]["prompt_tokens"]) == ("list", 13)


def test_usage_counts_a_job_for_each_text_and_its_prompt_tokens(stack: Stack, http: httpx.Client) -> None:
    def counted() -> list[int]:
        rows = [row for row in http.get("/v1/usage?all=true").json()["data"] if row["pool"] == "echo"]
        return [sum(row[name] for row in rows) for name in ("jobs", "prompt_tokens", "completion_tokens")]

    before = counted()
    http.post("/v1/embeddings", json={"model": MODEL, "input": ["Hello", "you"]})
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [2, 8, 0]


def test_python_clients_embed_in_the_order_of_the_prompts(stack: Stack, engine: EchoEngine) -> None:
    texts = [f"text {number}" for number in range(5)]
    with Client(stack.redis_url) as client:
        found = client.embed([*texts, [5, 6]], model=MODEL, pooling="last", dimensions=4)
        assert all(isinstance(one, Embedding) for one in found)
        vectors = [wanted(text, pooling="last", dimensions=4) for text in texts]
        assert [list(one.values) for one in found[:-1]] == [near(vector) for vector in vectors]
        assert list(found[-1].values) == near(wanted([5, 6], pooling="last", dimensions=4))
        assert [one.num_tokens for one in found] == [6, 6, 6, 6, 6, 2]
        assert client.embed([], model=MODEL) == []
        for options in ({"dimensions": 9}, {"dimensions": 0}, {"pooling": "max"}):
            with pytest.raises(RequestError) as caught:
                client.embed(["x"], model=MODEL, **options)
            assert caught.value.param == next(iter(options))
        with pytest.raises(RequestError, match="must be a list"):
            client.embed("text", model=MODEL)


def test_failed_text_cancels_the_others(stack: Stack, engine: EchoEngine) -> None:
    async def embed() -> int:
        async with AsyncClient(stack.redis_url) as client:
            with pytest.raises(RequestError, match="maximum context length"):
                await client.embed(["a", [1] * (MAX_MODEL_LEN + 1), "b"], model=MODEL)
            job = await client.submit("Hello", model=MODEL, task=Embed())
            result = await job.result()
            assert result.usage is not None
            assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 0)
            assert (await client.result(job.id)).output == result.output
            return (await job.status()).num_chunks

    assert stack.call(embed()) == 1


def test_job_has_no_sampling_parameters(stack: Stack, engine: EchoEngine) -> None:
    with Client(stack.redis_url) as client, pytest.raises(RequestError, match="has no sampling parameters"):
        client.submit("x", model=MODEL, task=Embed(), params=SamplingParams(max_tokens=3))


def test_nodes_of_an_older_release_are_named(stack: Stack, engine: EchoEngine) -> None:
    async def announce() -> None:
        redis = connect(stack.redis_url)
        record = PoolRecord("elder", "acme/elder", kinds=("generate", "tokenize", "detokenize"))
        for command in announcing(record):
            await redis.execute_command(*command)  # type: ignore[no-untyped-call]
        await redis.aclose()

    stack.call(announce())
    with Client(stack.redis_url) as client, pytest.raises(UnsupportedKindError, match="kind 'embed'; upgrade them"):
        client.embed(["x"], model="acme/elder")


def test_more_texts_than_jobs_may_be_open_are_refused_by_name(stack: Stack, redis_url: str) -> None:
    model = "acme/few"
    stack.start_node(EchoEngine(), model=model, pool="few", max_open_jobs=3)
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as http:
        assert http.post("/v1/embeddings", json={"model": model, "input": ["a"] * 3}).status_code == 200
        for path, body, param in (
            ("/v1/embeddings", {"input": ["a"] * 4}, "input"),
            ("/rerank", {"query": "a", "documents": ["b"] * 3}, "documents"),
            ("/v1/completions", {"prompt": ["a"] * 4}, "prompt"),
        ):
            status, named, message = refusal(http.post(path, json={"model": model, **body}))
            assert (status, named) == (400, param)
            assert "at most 3 open jobs (max_open_jobs)" in message


def test_more_texts_than_a_key_may_have_jobs_are_refused_by_name() -> None:
    body = ParsedBody(MODEL, ["a"] * 4, names={"prompt": "input"})
    check_num_jobs(body, Terms(max_open_jobs=4), ServedPool("echo", MODEL))
    with pytest.raises(RequestError) as caught:
        check_num_jobs(body, Terms(max_open_jobs=3), ServedPool("echo", MODEL))
    assert caught.value.param == "input"
    assert caught.value.message.startswith("input: 4 prompts become as many jobs, and this tenant may have at most 3")
