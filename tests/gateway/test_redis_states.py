"""Each problem of Redis has one name in the log, `/ready` and the metrics, and none of them delays a scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.processes.node_process import NodeProcess
from fakes.waiting import wait_until
from faults.tools.redis_process import RedisProcess, free_port
from prometheus_client.parser import text_string_to_metric_families

from penstock.contract.errors import PenstockError
from penstock.contract.pool import REDIS_STATES
from penstock.gateway import redis_watch
from penstock.queue.broker.connection import error_of_reply
from tests.gateway.conftest import EchoEngine, Stack
from tests.source_tree import ROOT

MODEL = "acme/echo"
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("states") / "redis", port=free_port()) as server:
        yield server


def url_of_user(server: RedisProcess, user: str) -> str:
    """Make a user with all rights, and return the URL with which a process is that user."""
    with sync_redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", user, "on", f">{user}", "~*", "&*", "+@all")
    return server.url.replace("://", f"://{user}:{user}@")


@pytest.fixture(scope="module")
def gateway(server: RedisProcess) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PENSTOCK_CLIENT_OUTAGE_S", "0.5")
        stack = Stack(server.url)
        stack.start_node(EchoEngine(), model=MODEL, pool="echo")
        # Of its own user, because a node that lacks rights ends.
        url = stack.start_gateway(redis_url=url_of_user(server, "watched"))
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
    stack.close()


def problems(gateway: httpx.Client) -> list[str]:
    families = text_string_to_metric_families(gateway.get("/metrics").text)
    samples = [one for family in families for one in family.samples if one.name == "penstock_redis_problem"]
    assert {one.labels["state"] for one in samples} == set(REDIS_STATES)
    return [one.labels["state"] for one in samples if one.value]


def full_disk(server: RedisProcess, client: Any) -> Callable[[], None]:
    """Let the next snapshot fail. Redis then refuses writes, as with an append-only file that it cannot write."""
    client.config_set("save", "3600 1000000")
    snapshot = server.folder / "dump.rdb"
    snapshot.unlink(missing_ok=True)
    snapshot.mkdir()
    client.bgsave()

    def mend() -> None:
        snapshot.rmdir()
        client.bgsave()

    return mend


def paused(server: RedisProcess, client: Any) -> Callable[[], None]:
    server.pause()
    return server.resume


def full(server: RedisProcess, client: Any) -> Callable[[], None]:
    client.config_set("maxmemory", "1mb")
    return lambda: client.config_set("maxmemory", "0")


def replica(server: RedisProcess, client: Any) -> Callable[[], None]:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    return lambda: client.execute_command("REPLICAOF", "NO", "ONE")


def without_rights(server: RedisProcess, client: Any) -> Callable[[], None]:
    client.execute_command("ACL", "SETUSER", "watched", "-info", "-evalsha", "-eval")
    return lambda: client.execute_command("ACL", "SETUSER", "watched", "+@all")


def without_replicas(server: RedisProcess, client: Any) -> Callable[[], None]:
    client.config_set("min-replicas-to-write", "1")
    return lambda: client.config_set("min-replicas-to-write", "0")


@pytest.mark.parametrize(
    ("state", "cause", "status", "code"),
    [
        ("disk_full", full_disk, 503, "redis_away"),
        ("read_only", replica, 503, "redis_away"),
        ("no_replicas", without_replicas, 503, "redis_away"),
        ("full", full, 429, "redis_full"),
        ("no_rights", without_rights, 500, "bad_config"),
        ("away", paused, 503, "redis_away"),
    ],
)
def test_a_problem_of_redis_has_one_name_everywhere(
    server: RedisProcess,
    gateway: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    state: str,
    cause: Callable[[RedisProcess, Any], Callable[[], None]],
    status: int,
    code: str,
) -> None:
    wait_until(lambda: gateway.get("/ready").json().get("status") == "ready" and not problems(gateway))
    with sync_redis.Redis.from_url(server.url) as client:
        mend = cause(server, client)
        try:
            wait_until(lambda: problems(gateway) == [state])
            ready = gateway.get("/ready").json()
            assert ready.get("redis") == state or f"({state})" in ready["error"]["message"]
            took_s = min(seconds_of_a_scrape(gateway) for _ in range(5))
            refused = gateway.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
            for secret in ("127.0.0.1", "script", "MISCONF", "NOPERM", "user_", "watched", "evalsha"):
                assert secret not in refused.json()["error"]["message"]
        finally:
            mend()
        wait_until(lambda: not problems(gateway))
    lines = [vars(record) for record in caplog.records if record.name == "penstock.gateway"]
    begins = [line for line in lines if line["msg"] == "redis has a problem" and line["state"] == state]
    ends = [line for line in lines if line["msg"] == "redis serves again"]
    assert len(begins) == 1
    assert [line["before"] for line in ends] == [state]
    assert took_s <= 0.2


def seconds_of_a_scrape(of: httpx.Client) -> float:
    began_s = time.monotonic()
    assert of.get("/metrics").is_success
    return time.monotonic() - began_s


def test_a_scrape_of_a_node_does_not_wait_for_redis(tmp_path: Path) -> None:
    port = free_port()
    with (
        RedisProcess(tmp_path / "redis") as server,
        NodeProcess(server.url, pool="scraped", lease_ms=3000, metrics_port=port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as node,
    ):
        server.pause()
        name = "penstock_node_redis_silent_seconds"
        wait_until(lambda: value_of(name, node.get("/metrics").text) > 2)
        assert min(seconds_of_a_scrape(node) for _ in range(5)) <= 0.2
        server.resume()


def value_of(name: str, text: str) -> float:
    (value,) = (
        one.value for family in text_string_to_metric_families(text) for one in family.samples if one.name == name
    )
    return value


@pytest.fixture
def limited(server: RedisProcess) -> Iterator[httpx.Client]:
    """A gateway with a Redis user of its own, `gate`, beside that of its node."""
    stack = Stack(server.url)
    stack.start_node(EchoEngine(), model="acme/limited", pool="limited")
    with httpx.Client(base_url=stack.start_gateway(redis_url=url_of_user(server, "gate")), timeout=60) as client:
        yield client
    stack.close()


def test_a_right_that_only_requests_need_is_warned_of_when_it_goes_and_when_it_comes_back(
    server: RedisProcess, limited: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_watch, "QUIET_S", 3600.0)
    wait_until(lambda: limited.get("/ready").json().get("status") == "ready" and not problems(limited))
    caplog.clear()
    with sync_redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "gate", "-xadd")
        body = {"model": "acme/limited", "prompt": "hi"}
        refused = [limited.post("/v1/completions", json=body) for _ in range(3)]
        client.execute_command("ACL", "SETUSER", "gate", "+@all")
    assert {one.json()["error"]["code"] for one in refused} == {"bad_config"}
    monkeypatch.setattr(redis_watch, "QUIET_S", 0.1)
    end = "redis has refused no call of a request for a while"
    # The gateway of the other tests may end what it has noted in the same moment.
    wait_until(lambda: any(record.msg == end and vars(record)["refused"] == len(refused) for record in caplog.records))
    lines = [vars(record) for record in caplog.records if record.name == "penstock.gateway"]
    (begin,) = [line for line in lines if line["msg"] == "redis refuses calls of requests"]
    assert begin["state"] == "no_rights" and "xadd" in begin["reason"]
    assert not any(line["exc_info"] for line in lines)


@pytest.mark.parametrize("state", REDIS_STATES)
def test_the_runbook_has_a_row_for_each_state(state: str) -> None:
    section = (ROOT / "ops/RUNBOOK.md").read_text().partition("## States of Redis")[2].partition("\n## ")[0]
    assert f"| `{state}` |" in section


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("LOADING Redis is loading the dataset in memory", "loading"),
        (
            "MISCONF Errors writing to the AOF file: No space left on device script: a84d, on @user_script:380.",
            "disk_full",
        ),
        ("NOREPLICAS Not enough good replicas to write.", "no_replicas"),
        ("BUSY Redis is busy running a script.", "slow"),
        ("NOPERM User gateway has no permissions to run the 'evalsha' command", "no_rights"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "full"),
        ("ERR Error running script (call to f_12): @user_script:3: unknown", ""),
    ],
)
def test_an_error_of_redis_has_a_state_and_keeps_its_words_for_the_log(text: str, state: str) -> None:
    error: PenstockError = error_of_reply(text)
    assert error.redis_state == state
    assert not any(word in error.message for word in ("script:", "@user_script", "gateway", "evalsha", "maxmemory"))
    assert state == "full" or error.detail
