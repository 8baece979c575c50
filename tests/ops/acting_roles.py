"""A pytest plugin: each broker calls Redis as the user of ops/acl for its role, and no call is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis
from redis.asyncio import Redis

from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.connection import connect
from penstock.queue.broker.job_lists import DeadLetters, JobLists
from penstock.queue.broker.node import NodeBroker
from penstock.queue.broker.pools import StatsBroker
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.broker.steering import Steering
from penstock.queue.broker.usage import UsageBroker

ACL = Path(__file__).parents[2] / "ops" / "acl"
ROLES: dict[type, str] = {
    ProducerBroker: "gateway",
    DeadLetters: "gateway",
    StatsBroker: "gateway",
    JobLists: "gateway",
    Steering: "gateway",
    UsageBroker: "gateway",
    NodeBroker: "node",
    AdminBroker: "admin",
}


def acting_as(role: str, server: str, start: Callable[..., None]) -> Callable[..., None]:
    """Return a broker's `__init__` that replaces its connection by one of the role's user, if it is to that server."""

    def start_as(self: Any, redis: Redis, *args: Any) -> None:
        is_theirs = redis.connection_pool.connection_kwargs.get("path") == server
        start(self, connect(f"unix://{role}:{role}@{server}") if is_theirs else redis, *args)

    return start_as


@pytest.fixture(autouse=True)
def acting_roles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test's brokers, once its Redis is empty."""
    if "redis_url" not in request.fixturenames:
        yield
        return
    url = request.getfixturevalue("redis_url")
    with sync_redis.Redis.from_url(url) as client:
        for role in set(ROLES.values()):
            _, name, *rules = (ACL / f"{role}.acl").read_text().split()
            known = [rule for rule in rules if not rule.startswith(">")]
            client.execute_command("ACL", "SETUSER", name, "reset", f">{role}", *known)
        client.acl_log_reset()
        for broker, role in ROLES.items():
            as_role = acting_as(role, url.removeprefix("unix://"), vars(broker)["__init__"])
            monkeypatch.setattr(broker, "__init__", as_role)
        yield
        assert client.acl_log() == []
