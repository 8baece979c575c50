"""A request that sets no sampling gets the one that the model recommends, at every entry point."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import Client
from penstock.producer.batch.records import Batch
from penstock.producer.batch.runner import run_batch

MODEL = "acme/recommends"
DEFAULTS = {"temperature": 0.25, "top_p": 0.9, "top_k": 40}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def recommending(stack: Any, shared_engine: Any) -> Any:
    engine = type(shared_engine)()
    engine.sampling_defaults = dict(DEFAULTS)
    stack.start_node(engine, model=MODEL, pool="recommends")
    return engine


@pytest.fixture(scope="module")
def http(stack: Any, recommending: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as client:
        yield client


def sampling_of(engine: Any) -> dict[str, Any]:
    return {name: getattr(engine.last_params, name) for name in DEFAULTS}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": MODEL, "prompt": "hi"}),
        ("/v1/messages", CHAT | {"max_tokens": 5}),
        ("/v1/responses", {"model": MODEL, "input": "hi"}),
        ("/v1/jobs", {"model": MODEL, "prompt": "hi"}),
    ],
)
def test_every_api_applies_what_the_model_recommends(
    http: httpx.Client, recommending: Any, path: str, body: dict[str, Any]
) -> None:
    recommending.last_params = None
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    if path.startswith("/v1/jobs"):
        http.get(f"/v1/jobs/{answer.json()['id']}/stream")
    assert sampling_of(recommending) == DEFAULTS


def test_explicit_values_win_even_where_they_are_the_usual_default(http: httpx.Client, recommending: Any) -> None:
    explicit = {"temperature": 1.0, "top_k": 0}
    http.post("/v1/chat/completions", json=CHAT | explicit)
    assert sampling_of(recommending) == DEFAULTS | explicit
    http.post("/v1/chat/completions", json=CHAT | explicit | {"top_p": None})
    assert sampling_of(recommending) == DEFAULTS | explicit
    # Such a body is parsed in another process.
    large = CHAT | {"messages": [{"role": "user", "content": "x" * 300_000}], "truncate_prompt_tokens": 5} | explicit
    http.post("/v1/chat/completions", json=large)
    assert sampling_of(recommending) == DEFAULTS | explicit


def test_a_response_shows_the_sampling_that_it_used(http: httpx.Client) -> None:
    shown = http.post("/v1/responses", json={"model": MODEL, "input": "hi", "top_p": 0.5}).json()
    assert (shown["temperature"], shown["top_p"], shown["presence_penalty"]) == (0.25, 0.5, 0.0)
    assert http.get(f"/v1/responses/{shown['id']}").json()["temperature"] == 0.25


def test_python_and_batch_files_do_so_too(redis_url: str, recommending: Any, tmp_path: Path) -> None:
    with Client(redis_url) as client:
        client.generate(["hi"], model=MODEL)
        assert sampling_of(recommending) == DEFAULTS
        client.generate(["hi"], model=MODEL, temperature=0)
        assert sampling_of(recommending) == DEFAULTS | {"temperature": 0}
        assert client.tokenize("hi", model=MODEL)
    recommending.last_params = None
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    asyncio.run(run_batch(redis_url, Batch(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"))))
    assert sampling_of(recommending) == DEFAULTS
