"""`durability` of a job over HTTP, of the client's setting and of the Python client, and of a deleted response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes.command import run_command
from faults.tools.redis_process import RedisProcess
from faults.tools.replica import ReplicatedRedis

from penstock.cli.output import EXIT_TRY_AGAIN
from penstock.contract.errors import NotOnDiskError, NotReplicatedError, RequestError, UnsupportedDurabilityError
from penstock.gateway.errors import error_body, retry_headers
from penstock.producer.client import AsyncClient, Client, ClientSettings
from penstock.queue import keys
from penstock.queue.broker import durable_calls
from tests.gateway.conftest import MODEL, EchoEngine, Stack

JOB = {"model": MODEL, "prompt": "abc", "params": {"max_tokens": 2}}
RESPONSE = {"model": MODEL, "input": "abc", "max_output_tokens": 2, "background": True}


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisProcess, str]]:
    """A Redis that any version lets promise its disk, with a node and a gateway, whose URL is the second one."""
    with RedisProcess(tmp_path_factory.mktemp("always"), appendfsync="always") as server:
        stack = Stack(server.url)
        try:
            stack.start_node(EchoEngine(), model=MODEL)
            yield server, stack.start_gateway()
        finally:
            stack.close()


@pytest.mark.parametrize(("path", "body", "status"), [("/v1/jobs", JOB, 202), ("/v1/responses", RESPONSE, 200)])
@pytest.mark.parametrize("durability", ["memory", "fsync", None])
def test_a_job_of_either_durability_is_accepted(
    always: tuple[RedisProcess, str], path: str, body: dict[str, object], status: int, durability: str | None
) -> None:
    answer = httpx.post(always[1] + path, json={**body, "durability": durability}, timeout=60)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(("path", "body"), [("/v1/jobs", JOB), ("/v1/responses", RESPONSE)])
def test_an_unknown_durability_is_refused_by_name(
    always: tuple[RedisProcess, str], path: str, body: dict[str, object]
) -> None:
    answer = httpx.post(always[1] + path, json={**body, "durability": "disk"}, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "durability"
    assert "'memory', 'fsync' or 'replicated'" in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/v1/jobs", JOB), ("/v1/responses", RESPONSE)])
def test_a_redis_without_a_file_refuses_fsync_and_says_what_to_set(
    http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    answer = http.post(path, json={**body, "durability": "fsync"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("durability", "unsupported_durability")
    assert "with appendonly no" in error["message"]


def test_a_job_that_the_disk_does_not_confirm_is_a_503_with_its_id() -> None:
    error = NotOnDiskError("not confirmed", job_id="m.1")
    body = error_body(error)["error"]
    assert (error.status, body["code"], body["job_id"]) == (503, "not_on_disk", "m.1")
    assert retry_headers(error)["Retry-After"] == "2"


async def test_the_setting_holds_for_jobs_that_go_on_without_a_reader(redis_url: str, engine: EchoEngine) -> None:
    async with AsyncClient(redis_url, settings=ClientSettings(durability="fsync")) as client:
        with pytest.raises(UnsupportedDurabilityError):
            await client.submit("abc", max_tokens=2)
        others: tuple[dict[str, Any], ...] = ({"needs_reader": True}, {"durability": "memory"}, {"background": False})
        for options in others:
            await (await client.submit("abc", max_tokens=2, **options)).result()


async def test_the_python_client_refuses_an_unknown_durability(redis_url: str, engine: EchoEngine) -> None:
    async with AsyncClient(redis_url) as client:
        with pytest.raises(RequestError, match="'memory', 'fsync' or 'replicated'") as caught:
            await client.submit("abc", durability="disk")  # type: ignore[arg-type]
        assert caught.value.param == "durability"


async def test_generate_waits_for_the_disk_of_each_job(always: tuple[RedisProcess, str]) -> None:
    async with AsyncClient(always[0].url) as client:
        results = await client.generate(["abc", "def"], max_tokens=2, durability="fsync")
    assert [result.outcome.state for result in results] == ["succeeded", "succeeded"]


# A replica.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ReplicatedRedis, str]]:
    """A Redis with a replica, a node and a gateway, whose URL is the second one."""
    with ReplicatedRedis(tmp_path_factory.mktemp("pair")) as both:
        stack = Stack(both.url)
        try:
            stack.start_node(EchoEngine(), model=MODEL)
            yield both, stack.start_gateway()
        finally:
            stack.close()


@pytest.fixture
def paused(pair: tuple[ReplicatedRedis, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ReplicatedRedis, str]]:
    """A replica that confirms nothing, and a short wait for it."""
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", 0.2)
    pair[0].replica.pause()
    yield pair
    pair[0].replica.resume()
    pair[0].wait_for_replica()


@pytest.mark.parametrize(("path", "body"), [("/v1/jobs", JOB), ("/v1/responses", RESPONSE)])
def test_a_job_that_no_replica_confirms_is_a_503_and_the_same_request_waits_again(
    paused: tuple[ReplicatedRedis, str], path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, url = paused
    ask = {"json": {**body, "durability": "replicated"}, "headers": {"Idempotency-Key": f"k{path}"}}
    refused = httpx.post(url + path, **ask, timeout=60)  # type: ignore[arg-type]
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], refused.headers["Retry-After"]) == (503, "not_replicated", "2")
    both.replica.resume()
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", 60.0)
    accepted = httpx.post(url + path, **ask, timeout=60)  # type: ignore[arg-type]
    assert accepted.is_success, accepted.text
    assert accepted.json()["id"].removeprefix("resp_") == error["job_id"]
    assert both.replica_has(keys.job(error["job_id"]))


def test_a_deleted_response_is_gone_from_the_replica_too(
    paused: tuple[ReplicatedRedis, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, url = paused
    made = httpx.post(f"{url}/v1/responses", json=RESPONSE, timeout=60).json()["id"]
    path = f"{url}/v1/responses/{made}"
    refused = httpx.delete(path, params={"durability": "replicated"}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_replicated")
    assert httpx.get(path, timeout=60).status_code == 404
    both.replica.resume()
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", 60.0)
    assert httpx.delete(path, params={"durability": "replicated"}, timeout=60).json()["deleted"]
    assert not both.replica_has(keys.response(made.removeprefix("resp_")))
    assert httpx.delete(path, timeout=60).status_code == 404
    wrong = httpx.delete(path, params={"durability": "disk"}, timeout=60).json()["error"]
    assert wrong["param"] == "durability"


def test_python_client_and_commands_wait_for_a_replica(pair: tuple[ReplicatedRedis, str]) -> None:
    both, _ = pair
    with Client(both.url, settings=ClientSettings(durability="replicated")) as client:
        job = client.submit("abc", max_tokens=2)
        assert both.replica_has(keys.job(job.id))
    to_both = ("--redis-url", both.url)
    done = run_command("submit", "abc", "--raw", "--max-tokens", "2", "--durability", "replicated", *to_both)
    assert (done.returncode, done.stdout) == (0, "ab\n"), done.stderr
    run_command("keys", "add", "acme", "--label", "lost", *to_both)
    assert run_command("keys", "revoke", "lost", "--durability", "replicated", *to_both).returncode == 0
    with both.replica.client() as replica:
        assert b'"is_revoked":true' in b"".join(replica.hvals(keys.API_KEYS))


def test_without_a_replica_each_door_says_so(redis_url: str, http: httpx.Client) -> None:
    answer = http.post("/v1/jobs", json={**JOB, "durability": "replicated"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], "job_id" in error) == (503, "not_replicated", False)
    with Client(redis_url) as client, pytest.raises(NotReplicatedError, match="no replica is connected"):
        client.submit("abc", durability="replicated")
    done = run_command("submit", "abc", "--durability", "replicated", "--redis-url", redis_url)
    assert done.returncode == EXIT_TRY_AGAIN
    assert "no replica is connected" in done.stderr
