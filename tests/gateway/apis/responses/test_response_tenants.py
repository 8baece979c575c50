"""Stored responses belong to tenants: others cannot see, continue, cancel or delete them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from penstock.contract.tenant import UNLIMITED
from penstock.producer.responses.compaction import sealed
from penstock.queue.broker.connection import connect
from penstock.queue.broker.jobs import ResponseBroker
from penstock.queue.tenants.key_store import KeyStore

MODEL = "acme/echo"


async def add(redis_url: str, tenant: str) -> str:
    redis = connect(redis_url)
    key, _ = await KeyStore(redis).add(tenant, ("infer",), UNLIMITED, pepper="")
    await redis.aclose()
    return key


@pytest.fixture(scope="module")
def keys(redis_url: str) -> dict[str, str]:
    return {tenant: asyncio.run(add(redis_url, tenant)) for tenant in ("acme", "rival")}


@pytest.fixture(scope="module")
def closed(stack: Any, shared_engine: Any, keys: dict[str, str]) -> str:
    return str(stack.start_gateway())


def test_another_tenant_cannot_open_a_summary(closed: str, keys: dict[str, str], redis_url: str) -> None:
    """A sealed summary is made here with the gateways' own secret, because none fits the echoing model's context."""

    async def secret() -> bytes:
        async with connect(redis_url) as redis:
            return await ResponseBroker(redis).seal_key()

    seal_key = asyncio.run(secret())
    for sealed_for, caller, status in (("acme", "acme", 200), ("acme", "rival", 400), ("rival", "acme", 400)):
        content = sealed("a summary", seal_key, tenant=sealed_for, model=MODEL)
        body = {"model": MODEL, "input": [{"type": "compaction", "encrypted_content": content}]}
        headers = {"authorization": f"Bearer {keys[caller]}"}
        answer = httpx.post(f"{closed}/v1/responses", json=body, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["code"] == "foreign_compaction"


def test_another_tenant_finds_no_such_response(closed: str, keys: dict[str, str]) -> None:
    def call(tenant: str, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {keys[tenant]}"}
        return httpx.request(method, f"{closed}/v1/responses{path}", headers=headers, timeout=60, **options)

    body = {"model": MODEL, "input": "secret"}
    response_id = call("acme", "POST", "", json=body | {"background": True}).json()["id"]
    for method, path in (
        ("GET", f"/{response_id}"),
        ("GET", f"/{response_id}?stream=true"),
        ("GET", f"/{response_id}/input_items"),
        ("POST", f"/{response_id}/cancel"),
        ("DELETE", f"/{response_id}"),
    ):
        answer = call("rival", method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found"), (method, path)
    item_id = response_id.replace("resp_", "msg_0_")
    for wrong in ({"previous_response_id": response_id}, {"input": [{"type": "item_reference", "id": item_id}]}):
        answer = call("rival", "POST", "", json=body | wrong)
        assert (answer.status_code, "not found" in answer.text or "no item" in answer.text) == (400, True)
    while (response := call("acme", "GET", f"/{response_id}").json())["status"] != "completed":
        assert response["status"] in ("queued", "in_progress")
    assert response["output"][0]["content"][0]["text"] == "secret"
