"""API keys, rights and limits of WebSockets, which are those of HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.waiting import Deadline
from websockets.typing import Subprotocol

from penstock.contract.tenant import UNLIMITED, Terms
from penstock.producer.client.pools import KEYS_TTL_S
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.gateway.socket_client import socket_to, status_of_refusal, text_of

PEPPER = "of the tests"


async def add(redis_url: str, tenant: str, terms: Terms = UNLIMITED) -> str:
    redis = connect(redis_url)
    key, _ = await KeyStore(redis).add(tenant, ("infer",), terms, pepper=PEPPER)
    await redis.aclose()
    return key


@pytest.fixture(scope="module")
def closed(redis_url: str, stack: Stack, shared_engine: EchoEngine) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of a gateway that requires keys, and a key of each tenant."""
    made = {tenant: asyncio.run(add(redis_url, tenant)) for tenant in ("acme", "rival", "leaver")}
    made["limited"] = asyncio.run(add(redis_url, "limited", Terms(jobs_per_minute=1, burst_s=1)))
    yield stack.start_gateway(pepper=PEPPER, max_key_sockets=2), made
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_websocket_without_a_valid_key_is_refused(closed: tuple[str, dict[str, str]]) -> None:
    url, made = closed
    wrong = made["acme"][:-1] + ("a" if made["acme"][-1] != "a" else "b")
    assert status_of_refusal(url) == (401, "invalid_api_key")
    assert status_of_refusal(url, additional_headers=bearer(wrong)) == (401, "invalid_api_key")
    protocols = [Subprotocol("penstock"), Subprotocol(wrong)]
    assert status_of_refusal(url, subprotocols=protocols) == (401, "invalid_api_key")


@pytest.mark.parametrize("how", ["authorization", "x-api-key", "subprotocol"])
def test_key_opens_a_websocket_of_its_tenant(closed: tuple[str, dict[str, str]], how: str, redis_url: str) -> None:
    url, made = closed
    options: dict[str, Any] = {
        "authorization": {"additional_headers": bearer(made["acme"])},
        "x-api-key": {"additional_headers": {"x-api-key": made["acme"]}},
        "subprotocol": {"subprotocols": ["penstock", made["acme"]]},
    }
    with socket_to(url, **options[how]) as socket:
        assert socket.connection.subprotocol == ("penstock" if how == "subprotocol" else None)
        socket.submit("a", "hello")
        messages = socket.end_of("a")
    assert text_of(messages) == "hello"
    with sync_redis.Redis.from_url(redis_url) as client:
        assert client.hget(keys.job(messages[0]["jobs"][0]), "tenant") == b"acme"


def test_jobs_of_other_tenants_are_not_found(closed: tuple[str, dict[str, str]]) -> None:
    url, made = closed
    job = httpx.post(
        f"{url}/v1/jobs", json={"model": MODEL, "prompt": "mine"}, headers=bearer(made["acme"]), timeout=60
    ).json()
    with socket_to(url, additional_headers=bearer(made["rival"])) as socket:
        socket.send("attach", "a", job=job["id"])
        (error,) = socket.end_of("a")
    assert (error["status"], error["error"]["code"]) == (404, "job_not_found")


def test_rights_and_rates_of_the_key_apply_and_its_usage_is_counted(closed: tuple[str, dict[str, str]]) -> None:
    url, made = closed
    with socket_to(url, additional_headers=bearer(made["limited"])) as socket:
        socket.submit("a", "hello", body={"priority": "interactive"})
        (forbidden,) = socket.end_of("a")
        assert (forbidden["status"], forbidden["error"]["code"]) == (403, "class_not_allowed")
        socket.submit("b", "hello")
        assert socket.end_of("b")[-1]["type"] == "end"
        socket.submit("c", "hello")
        (busy,) = socket.end_of("c")
    assert (busy["status"], busy["error"]["code"]) == (429, "rate_limit_exceeded")
    assert busy["error"]["retry_after_ms"] > 0
    (usage,) = httpx.get(f"{url}/v1/usage", headers=bearer(made["limited"]), timeout=60).json()["data"]
    assert (usage["jobs"], usage["prompt_tokens"], usage["completion_tokens"]) == (1, 5, 5)


def test_revoked_key_of_an_open_websocket_submits_nothing_more(
    closed: tuple[str, dict[str, str]], redis_url: str
) -> None:
    url, made = closed
    key_id = made["leaver"].split("-")[1]

    async def revoke() -> None:
        redis = connect(redis_url)
        await KeyStore(redis).revoke(key_id)
        await redis.aclose()

    with socket_to(url, additional_headers=bearer(made["leaver"])) as socket:
        socket.submit("a", "hello")
        assert socket.end_of("a")[-1]["type"] == "end"
        asyncio.run(revoke())
        deadline, number, messages = Deadline(), 0, list[Any]()
        while [one["type"] for one in messages] != ["error"]:  # once the gateway has read the keys anew
            deadline.check()
            time.sleep(KEYS_TTL_S / 4)
            number += 1
            socket.submit(f"b{number}", "hello")
            messages = socket.end_of(f"b{number}")
        (refused,) = messages
    assert (refused["status"], refused["error"]["code"]) == (401, "invalid_api_key")


def test_key_has_a_limit_of_websockets_and_other_keys_are_not_affected(closed: tuple[str, dict[str, str]]) -> None:
    url, made = closed
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket_to(url, additional_headers=bearer(made["acme"])))
        assert status_of_refusal(url, additional_headers=bearer(made["acme"])) == (429, "too_many_sockets")
        with socket_to(url, additional_headers=bearer(made["rival"])) as socket:
            socket.submit("a", "hello")
            assert text_of(socket.end_of("a")) == "hello"
