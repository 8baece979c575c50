"""Files and batches with API keys: a tenant has only its own, and a key's limits and end hold for its batches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.waiting import wait_until

from penstock.contract.tenant import Terms
from penstock.producer.stored_batches.row_client import KEY_TTL_S
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack, clients_with

ENDED = ("completed", "failed", "cancelled")
CHAT = "/v1/chat/completions"


async def change_keys(redis_url: str, revoked: str = "") -> dict[str, str]:
    async with connect(redis_url) as redis:
        store = KeyStore(redis)
        if revoked:
            await store.revoke((await store.find(revoked)).key_id)
            return {}
        slow = Terms(jobs_per_minute=600, burst_s=1)
        return {
            "ann": (await store.add("ann", ["infer"], Terms()))[0],
            "bob": (await store.add("bob", ["infer"], slow))[0],
            "cid": (await store.add("cid", ["infer"], Terms(), models=["acme/other"]))[0],
        }


@pytest.fixture(scope="module")
def clients(
    stack: Stack, shared_engine: EchoEngine, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, httpx.Client]]:
    made = asyncio.run(change_keys(redis_url))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(tmp_path_factory.mktemp("files")))
        url = stack.start_gateway()
    with clients_with(url, made) as clients:
        yield clients


def upload(client: httpx.Client, num_rows: int, text: str = "x") -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    rows = [{"custom_id": f"{i}", "method": "POST", "url": CHAT, "body": body} for i in range(num_rows)]
    content = "\n".join(map(json.dumps, rows)).encode()
    answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", content)})
    return str(answer.json()["id"])


def make(client: httpx.Client, file_id: str) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    return client.post("/v1/batches", json=body)


def ended(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    return wait_until(
        lambda: client.get(f"/v1/batches/{batch_id}").json(),
        lambda one: one["status"] not in ("validating", "in_progress", "finalizing"),
    )


def test_tenants_see_only_their_own(clients: dict[str, httpx.Client], engine: EchoEngine) -> None:
    ann, bob = clients["ann"], clients["bob"]
    file_id = upload(ann, 3)
    batch = ended(ann, make(ann, file_id).json()["id"])
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 3)
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch['id']}"):
        assert (ann.get(path).status_code, bob.get(path).status_code) == (200, 404), path
    for output in (f"/v1/files/{batch['output_file_id']}/content", f"/v1/batches/{batch['id']}/output"):
        assert (ann.get(output).status_code, bob.get(output).status_code) == (200, 404)
    assert bob.delete(f"/v1/files/{file_id}").status_code == 404
    assert make(bob, file_id).status_code == 404
    for action in ("cancel", "pause", "resume"):
        assert bob.post(f"/v1/batches/{batch['id']}/{action}").status_code == 404
    assert bob.get("/v1/files").json()["data"] == bob.get("/v1/batches").json()["data"] == []
    usage = ann.get("/v1/usage").json()
    assert sum(one["jobs"] for one in usage["data"]) == 3
    assert bob.get("/v1/usage").json()["data"] == []


def test_tenants_see_only_their_own_message_batches(clients: dict[str, httpx.Client], engine: EchoEngine) -> None:
    ann, bob, path = clients["ann"], clients["bob"], "/v1/messages/batches"
    params = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    body = {"requests": [{"custom_id": "a", "params": params}]}
    batch = ann.post(path, json=body).json()
    batch = wait_until(lambda: ann.get(f"{path}/{batch['id']}").json(), lambda one: one["processing_status"] == "ended")
    one = f"{path}/{batch['id']}"
    assert (ann.get(f"{one}/results").status_code, bob.get(f"{one}/results").status_code) == (200, 404)
    asked = [("GET", one), ("DELETE", one), *(("POST", f"{one}/{what}") for what in ("cancel", "pause", "resume"))]
    assert {bob.request(method, url).status_code for method, url in asked} == {404}
    assert bob.get(path).json()["data"] == [] and bob.get(path, params={"after_id": batch["id"]}).status_code == 400
    # A key without the model fails the request, not the batch.
    cid = clients["cid"]
    batch = cid.post(path, json=body).json()
    batch = wait_until(lambda: cid.get(f"{path}/{batch['id']}").json(), lambda one: one["processing_status"] == "ended")
    error = json.loads(cid.get(batch["results_url"]).text)["result"]["error"]["error"]
    assert error["type"] == "not_found_error" and "echo" not in error["message"].partition(";")[2]
    assert ann.delete(one).status_code == 200


def test_no_tenant_waits_for_a_job_of_another_one(clients: dict[str, httpx.Client], engine: EchoEngine) -> None:
    ann, bob = clients["ann"], clients["bob"]
    job = ann.post("/v1/jobs", json={"model": MODEL, "prompt": "secret", "max_tokens": 100}).json()["id"]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": f"{{{{{job}.text}}}}!"}]}
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": CHAT,
        "body": asked,
        "after": [{"job": job}],
        "priority": "standard",
    }
    batches = {}
    for name, client in (("ann", ann), ("bob", bob)):
        form: dict[str, Any] = {
            "data": {"purpose": "batch"},
            "files": {"file": ("flow.jsonl", json.dumps(line).encode())},
        }
        file_id = client.post("/v1/files", **form).json()["id"]
        flow = {"input_file_id": file_id, "endpoint": "flow", "completion_window": "24h"}
        batches[name] = ended(client, client.post("/v1/batches", json=flow).json()["id"])
    output = ann.get(f"/v1/batches/{batches['ann']['id']}/output").json()
    assert output["response"]["body"]["choices"][0]["message"]["content"] == "secret!"
    assert [one["code"] for one in batches["bob"]["errors"]["data"]] == ["unknown_parent"]
    assert bob.get(f"/v1/batches/{batches['ann']['id']}/rows").status_code == 404


def test_a_rate_limit_fails_no_row(clients: dict[str, httpx.Client], engine: EchoEngine) -> None:
    bob = clients["bob"]
    began_s = time.monotonic()
    batch = ended(bob, make(bob, upload(bob, 25)).json()["id"])
    assert batch["request_counts"] == {"total": 25, "completed": 25, "failed": 0}
    # 10 at once, and 10 a second.
    assert time.monotonic() - began_s > 1


def test_a_key_without_the_model_fails_the_batch(clients: dict[str, httpx.Client], engine: EchoEngine) -> None:
    cid = clients["cid"]
    batch = ended(cid, make(cid, upload(cid, 2)).json()["id"])
    assert batch["status"] == "failed"
    assert [one["code"] for one in batch["errors"]["data"]] == ["model_not_found"]
    assert MODEL not in batch["errors"]["data"][0]["message"].partition(";")[2]


def test_a_revoked_key_stops_its_batches(
    clients: dict[str, httpx.Client], engine: EchoEngine, stack: Stack, redis_url: str
) -> None:
    """Rows that were accepted before go on."""
    ann = clients["ann"]
    # The first rows are submitted at once. None of them may end before the batch pauses.
    engine.may_go_on.clear()
    engine.waits_after = 0
    batch_id = make(ann, upload(ann, 400)).json()["id"]
    assert ann.post(f"/v1/batches/{batch_id}/pause").json()["paused"] is True
    asyncio.run(change_keys(redis_url, revoked="ann"))
    other = asyncio.run(add_key(redis_url, "ann"))
    with httpx.Client(base_url=ann.base_url, headers={"authorization": f"Bearer {other}"}, timeout=60) as client:
        # Gateways and batches read keys anew every 2 s.
        time.sleep(KEY_TTL_S)
        wait_until(lambda: not ann.get("/v1/files").is_success and not client.get("/v1/files").is_error)
        engine.may_go_on.set()
        engine.waits_after = 1
        assert client.post(f"/v1/batches/{batch_id}/resume").status_code == 200
        batch = wait_until(
            lambda: client.get(f"/v1/batches/{batch_id}").json(), lambda one: "revoked" in str(one["waiting"])
        )
        assert batch["request_counts"]["completed"] < 400
        client.post(f"/v1/batches/{batch_id}/cancel")
        batch = wait_until(
            lambda: client.get(f"/v1/batches/{batch_id}").json(), lambda one: one["status"] == "cancelled"
        )
        assert batch["request_counts"]["completed"] < 400


def test_a_batch_of_a_key_that_is_older_than_batches_runs(
    clients: dict[str, httpx.Client], engine: EchoEngine, redis_url: str
) -> None:
    """Releases before the first one with batches noted no copy of a key for them."""
    with sync_redis.Redis.from_url(redis_url) as redis:
        redis.delete(keys.key_terms())
    batch = ended(clients["bob"], make(clients["bob"], upload(clients["bob"], 2)).json()["id"])
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2)


async def add_key(redis_url: str, tenant: str) -> str:
    async with connect(redis_url) as redis:
        return (await KeyStore(redis).add(tenant, ["infer"], Terms()))[0]
