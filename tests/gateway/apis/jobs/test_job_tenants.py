"""Jobs over HTTP belong to their tenants: others do not find them, and only an admin lists them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.contract.tenant import Scope, Terms
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack, clients_with

PEPPER = "of the tests"
Callers = dict[str, httpx.Client]
TENANTS: dict[str, tuple[Scope, ...]] = {
    "acme": ("infer",),
    "rival": ("infer",),
    "ops": ("admin",),
    "limited": ("infer",),
}


@pytest.fixture(scope="module")
def callers(redis_url: str, stack: Stack, shared_engine: EchoEngine) -> Iterator[Callers]:
    """A client with a key of each tenant."""
    made = asyncio.run(add_keys(redis_url))
    url = stack.start_gateway(pepper=PEPPER)
    with clients_with(url, made) as clients:
        yield clients


async def add_keys(redis_url: str) -> dict[str, str]:
    redis = connect(redis_url)
    terms = Terms(jobs_per_minute=1, burst_s=1)
    made = {
        tenant: await KeyStore(redis).add(
            tenant, scopes, terms if tenant == "limited" else Terms(), highest_class="standard", label="", pepper=PEPPER
        )
        for tenant, scopes in TENANTS.items()
    }
    await redis.aclose()
    return {tenant: key for tenant, (key, _) in made.items()}


def submitted(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/v1/jobs", json={"model": MODEL, "prompt": "hello", **body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_job_of_another_tenant_is_not_found(callers: Callers) -> None:
    job_id = submitted(callers["acme"], not_before_s=600)
    for other in ("rival", "ops"):
        paths = [
            ("GET", ""),
            ("GET", "/why"),
            ("GET", "/stream"),
            ("GET", "/stream?after=0"),
            ("DELETE", ""),
            ("POST", "/ack"),
        ]
        answers = [callers[other].request(method, f"/v1/jobs/{job_id}{path}") for method, path in paths]
        expected = 404 if other == "rival" else 403
        assert [answer.status_code for answer in answers] == [expected] * len(paths)
    unknown = callers["rival"].get("/v1/jobs/echo.01890a5d-ac96-774b-bcce-b302099a8057").json()
    same = callers["rival"].get(f"/v1/jobs/{job_id}").json()
    assert same["error"]["code"] == unknown["error"]["code"] == "job_not_found"
    assert callers["acme"].get(f"/v1/jobs/{job_id}").json()["tenant"] == "acme"
    assert callers["acme"].delete(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"


def test_list_has_own_jobs_only_unless_an_admin_asks(callers: Callers) -> None:
    mine, theirs = submitted(callers["acme"]), submitted(callers["rival"])

    def listed(caller: str, query: str = "") -> set[str]:
        answer = callers[caller].get(f"/v1/jobs?limit=100{query}")
        assert answer.status_code == 200, answer.text
        assert all("result" not in job for job in answer.json()["data"])
        return {job["id"] for job in answer.json()["data"]}

    assert mine in listed("acme") and theirs not in listed("acme")
    assert theirs in listed("rival") and mine not in listed("rival")
    assert listed("acme", "&tenant=acme") == listed("acme")
    assert mine in listed("ops", "&tenant=acme") and theirs not in listed("ops", "&tenant=acme")
    assert listed("ops") == set()
    for caller, words in (("acme", "hello"), ("ops", None)):
        (job,) = callers[caller].get("/v1/jobs?tenant=acme&limit=1").json()["data"]
        assert (job["model"], job.get("first_words")) == (MODEL, words)
    refused = callers["rival"].get("/v1/jobs?tenant=acme")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    assert callers["ops"].post("/v1/jobs", json={"prompt": "hello"}).status_code == 403


def test_refusal_says_how_long_to_wait(callers: Callers) -> None:
    submitted(callers["limited"])
    waits = {"model": MODEL, "prompt": "again"}
    assert callers["limited"].post("/v1/jobs", json=waits).status_code == 202, "background work waits for the rate"
    refused = callers["limited"].post("/v1/jobs", json={**waits, "background": False})
    assert refused.status_code == 429
    wait_ms = refused.json()["error"]["retry_after_ms"]
    assert 1000 <= wait_ms <= 60_000
    assert refused.headers["retry-after-ms"] == str(wait_ms)
    assert int(refused.headers["retry-after"]) == -(-wait_ms // 1000)
