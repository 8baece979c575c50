"""A page of another site changes nothing on a gateway that asks for no API key."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as sync_redis

from penstock.contract.tenant import UNLIMITED
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore

FOREIGN = "https://elsewhere.example"
OURS = "https://app.example"
FORM: Any = {"files": {"file": ("rows.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
CHANGES: list[tuple[str, str, Any]] = [
    ("POST", "/v1/files", FORM),
    ("POST", "/v1/completions", {"json": {"model": "acme/echo", "prompt": "hi"}}),
    ("POST", "/v1/jobs/pause", {}),
    ("POST", "/v1/jobs/acme.0/ack", {}),
    ("POST", "/v1/batches/batch_0/cancel", {}),
    ("DELETE", "/v1/files/file-0", {}),
    ("DELETE", "/v1/jobs/acme.0", {}),
]


@pytest.fixture(autouse=True)
def without_keys(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_FILES_MIN_FREE_MIB", "1")
    yield
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)


@pytest.fixture
def url(stack: Any, shared_engine: Any) -> str:
    return str(stack.start_gateway(cors_origins=(OURS,)))


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"


def expected(origin: str | None, site: str | None) -> bool:
    """Whether a request with these headers must be refused."""
    if origin == OURS or site in ("same-origin", "none"):
        return False
    return site is not None or origin in (FOREIGN, "null", "", "http://[")


def test_only_own_pages_listed_pages_and_programs_pass(url: str) -> None:
    origins = (None, url, FOREIGN, OURS, "null", "", "http://[")
    with httpx.Client(base_url=url, timeout=60) as http:
        for origin, site in itertools.product(origins, (None, "same-origin", "none", "same-site", "cross-site", "x")):
            sent = {"origin": origin, "sec-fetch-site": site}
            headers = {name: value for name, value in sent.items() if value is not None}
            for method, path, body in CHANGES if expected(origin, site) else CHANGES[2:3]:
                answer = http.request(method, path, headers=headers, **body)
                assert is_refused(answer) == expected(origin, site), (method, path, sent, answer.text)
            assert http.get("/v1/models", headers=headers).status_code == 200
            assert http.options("/v1/files", headers=headers).status_code != 403
        http.post("/v1/jobs/resume")
        assert http.get("/v1/files").json()["data"] == []


def test_a_proxy_that_rewrites_host_names_the_page_s_host(url: str) -> None:
    def ask(**headers: str) -> httpx.Response:
        return httpx.post(url + "/v1/jobs/resume", headers={"origin": "http://llm.internal:8080"} | headers, timeout=60)

    assert is_refused(ask())
    refusal = ask(**{"x-forwarded-host": "other.internal"}).json()["error"]
    assert refusal["param"] == "origin"
    assert all(remedy in refusal["message"] for remedy in ("CORS_ORIGINS", "send a key", "X-Forwarded-Host"))
    # The page passes, and the next rule speaks: without keys no proxy is served.
    assert ask(**{"x-forwarded-host": "a, LLM.internal:8080"}).json()["error"]["code"] == "proxied_without_keys"


def test_anonymous_callers_are_checked_and_holders_of_keys_are_not(
    stack: Any, shared_engine: Any, redis_url: str
) -> None:
    async def add() -> str:
        async with connect(redis_url) as redis:
            return (await KeyStore(redis).add("acme", ("infer",), UNLIMITED))[0]

    key = asyncio.run(add())
    url = stack.start_gateway(host="0.0.0.0", allow_anonymous=True)
    foreign = {"origin": FOREIGN, "sec-fetch-site": "cross-site"}
    assert is_refused(httpx.post(url + "/v1/files", headers=foreign, timeout=60, **FORM))
    own = foreign | {"authorization": f"Bearer {key}"}
    body = {"model": "acme/echo", "prompt": "hi"}
    assert httpx.post(url + "/v1/completions", headers=own, timeout=60, json=body).status_code == 200
