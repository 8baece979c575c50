"""Rerankers that generate text: a pair's score is that of two tokens after the model's template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from fixtures.small_transformers import quiet
from fixtures.tiny_model import make_tiny_model

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.engine import Engine
from tests.gateway.conftest import Stack

QUERY, DOCUMENTS = "the gate?", ["water stands above it", "the turbine never floods", "Größe"]
TEMPLATE = (
    "{% for one in messages %}{% if one.role == 'system' %}<|im_start|>{{ one.content }}{% endif %}"
    "{% if one.role == 'query' %}q: {{ one.content }}{% endif %}"
    "{% if one.role == 'document' %} d: {{ one.content }}{% endif %}{% endfor %}<|im_end|>"
)
SETTINGS = {"runner": "torch", "num_kv_blocks": 64, "num_threads": 1}


def write_logit_score(folder: Path, **config: object) -> None:
    """Write the files of sentence-transformers of a reranker with a head for its logits."""
    modules = [{"idx": 1, "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    prompts = {"prompts": {"search": "find"}, "default_prompt_name": "search"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def logits_of(folder: Path, texts: list[str], tokens: tuple[int, int]) -> list[float]:
    """Return how far the logit of the first token is above that of the second one, as transformers computes it."""
    import torch
    import transformers

    with quiet(), torch.inference_mode():
        module = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        found = [module(torch.tensor([tokenizer.encode(text)])).logits[0, -1] for text in texts]
    return [float(one[tokens[0]] - one[tokens[1]]) for one in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "mxbai-rerank-tiny-v2")


@pytest.fixture(scope="module")
def http(stack: Stack, folder: Path) -> Iterator[httpx.Client]:
    engine = Engine(str(folder), **SETTINGS)
    stack.start_node(engine, model="acme/judge", pool="judge")  # type: ignore[arg-type]
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as http:
        yield http


def test_a_model_known_by_its_name_scores_by_its_template(http: httpx.Client, folder: Path) -> None:
    engine = Engine(str(folder), **SETTINGS)
    assert engine.pairs is not None
    before, between, after = engine.pairs.parts
    ids = tuple(engine.tokenizer.id_of(token) or 0 for token in ("1", "0"))
    logits = logits_of(folder, [before + QUERY + between + one + after for one in DOCUMENTS], (ids[0], ids[1]))
    found = http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    scores = {one["index"]: one["relevance_score"] for one in found}
    assert [scores[at] for at in range(3)] == pytest.approx([1 / (1 + np.exp(-one)) for one in logits], rel=1e-3)
    raw = http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    assert {one["index"]: one["score"] for one in raw} == pytest.approx(dict(enumerate(logits)), rel=1e-3)
    pairs = {"text_1": [QUERY] * 2, "text_2": DOCUMENTS[:2]}
    assert [one["score"] for one in http.post("/score", json=pairs).json()["data"]] == pytest.approx(
        [scores[0], scores[1]]
    )


def test_the_pool_says_that_it_scores(http: httpx.Client) -> None:
    (judge,) = http.get("/v1/models").json()["data"]
    assert "score" in judge["kinds"]
    assert judge["capabilities"] == ["score"]


def test_a_long_document_is_refused_or_cut_before_the_end_of_the_template(http: httpx.Client, folder: Path) -> None:
    body = {"query": QUERY, "documents": ["a", "water " * 2000]}
    refused = http.post("/rerank", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents[1]"), refused.text
    assert "truncate_prompt_tokens -1" in refused.json()["error"]["message"]
    for side in ("left", "right"):
        whole = http.post("/rerank", json={**body, "truncate_prompt_tokens": 400, "truncation_side": side})
        assert whole.status_code == 200, whole.text
        assert len(whole.json()["results"]) == 2
    status, param = (one := http.post("/rerank", json={**body, "query": ""})).status_code, one.json()["error"]["param"]
    assert (status, param) == (400, "query")


def test_query_and_documents_have_limits_of_their_own(http: httpx.Client, folder: Path) -> None:
    tokenizer = Engine(str(folder), **SETTINGS).tokenizer
    query, document = (tokenizer.decode(tokenizer.encode(text, framed=False)[:3]) for text in (QUERY, DOCUMENTS[1]))
    short, long = {"query": query, "documents": [document]}, {"query": QUERY, "documents": [DOCUMENTS[1]]}
    limits = {"max_tokens_per_query": 3, "max_tokens_per_doc": 3}
    scores = [
        http.post("/rerank", json=body).raise_for_status().json()["results"][0]["relevance_score"]
        for body in (short, {**long, **limits}, long)
    ]
    assert scores[0] == scores[1] != scores[2]
    ended = http.post("/rerank", json={**long, **limits, "truncation_side": "left"}).raise_for_status()
    assert ended.json()["results"][0]["relevance_score"] not in scores


def test_files_of_sentence_transformers_name_tokens_and_template(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "judge")
    write_logit_score(folder, true_token_id=70, false_token_id=71)
    engine = Engine(str(folder), **SETTINGS)
    assert engine.pairs is not None
    assert engine.pairs.parts == ("<|im_start|>findq: ", " d: ", "<|im_end|>")
    write_logit_score(folder, true_token_id=70)
    assert Engine(str(folder), **SETTINGS).pairs is not None


@pytest.mark.parametrize(
    ("config", "template", "said"),
    [
        ({"true_token_id": "yes"}, TEMPLATE, "must be ids of tokens"),
        ({"true_token_id": 70, "false_token_id": 99_999}, TEMPLATE, "outside the vocabulary"),
        ({"true_token_id": 70}, "{{ messages[0].content }}", "does not write a query and then a document"),
    ],
)
def test_files_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, config: dict[str, object], template: str, said: str
) -> None:
    folder = make_tiny_model(tmp_path / "judge")
    write_logit_score(folder, **config)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=said):
        Engine(str(folder), **SETTINGS)
