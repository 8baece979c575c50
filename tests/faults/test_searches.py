"""Beam search and `best_of` through queue, node and gateway; another node begins a search anew after a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.processes.node_process import NodeProcess
from fakes.waiting import until
from faults.tools.processes import GatewayProcess
from fixtures.tiny_model import make_tiny_model
from redis.asyncio import Redis

from penstock import AsyncClient, Engine, RequestError, SamplingParams
from penstock.producer.client import AsyncJob
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.runtime.embedded_redis import EmbeddedRedis

PROMPT = [number % 200 + 3 for number in range(20)]
BEAMS: dict[str, Any] = {"use_beam_search": True, "beam_width": 6, "n": 3, "max_tokens": 20, "ignore_eos": True}
BEST_OF: dict[str, Any] = {"best_of": 6, "n": 2, "max_tokens": 20, "ignore_eos": True, "seed": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def redis_of_node(model: Path) -> Iterator[str]:
    with EmbeddedRedis() as server, NodeProcess(server.url, model=model, pool="tiny", dtype="bfloat16"):
        yield server.url


@pytest.fixture(scope="module")
def http(redis_of_node: str) -> Iterator[httpx.Client]:
    with GatewayProcess(redis_of_node) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def texts(model: Path) -> dict[str, list[str]]:
    """The texts of each search, as the engine alone finds them."""
    engine = Engine(str(model), dtype="bfloat16", num_threads=1, num_kv_blocks=256, weight_cache=False)
    searches = {"beams": BEAMS, "best_of": BEST_OF}
    return {
        name: [one.text for one in engine.generate([PROMPT], SamplingParams(**options))[0].choices]
        for name, options in searches.items()
    }


@pytest.mark.parametrize(("name", "options"), [("beams", BEAMS), ("best_of", BEST_OF)])
def test_a_search_over_http_returns_the_best_choices_and_counts_all(
    http: httpx.Client, texts: dict[str, list[str]], name: str, options: dict[str, Any]
) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, **options}).json()
    assert [choice["text"] for choice in answer["choices"]] == texts[name]
    assert [choice["index"] for choice in answer["choices"]] == list(range(options["n"]))
    num_computed = {"beams": 1 + 19 * 6, "best_of": 20 * 6}[name]
    assert answer["usage"]["completion_tokens"] == num_computed
    echoed = http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "echo": True, **options}).json()
    assert [one["text"].endswith(text) for one, text in zip(echoed["choices"], texts[name], strict=True)]


def test_a_chat_takes_the_names_of_vllm(http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    for more in ({"use_beam_search": True, "n": 4}, {"use_beam_search": True, "best_of": 4, "n": 4, "temperature": 0}):
        answer = http.post("/v1/chat/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        contents = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert len(contents) == 4 and all(contents)


async def test_python_clients_search_and_cannot_stream_it(redis_of_node: str, texts: dict[str, list[str]]) -> None:
    async with AsyncClient(redis_of_node) as client:
        for name, options in (("beams", BEAMS), ("best_of", BEST_OF)):
            (result,) = await client.generate([PROMPT], **options)
            assert [choice.text for choice in result.choices] == texts[name]
            job = await client.submit(PROMPT, **options)
            chunks = [chunk async for chunk in job.stream()]
            assert [chunk.choice for chunk in chunks if chunk.token_ids] == list(range(options["n"]))
            assert any(chunk.usage for chunk in chunks)
            for given in (options, {"params": SamplingParams(**options)}):
                with pytest.raises(RequestError, match="cannot be streamed"):
                    await anext(client.stream(PROMPT, **given))


async def until_taken(job: AsyncJob) -> None:
    await until(job.status, lambda seen: seen.state == "running")


async def test_a_search_of_a_killed_node_begins_anew_on_another(redis: Redis, redis_url: str, model: Path) -> None:
    """The search takes about a second on the first node, so the kill comes in its midst."""
    options = BEAMS | {"max_tokens": 400, "beam_width": 8, "n": 2}
    settings: dict[str, Any] = {"model": model, "dtype": "bfloat16", "pool": "moved", "lease_ms": 3000}
    async with AsyncClient(redis_url) as client:
        with NodeProcess(redis_url, name="first", **settings) as node:
            job = await client.submit(PROMPT, model="moved", **options)
            await until_taken(job)
            await asyncio.to_thread(node.kill)
        with NodeProcess(redis_url, name="second", **settings):
            result = await asyncio.wait_for(job.result(), 180)
            (again,) = await client.generate([PROMPT], model="moved", **options)
        assert [choice.token_ids for choice in result.choices] == [choice.token_ids for choice in again.choices]
        assert len(result.choices) == 2
        assert (await job.status()).losses == 1
    assert await audit(AdminBroker(redis), "moved") == []
