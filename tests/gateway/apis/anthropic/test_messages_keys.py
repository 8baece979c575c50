"""API keys under `/v1/messages`: the header of Anthropic's clients, and the errors of keys and of their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis as sync_redis

from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore

PEPPER = "of the tests"


def body() -> dict[str, Any]:
    return {"model": "acme/echo", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


def refusal(answer: httpx.Response, status: int, kind: str) -> str:
    """Assert the shape of an error. Return its message."""
    assert answer.status_code == status, answer.text
    given = answer.json()
    assert (given["type"], given["error"]["type"]) == ("error", kind)
    assert given["request_id"] == answer.headers["request-id"]
    return str(given["error"]["message"])


@pytest.fixture(scope="module")
def closed(redis_url: str, stack: Any, shared_engine: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """A gateway that requires keys, and two of them. The second may submit one job a minute."""

    async def add(tenant: str, terms: Terms) -> str:
        redis = connect(redis_url)
        key, _ = await KeyStore(redis).add(tenant, ("infer",), terms, pepper=PEPPER)
        await redis.aclose()
        return key

    made = {
        "acme": asyncio.run(add("acme", Terms())),
        "limited": asyncio.run(add("small", Terms(jobs_per_minute=1, burst_s=1))),
    }
    url = stack.start_gateway(pepper=PEPPER, require_keys=True)
    yield url, made
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)


def test_key_in_x_api_key_is_accepted_in_place_of_bearer(closed: tuple[str, dict[str, str]]) -> None:
    url, made = closed
    post = f"{url}/v1/messages"
    assert httpx.post(post, json=body(), headers={"x-api-key": made["acme"]}, timeout=60).status_code == 200
    assert (
        httpx.post(post, json=body(), headers={"Authorization": f"Bearer {made['acme']}"}, timeout=60).status_code
        == 200
    )
    assert httpx.get(f"{url}/v1/models", headers={"x-api-key": made["acme"]}, timeout=60).status_code == 200


def test_missing_or_wrong_key_is_an_authentication_error(closed: tuple[str, dict[str, str]]) -> None:
    url, made = closed
    post = f"{url}/v1/messages"
    assert "x-api-key" in refusal(httpx.post(post, json=body(), timeout=60), 401, "authentication_error")
    for headers in ({"x-api-key": "pk-wrong"}, {"x-api-key": made["acme"], "Authorization": "Bearer pk-wrong"}):
        answer = httpx.post(post, json=body(), headers=headers, timeout=60)
        refusal(answer, 401, "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_callers_own_limit_is_a_rate_limit_error(closed: tuple[str, dict[str, str]]) -> None:
    url, made = closed
    answers = [
        httpx.post(f"{url}/v1/messages", json=body(), headers={"x-api-key": made["limited"]}, timeout=60)
        for _ in range(3)
    ]
    refusal(answers[-1], 429, "rate_limit_error")
    assert int(answers[-1].headers["retry-after"]) >= 1
