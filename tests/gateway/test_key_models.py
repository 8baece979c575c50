"""A key that lists models: other models are not found and unlisted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis as sync_redis

from penstock.contract.tenant import UNLIMITED
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import EchoEngine, Stack, clients_with

BODY = {"prompt": "a b"}
RESPONSES = ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact")
PATHS = ("/v1/completions", "/v1/jobs", *RESPONSES)


def body_of(path: str, model: str) -> dict[str, str]:
    return {"model": model, **({"input": "a b"} if path in RESPONSES else BODY)}


@pytest.fixture(scope="module")
def callers(redis_url: str, shared_engine: EchoEngine, stack: Stack) -> Iterator[dict[str, httpx.Client]]:
    """Clients of keys that may use every model, another model alone, the served one alone, and both."""
    url = stack.start_gateway()
    served = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    listed = {"all": (), "other": ("elsewhere",), "one": (served,), "both": (served, "elsewhere")}

    async def add() -> dict[str, str]:
        async with connect(redis_url) as redis:
            store = KeyStore(redis)
            return {
                name: (await store.add(name, ["infer"], UNLIMITED, models=names))[0] for name, names in listed.items()
            }

    made = asyncio.run(add())
    url = stack.start_gateway()
    with clients_with(url, made) as clients:
        yield clients
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)


def _served(callers: dict[str, httpx.Client]) -> list[str]:
    return [one["id"] for one in callers["all"].get("/v1/models").json()["data"]]


def test_other_models_are_unlisted(callers: dict[str, httpx.Client]) -> None:
    (model,) = _served(callers)[:1]
    assert callers["other"].get("/v1/models").json()["data"] == []
    assert callers["other"].get(f"/v1/models/{model}").status_code == 404
    assert [one["id"] for one in callers["one"].get("/v1/models").json()["data"]] == [model]
    assert callers["one"].get(f"/v1/models/{model}").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_request_for_another_model_is_not_found(callers: dict[str, httpx.Client], path: str) -> None:
    (model,) = _served(callers)[:1]
    answer = callers["other"].post(path, json=body_of(path, model))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "this API key may use: elsewhere" in answer.json()["error"]["message"]
    # No summary fits the echoing model's context.
    answered = callers["one"].post(path, json=body_of(path, model))
    assert answered.status_code in (200, 202) or answered.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", PATHS)
def test_a_listed_model_that_is_not_served_reveals_no_other(callers: dict[str, httpx.Client], path: str) -> None:
    (model,) = _served(callers)[:1]
    answer = callers["other"].post(path, json=body_of(path, "elsewhere"))
    assert answer.status_code == 404
    assert model not in answer.text


def test_a_request_without_a_model(callers: dict[str, httpx.Client]) -> None:
    assert callers["one"].post("/v1/jobs", json=BODY).status_code == 202
    answer = callers["both"].post("/v1/jobs", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"prompt": ["a", "b"]}], ids=str)
def test_a_completion_of_a_model_that_is_not_served_reveals_no_other(
    callers: dict[str, httpx.Client], more: dict[str, Any]
) -> None:
    """Log-probabilities and several prompts are checked with the pool before a job is submitted."""
    (model,) = _served(callers)[:1]
    answer = callers["other"].post("/v1/completions", json={**BODY, "model": "elsewhere", **more})
    assert (answer.status_code, model in answer.text) == (404, False)
