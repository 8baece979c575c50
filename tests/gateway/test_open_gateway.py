"""A gateway without API keys is open only on purpose."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.command import run_command
from fakes.waiting import wait_until

from penstock.contract.errors import RequestError
from penstock.contract.tenant import UNLIMITED, given_record
from penstock.gateway.http.entry import PROXY_HEADERS
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore

BODY = {"model": "acme/echo", "prompt": "hi"}
EVERY_ADDRESS = "0.0.0.0"


@pytest.fixture(autouse=True)
def without_keys(redis_url: str) -> Iterator[None]:
    yield
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)


async def _add(redis_url: str, tenant: str) -> str:
    async with connect(redis_url) as redis:
        return (await KeyStore(redis).add(tenant, ("infer",), UNLIMITED))[0]


def add(redis_url: str, tenant: str = "acme") -> str:
    return asyncio.run(_add(redis_url, tenant))


def ask(url: str, path: str = "/v1/completions", key: str = "", **headers: str) -> httpx.Response:
    sent = {"authorization": f"Bearer {key}"} if key else {}
    if path == "/v1/completions":
        return httpx.post(url + path, json=BODY, headers=sent | headers, timeout=60)
    return httpx.get(url + path, headers=sent | headers, timeout=60)


def message_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def test_other_machines_are_refused_until_a_key_exists(stack: Any, shared_engine: Any, redis_url: str) -> None:
    url = stack.start_gateway(host=EVERY_ADDRESS)
    answer = ask(url)
    assert answer.status_code == 401
    assert "penstock keys add TENANT" in message_of(answer) and "--allow-anonymous" in message_of(answer)
    for path in ("/v1/models", "/metrics", "/health/nodes", "/dashboard", "/v1/jobs"):
        assert ask(url, path).status_code == 401
    assert ask(url, "/health").status_code == 200
    key = add(redis_url)
    wait_until(lambda: ask(url, key=key).status_code == 200)
    assert ask(url).status_code == 401


def test_on_loopback_a_gateway_without_keys_serves_this_machine_and_no_proxy(stack: Any, shared_engine: Any) -> None:
    url = stack.start_gateway()
    assert ask(url).status_code == 200
    for name in PROXY_HEADERS:
        answer = ask(url, **{name: "for=192.0.2.1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "proxied_without_keys")
        assert "penstock keys add" in message_of(answer)


def test_anonymous_callers_may_only_ask_and_are_a_tenant_of_their_own_beside_keys(
    stack: Any, shared_engine: Any, redis_url: str
) -> None:
    url = stack.start_gateway(host=EVERY_ADDRESS, allow_anonymous=True)
    assert ask(url, **{"x-forwarded-for": "192.0.2.1"}).status_code == 200
    assert [ask(url, path).status_code for path in ("/v1/models", "/metrics", "/health/nodes")] == [200, 403, 403]
    key = add(redis_url)
    wait_until(lambda: ask(url, key=key[:-1] + "x").status_code == 401)
    job = ask(url, key=key).headers["x-penstock-job"]
    assert ask(url, f"/v1/jobs/{job}", key=key).status_code == 200
    assert ask(url, f"/v1/jobs/{job}").status_code == 404
    own = ask(url).headers["x-penstock-job"]
    assert ask(url, f"/v1/jobs/{own}").status_code == 200
    assert ask(url, f"/v1/jobs/{own}", key=key).status_code == 404
    with pytest.raises(RequestError, match="that of callers without a key"):
        add(redis_url, "anonymous")


def keys_command(redis_url: str, *words: str) -> str:
    done = run_command("keys", *words, "--redis-url", redis_url)
    return done.stdout + done.stderr


def test_after_the_last_key_the_gateway_says_how_to_open_it_and_does(
    stack: Any, shared_engine: Any, redis_url: str, tmp_path: Path
) -> None:
    note = tmp_path / "state" / "keys-seen"
    url, public = stack.start_gateway(keys_seen_file=note), stack.start_gateway(host=EVERY_ADDRESS)
    key = add(redis_url)
    wait_until(lambda: ask(url).status_code == 401)
    assert "`penstock keys add TENANT` makes one" in message_of(ask(url))
    assert "of acme): first end each with `penstock keys revoke ID`" in keys_command(redis_url, "open")
    assert "`penstock keys open` lets" in keys_command(redis_url, "revoke", "acme")
    wait_until(lambda: ask(url, key=key).status_code == 401)
    for refused in (ask(url), ask(url, key=key), ask(url, key="none")):
        assert "all keys are revoked" in message_of(refused) and "`penstock keys open`" in message_of(refused)
    assert "penstock keys open" not in message_of(ask(public, key=key))
    assert keys_command(redis_url, "open") == ""
    wait_until(lambda: ask(url).status_code == 200)
    wait_until(lambda: not note.exists())
    assert ask(url, "/metrics").status_code == ask(url, key="none").status_code == 200
    assert ask(stack.start_gateway(keys_seen_file=note)).status_code == 200
    assert "open since" in keys_command(redis_url, "list")
    for closed in (public, stack.start_gateway(require_keys=True)):
        assert ask(closed).status_code == 401
    new = add(redis_url, "next")
    wait_until(lambda: ask(url).status_code == 401)
    assert ask(url, key=new).status_code == 200
    keys_command(redis_url, "revoke", "next")
    wait_until(lambda: ask(url, key=new).status_code == 401, what="the earlier opening still counts")


def test_lost_keys_are_opened_and_an_opening_of_an_old_backup_is_not(
    stack: Any, shared_engine: Any, redis_url: str, tmp_path: Path
) -> None:
    note = tmp_path / "keys-seen"
    note.touch()
    url = stack.start_gateway(keys_seen_file=note)
    assert "they are missing now" in message_of(ask(url)) and "`penstock keys open`" in message_of(ask(url))
    assert keys_command(redis_url, "open") == ""
    wait_until(lambda: ask(url).status_code == 200)
    wait_until(lambda: not note.exists())
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)
    assert ask(url).status_code == 200, "what was opened stays open although Redis lost that"
    assert keys_command(redis_url, "open") == ""
    note.touch()
    os.utime(note, (time.time() + 60, time.time() + 60))
    assert ask(stack.start_gateway(keys_seen_file=note)).status_code == 401, "keys were seen after the opening"


def test_an_opening_by_a_clock_that_is_behind_counts_as_old_until_it_is_repeated(
    stack: Any, shared_engine: Any, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "keys-seen"
    note.touch()
    url = stack.start_gateway(keys_seen_file=note)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.queue.tenants.key_store.time", SimpleNamespace(time=lambda: time.time() - 600))
        asyncio.run(_open(redis_url))
    time.sleep(0.5)
    assert ask(url).status_code == 401
    asyncio.run(_open(redis_url))
    wait_until(lambda: ask(url).status_code == 200)


async def _open(redis_url: str) -> None:
    async with connect(redis_url) as redis:
        await KeyStore(redis).open()


def test_a_key_of_an_earlier_start_does_not_keep_the_gateway_closed(
    stack: Any, shared_engine: Any, redis_url: str
) -> None:
    asyncio.run(_bring(redis_url))
    url = stack.start_gateway()
    assert ask(url).status_code == 401
    assert keys_command(redis_url, "open") == ""
    wait_until(lambda: ask(url).status_code == 200)


async def _bring(redis_url: str) -> None:
    async with connect(redis_url) as redis:
        await KeyStore(redis).add_given(given_record("a-key-of-an-operator", ""))


def test_a_gateway_whose_keys_are_lost_stays_closed_after_a_restart(
    stack: Any, shared_engine: Any, redis_url: str, tmp_path: Path
) -> None:
    note = tmp_path / "state" / "keys-seen"
    key = add(redis_url)
    assert ask(stack.start_gateway(keys_seen_file=note), key=key).status_code == 200
    assert note.stat().st_mode & 0o777 == 0o600 and note.parent.stat().st_mode & 0o777 == 0o700
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)
    url = stack.start_gateway(keys_seen_file=note)
    for path in ("/v1/completions", "/metrics", "/health/nodes"):
        answer = ask(url, path)
        assert answer.status_code == 401
        assert "they are missing now" in message_of(answer) and "penstock keys add" in message_of(answer)
    assert ask(url, key=key).status_code == 401
    new = add(redis_url)
    wait_until(lambda: ask(url, key=new).status_code == 200)
