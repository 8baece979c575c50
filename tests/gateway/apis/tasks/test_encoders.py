"""Encoders behind the gateway: many texts share a job, pairs are scored, and a pool does what its model can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import HIDDEN, POSITIONS, logits_of, write_encoder, write_modules

from penstock import Client, PromptTooLongError, RequestError
from penstock.contract.tasks import MAX_TEXTS_OF_JOB
from penstock.gpu_node.engine.encoder.engine import EncoderEngine
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
