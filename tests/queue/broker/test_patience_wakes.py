"""Calls that wait for Redis notice together that it is back."""

from __future__ import annotations

import asyncio

import pytest
from fakes.waiting import until

from penstock.contract.errors import UnavailableError
from penstock.queue.broker import connection
from penstock.queue.broker.connection import Patience


class AwayRedis:
    """A Redis that a test takes away and brings back. It counts the calls that found it away."""

    def __init__(self) -> None:
        self.is_away = True
        self.num_failed = 0

    async def call(self) -> str:
        if self.is_away:
            self.num_failed += 1
            raise UnavailableError("Redis is unreachable", code="redis_away")
        return "answer"


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    """Calls would pause for half an hour, as after many failed attempts; one of them looks every few milliseconds."""
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(connection, "LONGEST_PAUSE_S", 3600.0)
    monkeypatch.setattr(connection, "PROBE_S", 0.02)
    monkeypatch.setattr(connection, "LEAST_PAUSE_S", 0.01)
    patience = Patience(outage_s=10**6)
    patience.is_open = True
    return patience


async def test_all_calls_that_wait_go_on_once_one_has_reached_redis(patience: Patience) -> None:
    patience.is_open, redis = True, AwayRedis()
    calls = [asyncio.create_task(patience.call(redis.call)) for _ in range(20)]
    await until(lambda: redis.num_failed >= 25)  # each once, and one of them again and again
    redis.is_away = False
    async with asyncio.timeout(30):
        assert await asyncio.gather(*calls) == ["answer"] * 20


async def test_one_call_alone_notices_it_too(patience: Patience) -> None:
    patience.is_open, redis = True, AwayRedis()
    call = asyncio.create_task(patience.call(redis.call))
    await until(lambda: redis.num_failed >= 3)
    redis.is_away = False
    async with asyncio.timeout(30):
        assert await call == "answer"
