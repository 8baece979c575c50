"""A gateway or node warns at its start of a Redis that may evict keys, as `penstock doctor` does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis as sync_redis
from fakes.acl_users import rules_of
from fakes.processes.node_process import NodeProcess
from faults.tools.processes import GatewayProcess

SAID = "redis may evict keys: an evicted key is a lost job"
HIDDEN = "redis's memory policy cannot be read"


@pytest.fixture
def evicting_url(redis_url: str) -> Iterator[str]:
    with sync_redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        yield redis_url
        client.config_set("maxmemory-policy", "noeviction")


def test_a_node_and_a_gateway_say_so_when_they_start(evicting_url: str) -> None:
    with NodeProcess(evicting_url) as node, GatewayProcess(evicting_url) as gateway:
        for log in (node.log, gateway.log):
            (line,) = [line for line in log.splitlines() if SAID in line]
            assert "WARNING" in line
        assert '"policy": "allkeys-lru"' in gateway.log


def test_a_redis_that_keeps_its_keys_is_not_named_and_one_that_hides_it_is_no_trouble(redis_url: str) -> None:
    rules = [rule for rule in rules_of("node").split()[2:] if rule != "+info" and not rule.startswith(">")]
    with sync_redis.Redis.from_url(redis_url) as client:
        client.execute_command("ACL", "SETUSER", "blind", "reset", ">blind", *rules)
    blind_url = redis_url.replace("unix://", "unix://blind:blind@")
    with NodeProcess(redis_url) as node, NodeProcess(blind_url) as blind, GatewayProcess(redis_url) as gateway:
        assert all(SAID not in one.log for one in (node, blind, gateway))
        assert HIDDEN in blind.log and HIDDEN not in node.log
