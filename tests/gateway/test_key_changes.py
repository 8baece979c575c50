"""`penstock keys set` changes limits, scopes and class of a key at a running gateway. The secret stays the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import redis as sync_redis
from fakes.command import run_command

from penstock.producer.client.pools import KEYS_TTL_S
from penstock.queue import keys
from tests.gateway.conftest import MODEL, EchoEngine, Stack

SLACK_S = 3.0
"""A loaded machine."""


@pytest.fixture
def ttl_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """How long the gateway caches the keys: short, except where a test needs the real time."""
    seconds: float = getattr(request, "param", 0.1)
    monkeypatch.setattr("penstock.producer.client.pools.KEYS_TTL_S", seconds)
    return seconds


@pytest.fixture
def caller(
    redis_url: str, stack: Stack, engine: EchoEngine, ttl_s: float, request: pytest.FixtureRequest
) -> Iterator[httpx.Client]:
    """A client with a key of its own tenant, at a gateway that has cached the key."""
    tenant = request.node.originalname[:60]
    key = run_command("keys", "add", tenant, "--label", "it", "--redis-url", redis_url).stdout.strip()
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=stack.start_gateway(), headers=headers, timeout=60) as client:
        assert ask(client).status_code == 200
        yield client
    with sync_redis.Redis.from_url(redis_url) as redis:
        redis.delete(keys.API_KEYS)


def ask(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", **body})


def set_key(redis_url: str, *options: str) -> None:
    done = run_command("keys", "set", "it", *options, "--redis-url", redis_url)
    assert done.returncode == 0, done.stderr


def in_time(holds: Callable[[], bool]) -> None:
    """Wait until a change has taken effect; fail if that takes longer than documented."""
    deadline_s = time.monotonic() + KEYS_TTL_S + SLACK_S
    while not holds():
        assert time.monotonic() < deadline_s
        asyncio.run(asyncio.sleep(0.05))


@pytest.mark.parametrize("ttl_s", [KEYS_TTL_S], indirect=True)
def test_change_applies_within_two_seconds(caller: httpx.Client, redis_url: str, ttl_s: float) -> None:
    assert ttl_s == 2.0
    set_key(redis_url, "--highest-class", "batch")
    in_time(lambda: ask(caller, priority="standard").status_code == 403)


def test_lower_and_higher_rates_apply_to_the_same_key(caller: httpx.Client, redis_url: str) -> None:
    set_key(redis_url, "--tokens-per-minute", "1", "--burst-s", "1")
    in_time(lambda: ask(caller, max_tokens=200).status_code == 429)
    refused = ask(caller)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) > 60
    set_key(redis_url, "--tokens-per-minute", "1000000")
    in_time(lambda: ask(caller).status_code == 200)
    set_key(redis_url, "--tokens-per-minute", "0", "--jobs-per-minute", "1")
    in_time(lambda: "1 jobs per minute" in ask(caller).text)
    set_key(redis_url, "--jobs-per-minute", "0")
    in_time(lambda: ask(caller).status_code == 200)


def test_scopes_and_class_of_a_key_change(caller: httpx.Client, redis_url: str) -> None:
    assert ask(caller, priority="interactive").status_code == 403
    set_key(redis_url, "--highest-class", "interactive")
    in_time(lambda: ask(caller, priority="interactive").status_code == 200)
    set_key(redis_url, "--scope", "metrics")
    in_time(lambda: ask(caller).status_code == 403)
    assert caller.get("/metrics").status_code == 200
    set_key(redis_url, "--scope", "infer", "--scope", "admin")
    in_time(lambda: ask(caller).status_code == caller.get("/health/nodes").status_code == 200)
    assert ask(caller, priority="interactive").status_code == 200
