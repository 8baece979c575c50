"""Scopes of API keys: every route needs the scope that SECURITY.md names, and a new route needs `infer`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import get_args

import httpx
import pytest
import redis as sync_redis
from starlette.testclient import TestClient, WebSocketDenialResponse

from penstock.contract.tenant import UNLIMITED, Scope
from penstock.gateway.app import DIALECTS, create_app
from penstock.gateway.http import entry
from penstock.gateway.http.entry import READING_SCOPES, scopes_for
from penstock.gateway.settings import GatewaySettings
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import EchoEngine, Stack, clients_with, routes_of
from tests.source_tree import ROOT

PUBLIC_PATHS = entry.PUBLIC_PATHS.union(*(api.public_paths for api in DIALECTS))
SCOPES: tuple[Scope, ...] = get_args(Scope)
Callers = dict[Scope, httpx.Client]


@pytest.fixture(scope="module")
def made(redis_url: str, shared_engine: EchoEngine) -> Iterator[dict[Scope, str]]:
    """A key of each scope."""

    async def add() -> dict[Scope, str]:
        async with connect(redis_url) as redis:
            return {scope: (await KeyStore(redis).add(scope, [scope], UNLIMITED))[0] for scope in SCOPES}

    yield asyncio.run(add())
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)


@pytest.fixture(scope="module")
def callers(made: dict[Scope, str], stack: Stack) -> Iterator[Callers]:
    url = stack.start_gateway()
    with clients_with(url, made) as clients:
        yield clients


def requests_of_all_routes() -> list[tuple[str, str]]:
    """Return method and path of every route of the app."""
    app = create_app(GatewaySettings.load(redis_url="redis://127.0.0.1:1"))
    found = {(method, route.path) for route in routes_of(app) for method in route.methods or ()}
    assert len(found) > 20
    return sorted((method, re.sub(r"[{}]|:path", "", path)) for method, path in found)


def is_public(method: str, path: str) -> bool:
    return path in PUBLIC_PATHS and method in ("GET", "HEAD", "OPTIONS")


def test_each_route_is_refused_to_a_key_without_its_scope(callers: Callers) -> None:
    for method, path in requests_of_all_routes():
        allowed = SCOPES if is_public(method, path) else scopes_for(method, path)
        for scope, client in callers.items():
            # Without a wrong cursor, the stream of completions would have no end.
            answer = client.request(method, path, params={"after": "none"} if path == "/v1/jobs/events" else None)
            is_refused = answer.status_code == 403
            assert is_refused is (scope not in allowed), (method, path, scope, answer.status_code)
            if is_refused and method != "HEAD":
                text = answer.text
                assert f"scope {' or '.join(allowed)}; scopes of this API key: {scope}" in text


def test_key_for_metrics_can_do_nothing_else(callers: Callers) -> None:
    client = callers["metrics"]
    for method in ("GET", "HEAD"):
        assert client.request(method, "/metrics").status_code == 200
    reachable = {
        path
        for method, path in requests_of_all_routes()
        if path not in PUBLIC_PATHS and client.request(method, path).status_code != 403
    }
    assert reachable == {"/metrics"}
    for path in ("/metrics/", "/nowhere", "/v1/usage/"):
        assert client.get(path).status_code == 403, path
    answer = client.post("/v1/messages", json={})
    assert answer.json()["error"]["type"] == "permission_error"


def test_metrics_need_a_scope_that_allows_them(callers: Callers) -> None:
    assert "penstock_redis_up" in callers["metrics"].get("/metrics").text
    assert callers["admin"].get("/metrics").status_code == 200
    error = callers["infer"].get("/metrics").json()["error"]
    assert (error["code"], error["type"]) == ("insufficient_scope", "permission_error")
    assert error["message"] == ("this request needs the scope metrics or admin; scopes of this API key: infer")


def test_health_stays_open(callers: Callers) -> None:
    url = callers["infer"].base_url
    for path in ("/health", "/ready"):
        assert httpx.get(f"{url}{path}", timeout=60).status_code == 200


def test_web_socket_needs_a_key_with_the_scope_of_generation(redis_url: str, made: dict[Scope, str]) -> None:
    with TestClient(create_app(GatewaySettings.load(redis_url=redis_url))) as client:
        for path in ("/v1/stream", "/metrics", "/health"):
            for key, status in (("none", 401), (made["metrics"], 403), (made["admin"], 403)):
                headers = {"authorization": f"Bearer {key}"}
                with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect(path, headers=headers):
                    pass
                assert refused.value.status_code == status, path


def test_security_page_has_a_table_of_the_scopes() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    head = f"| request | {' | '.join(f'`{scope}`' for scope in SCOPES)} |\n"
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.partition(head)[2].partition("\n\n")[0].splitlines()[1:]
    ]
    *named, other = rows
    told = {
        tuple(row[0].strip("`").split()): {scope for scope, cell in zip(SCOPES, row[1:], strict=True) if cell != "–"}
        for row in named
    }
    assert told == {("GET", path): set(scopes) for path, scopes in READING_SCOPES.items()}
    assert [cell != "–" for cell in other[1:]] == [scope in scopes_for("POST", "/new") for scope in SCOPES]


def test_document_names_the_scopes_of_each_operation(callers: Callers) -> None:
    document = callers["infer"].get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            named = [scope for one in operation.get("security", ()) for scope in one.get("key", ())]
            wanted = [] if is_public(method.upper(), path) else [*scopes_for(method.upper(), path)]
            assert named == wanted, (method, path)
    assert "<code>metrics</code> or <code>admin</code>" in callers["infer"].get("/docs").text
