"""Damaged records of files, batches, webhooks, usage, pools and nodes: others' work goes on, and no list answers 500.

A cell of the matrix is a field of a record, or a whole key, and a kind of damage. Each is made in Redis itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as sync_redis

from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack, clients_with

PEPPER = "damaged-records"
F, W, P = "penstock:{.files}", keys.WEBHOOKS, keys.prefix("echo")
CHAT = "/v1/chat/completions"
DAMAGES: dict[str, bytes | None] = {
    "absent": None,
    "empty": b"",
    "text": b"junk",
    "negative": b"-5",
    "nan": b"nan",
    "infinite": b"inf",
    "huge": b"1e300",
    "digits": b"9" * 40,
    "bytes": b"\xff\xfe",
    "another": b"7",
}


def row(custom_id: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": MODEL, "messages": messages}}


class World:
    """Two tenants with files, batches, message batches, webhooks and usage, and the snapshot of all of it."""

    def __init__(self, url: str, redis_url: str, http: dict[str, httpx.Client]) -> None:
        self.url, self.http = url, http
        self.redis: Any = sync_redis.Redis.from_url(redis_url)
        self.ids: dict[str, str] = {}
        for tenant in ("ann", "bob"):
            self._fill(tenant, http[tenant])
        time.sleep(0.3)
        self.snapshot = {key: (self.redis.dump(key), max(0, self.redis.pttl(key))) for key in self.redis.keys()}

    def _fill(self, tenant: str, http: httpx.Client) -> None:
        def file_of(name: str) -> str:
            content = "".join(json.dumps(row(f"r{number}", f"{tenant} {number}")) + "\n" for number in range(3))
            form = {"file": (f"{name}.jsonl", content.encode())}
            return str(http.post("/v1/files", files=form, data={"purpose": "batch"}).json()["id"])

        self.ids[f"{tenant} file"], self.ids[f"{tenant} other file"] = file_of("a"), file_of("b")
        hook = {"url": "https://receiver.invalid/x", "name": "x", "event_types": ["batch.completed", "job.succeeded"]}
        for name in ("hook", "other hook"):
            self.ids[f"{tenant} {name}"] = str(http.post("/v1/webhook_endpoints", json=hook).json()["id"])
        given = {"input_file_id": self.ids[f"{tenant} file"], "endpoint": CHAT, "completion_window": "24h"}
        for name in ("batch", "other batch", "open batch"):
            self.ids[f"{tenant} {name}"] = one = str(http.post("/v1/batches", json=given).json()["id"])
            if name == "open batch":
                http.post(f"/v1/batches/{one}/pause")
        message = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        for name in ("messages", "other messages"):
            made = http.post("/v1/messages/batches", json={"requests": [{"custom_id": "r", "params": message}]})
            self.ids[f"{tenant} {name}"] = str(made.json()["id"])
        until_s = time.monotonic() + 60
        for path in ("/v1/batches", "/v1/messages/batches"):
            while not all(
                one.get("status", one.get("processing_status")) in ("completed", "ended") or one["paused"]
                for one in http.get(path).json()["data"]
            ):
                assert time.monotonic() < until_s
                time.sleep(0.05)

    def restore(self) -> None:
        """Let all keys but those of the pool, which its node writes, be as they were."""
        with self.redis.pipeline(transaction=False) as pipe:
            for key in self.redis.keys():
                if not key.startswith(P.encode()):
                    pipe.delete(key)
            for key, (value, ttl) in self.snapshot.items():
                if value is not None and not key.startswith(P.encode()):
                    pipe.restore(key, ttl, value, replace=True)
            pipe.execute()


@pytest.fixture(scope="module")
def world(stack: Stack, shared_engine: EchoEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    async def made() -> dict[str, str]:
        async with connect(stack.redis_url) as redis:
            store = KeyStore(redis)
            scopes = {"ann": {"infer"}, "bob": {"infer"}, "admin": {"admin", "infer", "metrics"}}
            return {name: (await store.add(name, given, Terms(), pepper=PEPPER))[0] for name, given in scopes.items()}

    api_keys = stack.call(made())
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(tmp_path_factory.mktemp("files")))
        url = stack.start_gateway(pepper=PEPPER)
    with clients_with(url, api_keys) as http:
        yield World(url, stack.redis_url, http)


def doors(world: World, tenant: str) -> list[str]:
    ids = {name.removeprefix(f"{tenant} "): one for name, one in world.ids.items() if name.startswith(tenant)}
    paths = [
        "/v1/files",
        "/v1/batches",
        "/v1/messages/batches",
        "/v1/webhook_endpoints",
        "/v1/usage",
        "/v1/models",
        "/v1/usage?by=hour",
        "/v1/jobs",
        "/v1/jobs/paused",
        "/v1/jobs/events/cursor",
        "/v1/key",
        "/v1/jobs?state=queued",
    ]
    for name, one in ids.items():
        if "file" in name:
            paths += [f"/v1/files/{one}", f"/v1/files/{one}/content"]
        elif "batch" in name:
            paths += [f"/v1/batches/{one}", f"/v1/batches/{one}/output", f"/v1/batches/{one}/errors"]
        elif "messages" in name:
            paths += [f"/v1/messages/batches/{one}", f"/v1/messages/batches/{one}/results"]
        elif "hook" in name:
            paths += [
                f"/v1/webhook_endpoints/{one}",
                *(f"/v1/webhook_endpoints/{one}/deliveries?status={s}" for s in ("pending", "dead", "delivered")),
            ]
    return paths
