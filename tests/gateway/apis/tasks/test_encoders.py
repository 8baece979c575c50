"""Encoders behind the gateway: many texts share a job, pairs are scored, and a pool does what its model can."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import HIDDEN, POSITIONS, logits_of, write_encoder, write_modules

from penstock import AsyncClient, Client, PromptTooLongError, RequestError
from penstock.contract.tasks import MAX_TEXTS_OF_JOB
from penstock.gpu_node.engine.encoder.engine import EncoderEngine
from penstock.producer.batch.answer import answer
from penstock.producer.batch.request import request_of_line
from tests.gateway.conftest import EchoEngine, Stack

TEXTS = [f"the cat {number} sat on a mat" for number in range(150)]
LONG = "the dog ran far away " * 9
QUERY, DOCUMENTS = "query cat", ["the dog ran", "hello, world", "the cat sat on a mat"]
NUM_JOBS = -(-len(TEXTS) // MAX_TEXTS_OF_JOB)


@dataclass(frozen=True)
class Doors:
    """A gateway before an encoder that embeds, one that scores pairs, and a model that generates text."""

    http: httpx.Client
    embedder: EncoderEngine
    scores: dict[str, float]
    """Of each document for the query."""


@pytest.fixture(scope="module")
def doors(stack: Stack, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folders = [tmp_path_factory.mktemp(name) for name in ("embed", "score")]
    with quiet():
        write_encoder(folders[0])
        write_modules(folders[0], "Pooling", "Normalize")
        scorer = write_encoder(folders[1], "BertForSequenceClassification", num_labels=1)
    logits = logits_of(scorer, folders[1], [(QUERY, one) for one in DOCUMENTS], POSITIONS)[:, 0]
    engines = [EncoderEngine(str(folder), num_threads=1) for folder in folders]
    # The node's engine has a thread of its own, so that the test uses another one.
    beside = EncoderEngine(str(folders[0]), num_threads=1)
    for engine, name in zip(engines, ("mini", "cross"), strict=True):
        stack.start_node(engine, model=f"acme/{name}", pool=name, max_num_seqs=engine.max_num_seqs)
    stack.start_node(EchoEngine(), model="acme/chat", pool="chat")
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as http:
        yield Doors(http, beside, dict(zip(DOCUMENTS, 1 / (1 + np.exp(-logits)), strict=True)))


def refusal(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_many_texts_share_a_job_and_come_back_in_their_order(doors: Doors) -> None:
    answer = doors.http.post("/v1/embeddings", json={"model": "acme/mini", "input": TEXTS})
    found = answer.json()
    assert [one["index"] for one in found["data"]] == list(range(len(TEXTS)))
    vectors = np.array([one["embedding"] for one in found["data"]])
    assert np.abs(vectors - doors.embedder.embed(TEXTS)).max() < 1e-5
    assert len(answer.headers["X-Penstock-Job"].split(", ")) == NUM_JOBS
    assert found["usage"]["prompt_tokens"] == sum(len(doors.embedder.tokenizer.encode(text)) for text in TEXTS)


def test_an_error_names_the_number_of_its_text(doors: Doors) -> None:
    texts = [*TEXTS[:70], LONG]
    status, param, message = refusal(doors.http.post("/v1/embeddings", json={"model": "acme/mini", "input": texts}))
    assert (status, param) == (400, "input[70]")
    assert message.startswith("input[70]: 47 tokens, but this model takes 24 at most")
    whole = {"model": "acme/mini", "input": LONG}
    assert refusal(doors.http.post("/v1/embeddings", json=whole))[:2] == (400, "input")
    assert doors.http.post("/v1/embeddings", json={**whole, "truncate_prompt_tokens": -1}).is_success
    assert refusal(doors.http.post("/v1/embeddings", json={**whole, "input": ["a", ""]}))[1] in ("input", "input[1]")


def test_a_pool_of_an_encoder_refuses_what_its_model_cannot_do_and_names_one_that_can(doors: Doors) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    said = "model 'acme/mini' cannot generate text; models that can: acme/chat"
    assert refusal(doors.http.post("/v1/chat/completions", json={"model": "acme/mini", **chat})) == (400, "model", said)
    said = "model 'acme/cross' cannot embed texts; models that can: acme/chat, acme/mini"
    assert refusal(doors.http.post("/v1/embeddings", json={"model": "acme/cross", "input": "a"})) == (
        400,
        "model",
        said,
    )
    said = "model 'acme/mini' cannot classify texts; models that can: acme/cross"
    assert refusal(doors.http.post("/classify", json={"model": "acme/mini", "input": "a"})) == (400, "model", said)


def test_without_a_model_the_only_pool_that_can_answers(doors: Doors) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert doors.http.post("/v1/chat/completions", json=chat).json()["model"] == "acme/chat"
    assert doors.http.post("/classify", json={"input": "a"}).json()["model"] == "acme/cross"
    status, param, message = refusal(doors.http.post("/v1/embeddings", json={"input": "a"}))
    assert (status, param, message) == (400, "model", "model must be named; served: acme/chat, acme/mini, echo-tuned")


@pytest.mark.parametrize("model", [{"model": "acme/cross"}, {}], ids=["named", "chosen"])
def test_documents_are_ranked_by_scores_of_pairs(doors: Doors, model: dict[str, str]) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, **model}
    answer = doors.http.post("/rerank", json=body)
    found = answer.json()
    best = sorted(DOCUMENTS, key=lambda one: -doors.scores[one])[:2]
    assert [one["document"]["text"] for one in found["results"]] == best
    assert [one["index"] for one in found["results"]] == [DOCUMENTS.index(one) for one in best]
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx([doors.scores[one] for one in best])
    assert "X-Penstock-Notice" not in answer.headers
    assert len(answer.headers["X-Penstock-Job"].split(", ")) == 1


def test_a_document_that_is_too_long_is_named(doors: Doors) -> None:
    body = {"model": "acme/cross", "query": QUERY, "documents": ["a", LONG + LONG]}
    assert refusal(doors.http.post("/rerank", json=body))[:2] == (400, "documents[1]")
    assert doors.http.post("/rerank", json={**body, "truncate_prompt_tokens": -1}).is_success


def test_query_and_documents_have_limits_of_their_own(doors: Doors, redis_url: str) -> None:
    body = {"model": "acme/cross", "query": "query cat", "documents": ["the cat sat far away", "hello"]}
    short = {**body, "query": "query", "documents": ["the cat", "hello"]}

    def scores(**fields: object) -> dict[int, float]:
        found = doors.http.post("/v1/rerank", json=fields).raise_for_status().json()["results"]
        return {one["index"]: one["relevance_score"] for one in found}

    limits = {"max_tokens_per_query": 1, "max_tokens_per_doc": 2}
    assert scores(**body, **limits) == scores(**short) != scores(**body)
    ends = {**body, "documents": ["far away", "hello"]}
    assert scores(**body, max_tokens_per_doc=2, truncation_side="left") == scores(**ends)
    # Beyond the model's limit, this is enough.
    assert doors.http.post("/rerank", json={**body, "documents": [LONG + LONG], "max_tokens_per_doc": 4}).is_success
    pairs = {"model": "acme/cross", "text_1": body["query"], "text_2": body["documents"], **limits}
    found = doors.http.post("/score", json=pairs).json()["data"]
    assert dict(enumerate(one["score"] for one in found)) == scores(**short)
    with Client(redis_url, tenant="limits") as client:
        ranked = client.rerank("query cat", ["the cat sat far away", "hello"], model="acme/cross", **limits)  # type: ignore[arg-type]
        assert {one.index: one.score for one in ranked} == scores(**short)


def test_a_model_that_only_embeds_takes_no_limits_of_single_texts(doors: Doors, redis_url: str) -> None:
    body = {"model": "acme/mini", "query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 2}
    status, param, message = refusal(doors.http.post("/rerank", json=body))
    assert (status, param) == (400, "max_tokens_per_doc")
    assert message.endswith("truncate_prompt_tokens shortens each text")
    assert refusal(doors.http.post("/rerank", json={**body, "max_tokens_per_doc": 0}))[:2] == (400, param)
    with Client(redis_url, tenant="limits") as client, pytest.raises(RequestError, match="compares embeddings"):
        client.rerank(QUERY, DOCUMENTS, model="acme/mini", max_tokens_per_query=2)


def test_a_model_that_only_embeds_ranks_by_the_cosine(doors: Doors) -> None:
    body = {"model": "acme/mini", "query": QUERY, "documents": DOCUMENTS, "return_documents": False}
    found = {one["index"]: one["relevance_score"] for one in doors.http.post("/rerank", json=body).json()["results"]}
    query, *documents = doors.embedder.embed([QUERY, *DOCUMENTS])
    assert [found[at] for at in range(len(DOCUMENTS))] == pytest.approx([float(query @ one) for one in documents])


def test_scores_of_pairs_have_vllms_shape(doors: Doors) -> None:
    one = doors.http.post("/score", json={"model": "acme/cross", "text_1": QUERY, "text_2": DOCUMENTS}).json()
    expected = [doors.scores[document] for document in DOCUMENTS]
    assert [found["score"] for found in one["data"]] == pytest.approx(expected)
    assert [(found["index"], found["object"]) for found in one["data"]] == [(at, "score") for at in range(3)]
    body = {"model": "acme/cross", "text_1": [QUERY] * 2, "text_2": DOCUMENTS[:2]}
    assert [one["score"] for one in doors.http.post("/score", json=body).json()["data"]] == pytest.approx(expected[:2])
    body["text_2"] = ["a", LONG + LONG]
    assert refusal(doors.http.post("/score", json=body))[:2] == (400, "text_2[1]")


def test_labels_have_vllms_shape(doors: Doors) -> None:
    found = doors.http.post("/classify", json={"model": "acme/cross", "input": DOCUMENTS[:2]}).json()
    assert found["object"] == "list"
    assert [(one["index"], one["label"], one["num_classes"]) for one in found["data"]] == [
        (0, "LABEL_0", 1),
        (1, "LABEL_0", 1),
    ]
    raw = doors.http.post("/classify", json={"model": "acme/cross", "input": DOCUMENTS[:2], "use_activation": False})
    for of_text, of_raw in zip(found["data"], raw.json()["data"], strict=True):
        assert of_text["probs"] == pytest.approx([1 / (1 + np.exp(-of_raw["probs"][0]))])


def test_the_list_of_models_says_kinds_and_dimensions(doors: Doors) -> None:
    found = {one["id"]: one for one in doors.http.get("/v1/models").json()["data"]}
    mini, cross = found["acme/mini"], found["acme/cross"]
    assert (mini["capabilities"], mini["dimensions"], mini["max_model_len"]) == (["embed"], HIDDEN, 24)
    assert mini["kinds"] == ["tokenize", "detokenize", "embed"]
    assert (cross["capabilities"], "dimensions" in cross) == (["score", "classify"], False)
    assert "generate" in found["acme/chat"]["kinds"]


def test_the_client_embeds_ranks_and_labels(doors: Doors, redis_url: str) -> None:
    with Client(redis_url) as client:
        found = client.embed(TEXTS, model="acme/mini")
        assert np.abs(np.array([one.values for one in found]) - doors.embedder.embed(TEXTS)).max() < 1e-5
        assert found[0].num_tokens == len(doors.embedder.tokenizer.encode(TEXTS[0]))
        ranked = client.rerank(QUERY, DOCUMENTS, model="acme/cross", top_n=2)
        best = sorted(DOCUMENTS, key=lambda one: -doors.scores[one])[:2]
        assert [DOCUMENTS[one.index] for one in ranked] == best
        assert [one.score for one in ranked] == pytest.approx([doors.scores[one] for one in best])
        cosines = client.rerank(QUERY, DOCUMENTS, model="acme/mini")
        assert [one.score for one in cosines] == sorted((one.score for one in cosines), reverse=True)
        (label,) = client.classify(["the cat"], model="acme/cross")
        assert label.scores == {"LABEL_0": pytest.approx(label.scores["LABEL_0"])}
        with pytest.raises(PromptTooLongError) as refused:
            client.embed([*TEXTS[:66], LONG], model="acme/mini")
        assert refused.value.param == "prompt[66]"
        with pytest.raises(RequestError, match="cannot classify texts; models that can: acme/cross"):
            client.classify(["a"], model="acme/mini")


def test_a_job_of_many_texts_shows_a_row_for_each(doors: Doors) -> None:
    answer = doors.http.post("/v1/embeddings", json={"model": "acme/mini", "input": TEXTS[:3]})
    job_id = answer.headers["X-Penstock-Job"]
    found = doors.http.get(f"/v1/jobs/{job_id}").json()["result"]
    assert np.abs(np.array(found["rows"]) - doors.embedder.embed(TEXTS[:3])).max() < 1e-5


def row_of(redis_url: str, name: str, body: dict[str, object]) -> dict[str, Any]:
    """Return the body of the answer to a row of a batch file."""

    key = hashlib.sha256(f"{name} {body}".encode()).hexdigest()

    async def answered() -> dict[str, Any]:
        async with AsyncClient(redis_url) as client:
            request = request_of_line({"url": f"/v1/{name}", "body": body})
            _, found = await answer(client, request, key)
            return found

    return asyncio.run(answered())


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("rerank", {"model": "acme/cross", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}),
        ("rerank", {"model": "acme/mini", "query": QUERY, "documents": DOCUMENTS, "return_documents": False}),
        ("score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("score", {"model": "acme/mini", "text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[1:]}),
        ("classify", {"model": "acme/cross", "input": DOCUMENTS}),
    ],
)
def test_a_row_of_a_batch_has_the_answer_of_its_route(
    doors: Doors, redis_url: str, name: str, body: dict[str, object]
) -> None:
    row, whole = row_of(redis_url, name, body), doors.http.post(f"/v1/{name}", json=body).json()
    for answered in (row, whole):
        for own in ("id", "created"):
            answered.pop(own, None)
    assert row == whole


def test_an_error_of_a_row_names_its_text(doors: Doors, redis_url: str) -> None:
    with pytest.raises(PromptTooLongError) as refused:
        row_of(redis_url, "rerank", {"model": "acme/cross", "query": QUERY, "documents": ["a", LONG + LONG]})
    assert refused.value.param == "documents[1]"
    with pytest.raises(RequestError, match="models that can: acme/cross") as unable:
        row_of(redis_url, "classify", {"model": "acme/mini", "input": "a"})
    assert unable.value.param == "model"


# The routes of text-embeddings-inference, and `/pooling`.


def test_embed_returns_a_list_of_vectors(doors: Doors) -> None:
    vectors = doors.embedder.embed(DOCUMENTS)
    body = {"model": "acme/mini", "inputs": DOCUMENTS, "truncate": True, "truncation_direction": "Right"}
    assert np.abs(np.array(doors.http.post("/embed", json=body).json()) - vectors).max() < 1e-5
    one = doors.http.post("/embed", json={"model": "acme/mini", "inputs": QUERY, "dimensions": 4}).json()
    assert len(one) == 1
    assert np.linalg.norm(one[0]) == pytest.approx(1)


def test_truncation_keeps_the_end_of_a_text_if_it_is_asked_to(doors: Doors) -> None:
    body = {"model": "acme/mini", "inputs": f"hello {LONG} cat", "truncate": True}
    first, last = (
        np.array(doors.http.post("/embed", json={**body, "truncation_direction": side}).json()[0])
        for side in ("Right", "left")
    )
    tokens = doors.embedder.tokenizer.encode(f"hello {LONG} cat")
    kept = [[*tokens[:23], tokens[-1]], [tokens[0], *tokens[-23:]]]
    assert np.abs(np.array([first, last]) - doors.embedder.embed(kept)).max() < 1e-5
    ids = {"model": "acme/mini", "input": [tokens], "truncate_prompt_tokens": -1, "truncation_side": "left"}
    found = doors.http.post("/v1/embeddings", json=ids).json()["data"][0]["embedding"]
    assert np.abs(np.array(found) - last).max() < 1e-5
    status, param, message = refusal(doors.http.post("/embed", json={**body, "truncate": False}))
    assert (status, param) == (400, "inputs")
    assert "this model takes 24 at most" in message


def test_rerank_of_texts_has_the_shape_of_text_embeddings_inference(doors: Doors) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": False, "return_text": True, "truncate": True}
    for path in ("/rerank", "/"):
        found = doors.http.post(path, json=body).json()
        assert [one["text"] for one in found] == sorted(DOCUMENTS, key=lambda one: -doors.scores[one])
        assert [one["score"] for one in found] == pytest.approx(sorted(doors.scores.values(), reverse=True))
        assert [DOCUMENTS[one["index"]] for one in found] == [one["text"] for one in found]
    raw = doors.http.post("/rerank", json={**body, "raw_scores": True, "return_text": False}).json()
    assert [1 / (1 + np.exp(-one["score"])) for one in raw] == pytest.approx([one["score"] for one in found])
    assert "text" not in raw[0]


def test_predict_gives_each_text_its_labels(doors: Doors) -> None:
    one = doors.http.post("/predict", json={"inputs": DOCUMENTS[0]}).json()
    assert [label["label"] for label in one] == ["LABEL_0"]
    several = doors.http.post("/predict", json={"inputs": [[text] for text in DOCUMENTS], "raw_scores": True}).json()
    assert 1 / (1 + np.exp(-several[0][0]["score"])) == pytest.approx(one[0]["score"])
    assert len(several) == len(DOCUMENTS)
    of_hub = doors.http.post("/predict", json={"inputs": DOCUMENTS[0], "parameters": {"top_k": 1}}).json()
    assert of_hub == [one]


def test_similarity_compares_a_sentence_with_others(doors: Doors) -> None:
    query, *documents = doors.embedder.embed([QUERY, *DOCUMENTS])
    inputs = {"source_sentence": QUERY, "sentences": DOCUMENTS}
    for path, more in (("/similarity", {}), ("/similarity", {"parameters": {"truncate": True}}), ("/", {})):
        found = doors.http.post(path, json={"model": "acme/mini", "inputs": inputs, **more}).json()
        assert found == pytest.approx([float(query @ one) for one in documents])


def test_the_root_embeds_or_labels_as_the_model_does(doors: Doors) -> None:
    vectors = doors.http.post("/", json={"model": "acme/mini", "inputs": DOCUMENTS}).json()
    assert np.abs(np.array(vectors) - doors.embedder.embed(DOCUMENTS)).max() < 1e-5
    labels = doors.http.post("/", json={"model": "acme/cross", "inputs": DOCUMENTS}).json()
    assert [[one["label"] for one in of_text] for of_text in labels] == [["LABEL_0"]] * len(DOCUMENTS)
    page = doors.http.get("/", headers={"Accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html")


def test_tokenize_of_inputs_says_where_each_token_stands(doors: Doors) -> None:
    texts = ["the Cat!", "dog"]
    found = doors.http.post("/tokenize", json={"model": "acme/mini", "inputs": texts}).json()
    assert [[one["id"] for one in of_text] for of_text in found] == [doors.embedder.tokenizer.encode(t) for t in texts]
    shown = [(one["text"], one["special"], one["start"], one["stop"]) for one in found[0]]
    assert shown == [
        ("[CLS]", True, None, None),
        ("the", False, 0, 3),
        ("Cat", False, 4, 7),
        ("!", False, 7, 8),
        ("[SEP]", True, None, None),
    ]
    assert len(doors.http.post("/tokenize", json={"model": "acme/mini", "inputs": "dog"}).json()) == 1


def test_info_says_what_a_model_is(doors: Doors) -> None:
    mini = doors.http.get("/info", params={"model": "acme/mini"}).json()
    assert (mini["model_id"], mini["max_input_length"]) == ("acme/mini", 24)
    assert "embedding" in mini["model_type"]
    assert "reranker" in doors.http.get("/info", params={"model": "acme/cross"}).json()["model_type"]
    status, param, message = refusal(doors.http.get("/info"))
    assert (status, param) == (400, "model")
    assert "acme/cross" in message
    assert "acme/mini" in message


def test_pooling_returns_what_the_model_makes_of_texts(doors: Doors) -> None:
    found = doors.http.post("/pooling", json={"model": "acme/mini", "input": DOCUMENTS}).json()
    assert found["object"] == "list"
    assert [(one["index"], one["object"]) for one in found["data"]] == [(at, "pooling") for at in range(3)]
    vectors = np.array([one["data"] for one in found["data"]])
    assert np.abs(vectors - doors.embedder.embed(DOCUMENTS)).max() < 1e-5
    raw = {"model": "acme/cross", "input": DOCUMENTS[0], "use_activation": False}
    (logit,) = doors.http.post("/pooling", json=raw).json()["data"][0]["data"]
    (label,) = doors.http.post("/predict", json={"inputs": DOCUMENTS[0]}).json()
    assert 1 / (1 + np.exp(-logit)) == pytest.approx(label["score"])
    wanted = {"model": "acme/cross", "input": "a", "task": "embed"}
    assert refusal(doors.http.post("/pooling", json=wanted))[2].startswith("model 'acme/cross' cannot embed texts")


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("rerank", {"query": "a"}, "texts", "either documents or texts"),
        ("rerank", {"query": "a", "texts": ["a"], "documents": ["a"]}, "texts", "either documents or texts"),
        ("rerank", {"query": "a", "texts": []}, "texts", "at least 1"),
        ("rerank", {"query": "", "texts": ["a"]}, "query", "empty"),
        ("rerank", {"query": "a", "texts": ["a", ""]}, "texts[1]", "empty"),
        ("embed", {"inputs": []}, "inputs", "1 to 2048"),
        ("embed", {"inputs": ["a", ""], "model": "acme/mini"}, "inputs[1]", "empty"),
        ("embed", {"inputs": [[99999]], "model": "acme/mini"}, "inputs", "outside the vocabulary"),
        ("embed", {"inputs": "a", "dimensions": 99, "model": "acme/mini"}, "dimensions", "have 32"),
        ("embed", {"inputs": "a", "prompt_name": "query", "model": "acme/mini"}, "prompt_name", "prompts are: none"),
        ("embed", {"inputs": "a", "truncation_direction": "up"}, "truncation_direction", "'left' or 'right'"),
        ("predict", {"inputs": ["a", "b"]}, "inputs", "is a pair"),
        ("predict", {"inputs": [["a", "b"]]}, "inputs", "item 0 must be a list with one text"),
        ("predict", {"inputs": 7}, "inputs", "must be a text"),
        ("similarity", {"inputs": {"source_sentence": "a"}}, "inputs.sentences", "required"),
        ("similarity", {"inputs": {"source_sentence": "a", "sentences": [""]}, "model": "acme/mini"}, None, "empty"),
        ("", {"inputs": {"source_sentence": "a"}}, "inputs", "source_sentence"),
        ("", {"inputs": "a", "texts": ["b"]}, "texts", "either inputs, or query and texts"),
        ("", {}, "texts", "either inputs, or query and texts"),
        ("tokenize", {"inputs": ["a"], "prompt": "a"}, "messages", "either prompt or messages, or inputs"),
        ("pooling", {"input": "a", "task": "token_embed"}, "task", "'embed' or 'classify'"),
        ("v1/embeddings", {"input": "a", "input_type": "poem"}, "input_type", "'search_query'"),
    ],
)
def test_wrong_bodies_are_refused_by_name(
    doors: Doors, path: str, body: dict[str, object], param: str | None, message: str
) -> None:
    status, found, text = refusal(doors.http.post(f"/{path}", json=body))
    assert status == 400
    assert found == param or param is None
    assert message in text
