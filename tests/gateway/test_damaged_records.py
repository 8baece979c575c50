"""A gateway beside damaged records: no list answers 500, a damaged record is named, and the others' work goes on.

`tests/queue/test_damaged_readers.py` has each field and key; here, a few of each record go through HTTP and the loops.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.waiting import wait_until
from fakes.webhook_receiver import ALLOWED, WebhookReceiver

from penstock.contract.tenant import Terms
from penstock.gateway.apis.webhooks import deliverer
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack, clients_with

PEPPER = "damaged-records"
F, W, P = keys.prefix(keys.FILES), keys.WEBHOOKS, keys.prefix("echo")
CHAT = "/v1/chat/completions"
Http = dict[str, httpx.Client]


@pytest.fixture(scope="module")
def http(stack: Stack, shared_engine: EchoEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    async def made() -> dict[str, str]:
        async with connect(stack.redis_url) as redis:
            store = KeyStore(redis)
            scopes = {"ann": {"infer"}, "bob": {"infer"}, "admin": {"admin", "metrics"}}
            return {name: (await store.add(name, given, Terms(), pepper=PEPPER))[0] for name, given in scopes.items()}

    api_keys, settings = stack.call(made()), dict[str, Any](ALLOWED)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(tmp_path_factory.mktemp("files")))
        patched.setenv("PENSTOCK_FILES_BATCH_LEASE_S", "1")
        patched.setattr(deliverer, "LOOK_S", 0.05)
        patched.setattr(deliverer, "IDLE_LOOK_S", 0.05)
        url = stack.start_gateway(pepper=PEPPER, **settings)
        with clients_with(url, api_keys) as clients:
            yield clients


@pytest.fixture
def client(stack: Stack, http: Http) -> Iterator[Any]:
    with sync_redis.Redis.from_url(stack.redis_url) as client:
        yield client


def upload(http: httpx.Client) -> str:
    messages = [{"role": "user", "content": "text"}]
    row = {"custom_id": "r", "method": "POST", "url": CHAT, "body": {"model": MODEL, "messages": messages}}
    form = {"file": ("rows.jsonl", json.dumps(row).encode())}
    return str(http.post("/v1/files", files=form, data={"purpose": "batch"}).json()["id"])


def make_batch(http: httpx.Client, *, paused: bool = False) -> str:
    given = {"input_file_id": upload(http), "endpoint": CHAT, "completion_window": "24h"}
    batch_id = str(http.post("/v1/batches", json=given).json()["id"])
    if paused:
        assert http.post(f"/v1/batches/{batch_id}/pause").status_code == 200
    return batch_id


def make_messages(http: httpx.Client) -> str:
    params = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    made = http.post("/v1/messages/batches", json={"requests": [{"custom_id": "r", "params": params}]})
    return str(made.json()["id"])


def make_hook(http: httpx.Client, url: str) -> str:
    given = {"url": url, "name": "x", "event_types": ["batch.completed"]}
    return str(http.post("/v1/webhook_endpoints", json=given).json()["id"])


def ended(make: Callable[[httpx.Client], str], path: str) -> Callable[[httpx.Client], str]:
    def made(http: httpx.Client) -> str:
        one = make(http)
        wait_until(lambda: {"completed", "ended"} & {*map(str, http.get(f"{path}/{one}").json().values())})
        return one

    return made


RECORDS: dict[str, tuple[Callable[[httpx.Client], str], str, str]] = {
    "file": (upload, "/v1/files", f"{F}:file:"),
    "batch": (ended(make_batch, "/v1/batches"), "/v1/batches", f"{F}:batch:"),
    "message batch": (ended(make_messages, "/v1/messages/batches"), "/v1/messages/batches", f"{F}:batch:"),
}
FIELDS: dict[str, list[tuple[str, str | bytes | None]]] = {
    "file": [("bytes", "nan"), ("created", "1e300"), ("expires", "-5"), ("purpose", b"\xff"), ("name", None)],
    "batch": [("created_at", "1e300"), ("status", "junk"), ("request", "[1]"), ("completed", "-5"), ("rate", "nan")],
    "message batch": [("expires_at", ""), ("total", "inf"), ("request", None), ("errors", "{"), ("failed", "1e300")],
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_damaged_record_is_named_and_hides_itself_alone(http: Http, client: Any, kind: str) -> None:
    make, path, prefix = RECORDS[kind]
    whole = make(http["ann"])
    for name, value in FIELDS[kind]:
        damaged = make(http["ann"])
        if value is None:
            client.hdel(prefix + damaged, name)
        else:
            client.hset(prefix + damaged, name, value)
        answer = http["ann"].get(f"{path}/{damaged}")
        assert (answer.status_code, f"{name} is" in answer.text) == (409, True), answer.text
        assert answer.headers["x-should-retry"] == "false"
        listed = {one["id"] for one in http["ann"].get(path, params={"limit": 100}).json()["data"]}
        assert whole in listed and damaged not in listed
    client.delete(prefix + damaged)
    client.rpush(prefix + damaged, "junk")
    assert http["ann"].get(f"{path}/{damaged}").status_code == 409
    assert http["ann"].get(path).status_code == 200
    client.delete(prefix + damaged)


def test_an_open_batch_that_is_damaged_ends_as_failed_and_the_others_complete(http: Http, client: Any) -> None:
    damaged = make_batch(http["ann"], paused=True)
    client.hset(f"{F}:batch:{damaged}", mapping={"left": "nan", "token": "junk", "created_at": "junk"})
    client.zadd(f"{F}:open_batches", {damaged: 0, "junk": 0, b"\xff": 0})
    client.zadd(f"{F}:untold", {"junk": 1, "a b c d": 1, f"{damaged} junk ann": 1})
    client.zadd(f"{F}:expiry", {"junk": 1, "file:x": 1, b"\xff": 1})
    client.zadd(f"{F}:garbage", {"../../x": 1})
    other = make_batch(http["bob"])
    wait_until(lambda: http["bob"].get(f"/v1/batches/{other}").json()["status"] == "completed")
    wait_until(lambda: client.hget(f"{F}:batch:{damaged}", "status") == b"failed")
    assert b"created_at is" in client.hget(f"{F}:batch:{damaged}", "errors")


def test_damaged_webhooks_are_given_up_and_the_others_are_delivered(http: Http, client: Any) -> None:
    with WebhookReceiver() as receiver:
        hooks = [make_hook(http["ann"], receiver.url("/ann")) for _ in range(3)]
        make_hook(http["bob"], receiver.url("/bob"))
        record = json.loads(client.hget(f"{W}:endpoints", hooks[1]))
        client.hset(keys.WEBHOOK_SECRETS, hooks[0], "junk")
        client.hset(f"{W}:endpoints", hooks[1], json.dumps(record | {"url": 7}))
        client.hset(f"{W}:pending", "ann", "nan")
        make_batch(http["ann"])
        deliveries = f"/v1/webhook_endpoints/{hooks[2]}/deliveries"
        wait_until(
            lambda: "/ann" in [one.path for one in receiver.accepted],
            what=lambda: (receiver.received, http["ann"].get(deliveries, params={"status": "pending"}).text),
        )
        client.hset(f"{W}:endpoints", hooks[2], "junk")
        of_bob = make_batch(http["bob"])
        wait_until(lambda: of_bob in [one.event["data"]["id"] for one in receiver.accepted])
        (dead,) = http["ann"].get(f"/v1/webhook_endpoints/{hooks[0]}/deliveries").json()["data"]
        assert "secret" in dead["answer"]
        for hook in hooks[1:]:
            assert http["ann"].get(f"/v1/webhook_endpoints/{hook}").json()["error"]["code"] == "damaged_record"
            assert http["bob"].get(f"/v1/webhook_endpoints/{hook}").status_code == 404
        assert [one["id"] for one in http["ann"].get("/v1/webhook_endpoints").json()["data"]] == hooks[:1]
        for hook in hooks:
            assert http["ann"].delete(f"/v1/webhook_endpoints/{hook}").status_code == 200


def test_damaged_sums_and_keys_of_a_pool_end_no_list(http: Http, client: Any) -> None:
    day = int(time.time()) // 86_400
    for name in ("counts", "backlog", "queued", "stored", "reserved"):
        client.hset(f"{P}:{name}", mapping={"submitted": "nan", "0": "junk", b"\xff": "1", "ann": "1e300"})
    client.hset(f"{P}:usage:{day}", mapping={"junk": "1", "ann:a:jobs": "nan", b"\xff:a:jobs": 1})
    client.hset(f"{P}:paused", mapping={"level:junk": "x", "tenant:eve": "nan"})
    client.zadd(f"{P}:events", {"junk": 1, "1 a": 2, b"\xff": 3})
    for key in ("paused", "delayed", "awaiting", "adapters", "ended_before"):
        client.delete(f"{P}:{key}")
        client.rpush(f"{P}:{key}", "junk")
    try:
        for path in ("/metrics", "/dashboard", "/v1/usage", "/v1/jobs", "/v1/jobs/paused"):
            assert http["admin"].get(path).status_code == 200, path
        for path in ("/v1/usage?by=hour", "/v1/usage", "/v1/models", "/v1/jobs/events/cursor", "/v1/jobs"):
            assert http["ann"].get(path).status_code == 200, path
    finally:
        client.delete(*(f"{P}:{key}" for key in ("paused", "delayed", "awaiting", "adapters", "ended_before")))
