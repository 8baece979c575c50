"""Adapters are listed as models whose parent is the base model."""

from __future__ import annotations

import httpx
import openai
import pytest

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import NotFoundError, RequestError
from penstock.producer.client import AsyncClient
from tests.gateway.conftest import DIGEST, MODEL, EchoEngine

ADAPTER = AdapterRef(name="echo-tuned", digest=DIGEST)


def test_an_adapter_is_a_model_with_a_parent(http: httpx.Client) -> None:
    models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert "parent" not in next(iter(models.values())), "the first one is a whole model"
    assert models["echo-tuned"]["parent"] == models["echo-tuned"]["root"] == MODEL
    assert "parent" not in models[MODEL]
    assert http.get("/v1/models/echo-tuned").json() == models["echo-tuned"]


def test_request_for_an_adapter_runs_with_it(api: openai.OpenAI, engine: EchoEngine) -> None:
    said = api.completions.create(model="echo-tuned", prompt="tuned")
    assert (said.model, said.choices[0].text, engine.last_adapter) == ("echo-tuned", "tuned", ADAPTER)
    api.completions.create(model=MODEL, prompt="plain")
    assert engine.last_adapter is None


def test_unknown_adapter_is_refused_with_the_known_ones(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "echo-other", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert answer.json()["error"]["message"].endswith(f"served: {MODEL}, echo-tuned")


async def test_client_names_an_adapter_as_the_model_or_beside_it(redis_url: str, engine: EchoEngine) -> None:
    async with AsyncClient(redis_url) as client:
        for options in ({"model": "echo-tuned"}, {"adapter": "echo-tuned"}, {"model": MODEL, "adapter": "echo-tuned"}):
            result = await (await client.submit("hi", **options)).result()
            assert (result.choices[0].text, engine.last_adapter) == ("hi", ADAPTER)
        with pytest.raises(NotFoundError, match=r"adapter 'other' is not served; served: echo-tuned"):
            await client.submit("hi", adapter="other")
        with pytest.raises(RequestError, match="is not served"):
            await client.submit("hi", model="echo-tuned", adapter="other")
