"""What encoders are not able to compute is refused through HTTP: by every route, by the text's name, with the limit."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fakes.processes.python_process import run_python
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import HIDDEN, states_of, tokens_of, write_encoder, write_modules

from penstock.gpu_node.engine.encoder.engine import EncoderEngine
from tests.gateway.conftest import EchoEngine, Stack

LONG = "the dog ran far away " * 20
"""More tokens than any of the models takes: 64."""
POISONED = "a mat"
"""The model computes NaN for it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedder without files about its pooling, which computes NaN for one word."""
    folder = tmp_path_factory.mktemp("poisoned")
    with quiet():
        module = write_encoder(folder)
        token = tokens_of(folder, ["mat"])[0]["input_ids"][0, 1]
        module.get_input_embeddings().weight.data[token] = float("nan")
        module.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def http(stack: Stack, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A gateway before an embedder, a cross-encoder, a model of three labels, and one that generates text."""
    scorer, labeler = (tmp_path_factory.mktemp(name) for name in ("scorer", "labeler"))
    with quiet():
        write_encoder(scorer, "BertForSequenceClassification", num_labels=1)
        write_encoder(labeler, "BertForSequenceClassification", num_labels=3)
    for name, path in (("mini", folder), ("cross", scorer), ("labels", labeler)):
        engine = EncoderEngine(str(path), num_threads=1)
        stack.start_node(engine, model=f"acme/{name}", pool=name, max_num_seqs=engine.max_num_seqs)  # type: ignore[arg-type]
    stack.start_node(EchoEngine(), model="acme/chat", pool="chat")
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as http:
        yield http


def refused(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str | None, str]:
    """Return the field and the message of a 400."""
    answer = http.post(f"/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def routes_with(bad: str) -> list[Any]:
    """Return for each route a body whose second text is `bad`, and the name of that text."""
    texts = ["the cat", bad]
    bodies: list[tuple[str, str, dict[str, Any], str]] = [
        ("v1/embeddings", "mini", {"input": texts}, "input[1]"),
        ("pooling", "mini", {"input": texts}, "input[1]"),
        ("embed", "mini", {"inputs": texts}, "inputs[1]"),
        ("", "mini", {"inputs": texts}, "inputs[1]"),
        ("similarity", "mini", {"inputs": {"source_sentence": "a", "sentences": texts}}, "inputs.sentences[1]"),
        ("rerank", "mini", {"query": "a", "documents": texts}, "documents[1]"),
        ("rerank", "cross", {"query": "a", "documents": texts}, "documents[1]"),
        ("rerank", "cross", {"query": "a", "texts": texts}, "texts[1]"),
        ("", "cross", {"query": "a", "texts": texts}, "texts[1]"),
        ("score", "cross", {"text_1": "a", "text_2": texts}, "text_2[1]"),
        ("score", "mini", {"text_1": "a", "text_2": texts}, "text_2[1]"),
        ("classify", "labels", {"input": texts}, "input[1]"),
        ("pooling", "labels", {"input": texts, "task": "classify"}, "input[1]"),
        ("predict", "labels", {"inputs": [[one] for one in texts]}, "inputs[1]"),
    ]
    made = [(path, {"model": f"acme/{model}", **body}, name) for path, model, body, name in bodies]
    return [pytest.param(*one, id=f"{one[0] or 'root'}-{one[1]['model']}-{one[2]}") for one in made]


@pytest.mark.parametrize(("path", "body", "name"), routes_with(LONG))
def test_a_text_beyond_the_limit_is_named_with_its_tokens_unless_the_caller_truncates(
    http: httpx.Client, path: str, body: dict[str, Any], name: str
) -> None:
    param, message = refused(http, path, body)
    assert param == name
    # The words, the marks around them, and in a pair the query with its mark.
    assert re.match(re.escape(name) + r": 10[24] tokens, but this model takes 64 at most", message)
    is_of_tei = "inputs" in body or "texts" in body
    cut = {"truncate": True} if is_of_tei else {"truncate_prompt_tokens": -1}
    assert http.post(f"/{path}", json={**body, **cut}).is_success


@pytest.mark.parametrize(("path", "body", "name"), routes_with(""))
def test_an_empty_text_is_named(http: httpx.Client, path: str, body: dict[str, Any], name: str) -> None:
    param, message = refused(http, path, body)
    assert param == name
    assert "empty" in message


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("v1/embeddings", {"input": []}, "input"),
        ("v1/embeddings", {"input": [[]]}, "input"),
        ("v1/embeddings", {"input": ""}, "input"),
        ("pooling", {"input": []}, "input"),
        ("embed", {"inputs": []}, "inputs"),
        ("", {"inputs": []}, "inputs"),
        ("similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
        ("similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}, "inputs.source_sentence"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "", "documents": ["a"]}, "query"),
        ("rerank", {"query": "a", "texts": []}, "texts"),
        ("score", {"text_1": "a", "text_2": []}, "text_2"),
        ("score", {"text_1": "", "text_2": ["a"]}, "text_1"),
        ("classify", {"input": []}, "input"),
        ("predict", {"inputs": []}, "inputs"),
    ],
)
def test_nothing_to_compute_is_refused(http: httpx.Client, path: str, body: dict[str, Any], name: str) -> None:
    models = {"classify": "labels", "predict": "labels", "score": "cross"}
    param, _ = refused(http, path, {"model": f"acme/{models.get(path, 'mini')}", **body})
    assert param is not None
    assert param.split("[")[0] == name


@pytest.mark.parametrize(
    ("path", "field"), [("v1/embeddings", "input"), ("pooling", "input"), ("embed", "inputs"), ("", "inputs")]
)
@pytest.mark.parametrize("token_id", [100_000, -1])
def test_a_token_id_outside_the_vocabulary_is_named(http: httpx.Client, path: str, field: str, token_id: int) -> None:
    param, _ = refused(http, path, {"model": "acme/mini", field: [[2, 3], [2, token_id]]})
    assert param is not None
    assert param.startswith(field)


@pytest.mark.parametrize(("path", "field"), [("v1/embeddings", "input"), ("embed", "inputs"), ("", "inputs")])
def test_more_dimensions_than_the_model_has_are_refused(http: httpx.Client, path: str, field: str) -> None:
    body = {"model": "acme/mini", field: "a", "dimensions": HIDDEN + 1}
    assert refused(http, path, body) == ("dimensions", f"dimensions is 33, but this model's embeddings have {HIDDEN}")
    assert http.post(f"/{path}", json={**body, "dimensions": HIDDEN}).is_success


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/chat/completions", CHAT),
        ("v1/completions", {"prompt": "hi", "max_tokens": 1}),
        ("v1/responses", {"input": "hi"}),
        ("v1/messages", CHAT),
    ],
)
@pytest.mark.parametrize("model", ["mini", "cross", "labels"])
def test_an_encoder_generates_no_text_and_a_model_that_does_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], model: str
) -> None:
    answer = http.post(f"/{path}", json={"model": f"acme/{model}", **body})
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert said.startswith(f"model 'acme/{model}' cannot generate text; models that can: acme/chat")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("rerank", {"query": "a", "documents": ["b"]}),
        ("rerank", {"query": "a", "texts": ["b"]}),
        ("score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_a_model_that_neither_scores_nor_embeds_ranks_nothing_and_one_that_does_is_named(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    param, message = refused(http, path, {"model": "acme/labels", **body})
    assert param == "model"
    assert message.startswith("model 'acme/labels' cannot")
    assert "acme/cross" in message


def test_without_files_of_its_pooling_a_model_embeds_by_the_mean(
    http: httpx.Client, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    with quiet():
        module = transformers.BertModel.from_pretrained(folder).eval()
    (states,) = states_of(module, folder, ["the cat"])
    found = http.post("/v1/embeddings", json={"model": "acme/mini", "input": "the cat"}).json()["data"][0]["embedding"]
    expected = states.mean(axis=0)
    # Without files, nothing says that vectors are normalized.
    assert np.allclose(found, expected, atol=1e-5)
    with caplog.at_level(logging.INFO, "penstock.gpu_node.model.encoders"):
        EncoderEngine(str(folder), num_threads=1)
    assert "no file names a pooling, so it is the mean of all tokens" in caplog.messages


def test_nan_of_one_text_is_its_own_error(http: httpx.Client) -> None:
    def embed(*texts: str) -> httpx.Response:
        return http.post("/v1/embeddings", json={"model": "acme/mini", "input": [*texts]})

    alone = embed("the cat", "a dog").json()["data"]
    with ThreadPoolExecutor(8) as pool:
        # Texts of several requests share steps.
        answers = list(pool.map(lambda at: embed("the cat", POISONED if at % 4 == 0 else "a dog"), range(24)))
    for at, answer in enumerate(answers):
        if at % 4:
            found = answer.json()["data"]
            for one, other in zip(found, alone, strict=True):
                assert np.allclose(one["embedding"], other["embedding"], atol=1e-5)
            continue
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (500, "model_error", "input[1]")
        assert "NaN" in error["message"]


@pytest.mark.process
def test_a_module_that_is_not_known_ends_the_node_by_its_name(redis_url: str, tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    with quiet():
        write_encoder(unknown)
    write_modules(unknown, "Pooling", "WordWeights")
    words = ("-m", "penstock", "node", str(unknown), "--redis-url", redis_url)
    done = run_python(*words, env={**os.environ, "PENSTOCK_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "module 'sentence_transformers.models.WordWeights' is not supported" in said
    assert "Traceback" not in said
