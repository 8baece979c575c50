"""An error is shown to users as one traceback, with a message that names the remedy."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.fake_node import FakeNode
from redis.asyncio import Redis

from penstock.contract.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    JobCancelledError,
    NotFoundError,
    PenstockError,
    RequestError,
    ResultTimeoutError,
    UnavailableError,
)
from penstock.contract.pool import NodePressure
from penstock.producer.client import AsyncClient, Client, ClientSettings
from tests.producer.client.conftest import node_on_thread

MAX_FRAMES = 5
"""The test's two frames and the client's. The client's own thread has a dozen more."""
NOWHERE = "redis://:s3cret@localhost:1"


@pytest.fixture
def sync_client(redis_url: str) -> Iterator[Client]:
    with node_on_thread(redis_url), Client(redis_url) as client:
        yield client


def shown(error: BaseException) -> str:
    """Return the error as Python prints it. Assert that it is one traceback."""
    text = "".join(traceback.format_exception(error))
    assert text.count("Traceback (most recent call last)") == 1, text
    assert "During handling" not in text
    return text


def conflict(client: Client) -> None:
    client.submit("one", idempotency_key="key")
    client.submit("another", idempotency_key="key")


def cancelled(client: Client) -> None:
    job = client.submit("hello", max_tokens=4000)
    job.cancel()
    job.result()


@pytest.mark.parametrize(
    ("call", "kind", "remedy"),
    [
        (lambda client: client.submit("hello", model="unknown"), NotFoundError, "served: acme/fake"),
        (lambda client: client.submit("hello", top_p=2), RequestError, "top_p: must be at most 1.0"),
        (lambda client: client.submit("hello", max_token=2), RequestError, "max_token: unknown field"),
        (lambda client: client.submit(["hello"]), RequestError, "`generate` and `map` take several"),
        (lambda client: client.generate(["hello"], top_p=2), RequestError, "top_p: must be at most 1.0"),
        (lambda client: list(client.map(["hello"], top_p=2)), RequestError, "top_p: must be at most 1.0"),
        (lambda client: client.submit("x", max_tokens=4000).result(timeout=0), ResultTimeoutError, "job.cancel()"),
        (lambda client: client.result("fake.01890a5d-ac96-774b-bcce-b302099a8057"), NotFoundError, "no job fake."),
        (conflict, ConflictError, "another request"),
        (cancelled, JobCancelledError, "cancelled"),
    ],
)
def test_an_error_has_one_short_traceback(
    sync_client: Client, call: Callable[[Client], Any], kind: type[PenstockError], remedy: str
) -> None:
    with pytest.raises(kind) as caught:
        call(sync_client)
    text = shown(caught.value)
    assert remedy in text.splitlines()[-1]
    assert text.count("\n  File ") <= MAX_FRAMES


def test_an_absent_redis_is_named_with_what_to_do() -> None:
    with pytest.raises(UnavailableError) as caught:
        Client(NOWHERE)
    last = shown(caught.value).splitlines()[-1]
    assert "tried redis://:***@localhost:1" in last
    assert "`penstock serve` starts" in last


async def test_errors_of_the_asynchronous_client_have_one_traceback(
    redis_url: str, client: AsyncClient, redis: Redis
) -> None:
    with pytest.raises(UnavailableError, match="`penstock serve`") as caught:
        await client.submit("hello")
    shown(caught.value)
    async with FakeNode(redis_url, auto=False) as node:
        with pytest.raises(NotFoundError) as unknown:
            await client.submit("hello", model="unknown")
        shown(unknown.value)
        node.pressure = NodePressure(node.node_id, kv_tokens_available=0, drain_cost_per_s=1.0)
        await node.heartbeat()
        await client.submit("hello", max_tokens=200, background=False)
        with pytest.raises(BusyError) as busy:
            await client.submit("hello", max_tokens=200, background=False)
        shown(busy.value)
        await node.broker.leave()
    with pytest.raises(UnavailableError) as absent:
        await AsyncClient(NOWHERE).connect()
    shown(absent.value)


def test_wrong_settings_have_one_traceback() -> None:
    with pytest.raises(ConfigError) as caught:
        ClientSettings.load(outage_s=-1)
    shown(caught.value)
    with pytest.raises(ConfigError) as wrong:
        Client("http://localhost")
    shown(wrong.value)
