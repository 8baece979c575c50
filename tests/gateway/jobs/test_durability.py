"""`durability` of a job over HTTP, of the client's setting and of the Python client, on a Redis with `appendfsync`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from faults.tools.redis_process import RedisProcess

from penstock.contract.errors import NotOnDiskError, RequestError, UnsupportedDurabilityError
from penstock.gateway.errors import error_body, retry_headers
from penstock.producer.client import AsyncClient, ClientSettings
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
    answer = httpx.post(always[1] + path, json={**body, "durability": durability})
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(("path", "body"), [("/v1/jobs", JOB), ("/v1/responses", RESPONSE)])
def test_an_unknown_durability_is_refused_by_name(
    always: tuple[RedisProcess, str], path: str, body: dict[str, object]
) -> None:
    answer = httpx.post(always[1] + path, json={**body, "durability": "disk"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "durability"
    assert "'memory' or 'fsync'" in error["message"]


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
        with pytest.raises(RequestError, match="'memory' or 'fsync'") as caught:
            await client.submit("abc", durability="disk")  # type: ignore[arg-type]
        assert caught.value.param == "durability"


async def test_generate_waits_for_the_disk_of_each_job(always: tuple[RedisProcess, str]) -> None:
    async with AsyncClient(always[0].url) as client:
        results = await client.generate(["abc", "def"], max_tokens=2, durability="fsync")
    assert [result.outcome.state for result in results] == ["succeeded", "succeeded"]
