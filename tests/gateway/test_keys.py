"""API keys at the gateway: which are accepted, for which tenant, with which limits; tenants never see others' jobs."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
import redis as sync_redis
from fakes.waiting import until, wait_until
from starlette.routing import Route

from penstock.contract.errors import ForbiddenError, NotFoundError
from penstock.contract.job import Priority
from penstock.contract.tenant import UNLIMITED, ApiKey, Terms
from penstock.gateway.app import DIALECTS, create_app
from penstock.gateway.http import entry
from penstock.gateway.settings import GatewaySettings
from penstock.producer.client import AsyncClient, ClientSettings
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore

MODEL = "acme/echo"
BODY = {"model": MODEL, "prompt": "hi"}
PEPPER = "of the tests"
PUBLIC_PATHS = entry.PUBLIC_PATHS.union(*(api.public_paths for api in DIALECTS))


async def add(redis_url, tenant, scopes=("infer",), terms=UNLIMITED, **rights):
    redis = connect(redis_url)
    key, record = await KeyStore(redis).add(tenant, scopes, terms, pepper=PEPPER, **rights)
    await redis.aclose()
    return key, record.key_id


@pytest.fixture(scope="module")
def closed(redis_url, stack, shared_engine):
    """A gateway that requires keys, and keys of two tenants, an admin, one with limits, and a revoked one."""
    made = {
        "acme": add(redis_url, "acme"),
        "rival": add(redis_url, "rival"),
        "admin": add(redis_url, "ops", ("admin",)),
        "limited": add(redis_url, "small", terms=Terms(jobs_per_minute=1, burst_s=1)),
        "revoked": add(redis_url, "acme"),
        "urgent": add(redis_url, "urgent", highest_class="interactive"),
        "bulk": add(redis_url, "bulk", highest_class="batch"),
    }
    found = {name: asyncio.run(making) for name, making in made.items()}
    asyncio.run(revoke(redis_url, found["revoked"][1]))
    url = stack.start_gateway(pepper=PEPPER, cors_origins=("https://page.example",))
    yield url, {name: key for name, (key, _) in found.items()}
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)


async def revoke(redis_url, key_id):
    redis = connect(redis_url)
    await KeyStore(redis).revoke(key_id)
    await redis.aclose()


def ask(url, key=None, *, path="/v1/completions", method="POST", headers=(), **body):
    sent = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, url + path, json={**BODY, **body}, headers={**sent, **dict(headers)}, timeout=60)


def test_key_acts_for_its_tenant(closed, redis_url):
    url, made = closed
    answer = ask(url, made["acme"])
    assert answer.status_code == 200
    with sync_redis.Redis.from_url(redis_url) as client:
        assert client.hget(keys.job(answer.headers["x-penstock-job"]), "tenant") == b"acme"


def test_openais_client_sends_its_key_as_usual(closed):
    url, made = closed
    with openai.OpenAI(base_url=f"{url}/v1", api_key=made["acme"]) as api:
        assert api.completions.create(model=MODEL, prompt="hello").choices[0].text == "hello"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="pk-wrong", max_retries=0) as api:
        with pytest.raises(openai.AuthenticationError) as caught:
            api.completions.create(model=MODEL, prompt="hello")
        assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("said", [None, "nonsense", "pk-0123456789abcdef-nonsense", "revoked"])
def test_without_a_valid_key_there_is_a_401_in_openais_shape(closed, said):
    url, made = closed
    answer = ask(url, made.get(said, said))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_the_operator_is_told_once_of_a_key_that_has_another_pepper(closed, caplog):
    url, made = closed
    key_id, secret = made["rival"].split("-", 2)[1:]
    for said in (
        f"pk-{key_id}-another",
        f"pk-{key_id}-{secret[:-1]}",
        f"pk-{'0' * 16}-{secret}",
        made["revoked"] + "x",
    ):
        message = ask(url, said).json()["error"]["message"]
        assert message == "unknown API key; `penstock keys add TENANT` makes one"
    told = [record for record in caplog.records if "its secret does not fit" in record.getMessage()]
    assert [(record.levelname, record.key_id, record.has_pepper) for record in told] == [("WARNING", key_id, True)]
    assert secret not in json.dumps(told[0].__dict__, default=str)


def test_every_route_but_probes_and_the_description_needs_a_key(closed):
    url, _ = closed
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1"))
    # `tests/gateway/apis/websocket/test_socket_keys.py` opens the WebSocket.
    routes = [route for route in app.routes if isinstance(route, Route)]
    asked = {(route.path, method) for route in routes for method in route.methods or ()}
    # The files of the web page have one route.
    assert {path for path, _ in asked} > {path for path in PUBLIC_PATHS if not path.startswith("/web/")}
    for path, method in sorted(asked):
        answer = ask(url, path=path.replace("{", "").replace("}", ""), method=method)
        is_public = path in PUBLIC_PATHS and method in ("GET", "HEAD", "OPTIONS")
        assert (answer.status_code == 401) is not is_public, (path, method)
    assert ask(url, path="/nowhere", method="GET").status_code == 401


def test_a_key_without_the_scope_gets_a_403(closed):
    url, made = closed
    answer = ask(url, made["admin"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
    for path in ("/metrics", "/health/nodes"):
        assert ask(url, made["acme"], path=path, method="GET").status_code == 403


@pytest.mark.parametrize(
    ("who", "asked", "counts_as"),
    [
        *(("acme", "interactive", None), ("acme", "standard", 1), ("acme", None, 1), ("acme", "batch", 2)),
        *(("urgent", "interactive", 0), ("urgent", None, 1)),
        *(("bulk", "interactive", None), ("bulk", "standard", None), ("bulk", "batch", 2), ("bulk", None, 2)),
    ],
)
def test_a_class_above_the_keys_highest_is_refused_by_name(closed, redis_url, who, asked, counts_as):
    url, made = closed
    answer = ask(url, made[who], priority=asked)
    if counts_as is None:
        error, highest = answer.json()["error"], {"acme": "standard", "bulk": "batch"}[who]
        assert (answer.status_code, error["code"], error["param"]) == (403, "class_not_allowed", "priority")
        assert (
            error["message"] == f"priority {asked!r} is above the highest class of this API key, which is {highest!r}"
        )
    else:
        with sync_redis.Redis.from_url(redis_url) as client:
            assert client.hget(keys.job(answer.headers["x-penstock-job"]), "level") == b"%d" % counts_as


def test_a_key_of_an_older_version_has_the_standard_class():
    old = ApiKey(key_id="0" * 16, digest="", tenant="acme").model_dump(mode="json", exclude={"highest_class"})
    assert ApiKey.model_validate(old).highest_class == "standard"


def test_open_gateway_allows_classes_up_to_its_setting(closed, redis_url, stack):
    with sync_redis.Redis.from_url(redis_url) as client:
        kept = client.hgetall(keys.API_KEYS)
        client.delete(keys.API_KEYS)
        answer = ask(stack.start_gateway(pepper=PEPPER), priority="interactive")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "class_not_allowed")
        assert "open_highest_class" in answer.json()["error"]["message"]
        told = stack.start_gateway(pepper=PEPPER, open_highest_class="interactive")
        assert ask(told, priority="interactive").status_code == 200
        client.hset(keys.API_KEYS, mapping=kept)


async def test_client_of_redis_may_use_classes_up_to_its_setting(closed, redis_url):
    async with AsyncClient(redis_url) as client:
        await (await client.submit("hi", priority=Priority.INTERACTIVE)).result()
    async with AsyncClient(redis_url, settings=ClientSettings(highest_class="standard")) as client:
        with pytest.raises(ForbiddenError) as caught:
            await client.submit("hi", priority=Priority.INTERACTIVE)
        assert caught.value.param == "priority"


def used(url, key, **query):
    return httpx.get(f"{url}/v1/usage", params=query, headers={"authorization": f"Bearer {key}"}, timeout=60)


def test_key_reads_its_own_usage_and_an_admin_that_of_all_keys(closed, redis_url):
    url, made = closed
    for key in (made["urgent"], made["urgent"], made["rival"]):
        assert ask(url, key, prompt="12345", max_tokens=3).status_code == 200

    def of_key(rows, key):
        mine = [row for row in rows if row["key_id"] == key.split("-")[1]]
        return [sum(row[name] for row in mine) for name in ("jobs", "prompt_tokens", "completion_tokens")]

    before, again = (used(url, made["urgent"]).json()["data"] for _ in range(2))
    assert before == again
    assert ask(url, made["urgent"], prompt="12345", max_tokens=3).status_code == 200
    after = used(url, made["urgent"], days=2).json()["data"]
    gained = [b - a for a, b in zip(of_key(before, made["urgent"]), of_key(after, made["urgent"]), strict=True)]
    assert gained == [1, 5, 3]
    assert {row["tenant"] for row in after} == {"urgent"}

    assert used(url, made["urgent"], all="true").status_code == 403
    assert used(url, made["urgent"], days=0).json()["error"]["param"] == "days"
    assert used(url, made["urgent"], since="ever").json()["error"]["param"] == "since"
    asyncio.run(as_admin(redis_url, url, made, of_key))


async def as_admin(redis_url, url, made, of_key):
    key, _ = await add(redis_url, "boss", ("admin",))
    # What gateways know of keys is a little old.
    answer = await until(lambda: asyncio.to_thread(used, url, key, all="true"), lambda one: one.status_code != 401)
    assert of_key(answer.json()["data"], made["rival"])[1:] == [5, 3]


def test_limits_of_a_key_are_enforced_and_reported(closed):
    url, made = closed
    assert ask(url, made["limited"]).status_code == 200
    answer = ask(url, made["limited"], prompt="again")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 55 <= int(answer.headers["retry-after"]) <= 60
    assert ask(url, made["acme"]).status_code == 200


def test_tenants_with_equal_idempotency_keys_have_jobs_of_their_own(closed):
    url, made = closed
    asked = [("acme", "one"), ("rival", "one"), ("acme", "one")]
    jobs = [ask(url, made[who], headers={"idempotency-key": what}).headers["x-penstock-job"] for who, what in asked]
    assert jobs[0] == jobs[2] != jobs[1]


async def test_job_of_another_tenant_can_be_neither_read_nor_changed(closed, redis_url):
    url, made = closed
    job_id = (await asyncio.to_thread(ask, url, made["acme"])).headers["x-penstock-job"]
    async with AsyncClient(redis_url, tenant="rival") as client:
        for call in (client.attach, client.status, client.cancel, client.result):
            with pytest.raises(NotFoundError):
                await call(job_id)
    async with AsyncClient(redis_url, tenant="acme") as client:
        assert (await client.result(job_id)).choices[0].text == "hi"


def test_cors_lets_pages_of_allowed_sites_read_answers_and_refusals(closed):
    url, made = closed
    origin = {"origin": "https://page.example"}
    asking = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert httpx.options(f"{url}/v1/completions", headers=asking, timeout=60).status_code == 200
    refused = ask(url, headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin["origin"])
    _, late = [ask(url, made["limited"], headers=origin, prompt=text) for text in ("more", "again")]
    shown = {name.strip().lower() for name in late.headers["access-control-expose-headers"].split(",")}
    assert late.status_code == 429 and {"retry-after", "x-penstock-job", "x-request-id"} <= shown


def test_the_first_key_closes_an_open_gateway_for_good(closed, redis_url, stack, monkeypatch):
    """Also when Redis has lost the keys: no request is accepted by accident."""
    monkeypatch.setattr("penstock.producer.client.pools.KEYS_TTL_S", 0.2)
    _, made = closed
    with sync_redis.Redis.from_url(redis_url) as client:
        kept = client.hgetall(keys.API_KEYS)
        client.delete(keys.API_KEYS)
        url = stack.start_gateway(pepper=PEPPER)
        assert ask(url).status_code == 200
        client.hset(keys.API_KEYS, mapping=kept)
        wait_until(lambda: ask(url).status_code == 401)
        assert ask(url, made["acme"]).status_code == 200
        client.delete(keys.API_KEYS)
        wait_until(lambda: ask(url, made["acme"]).status_code == 401)
        assert ask(url).status_code == 401
        strict = stack.start_gateway(require_keys=True)
        assert ask(strict).status_code == 401
        client.hset(keys.API_KEYS, mapping=kept)


def test_an_open_gateway_says_so_once_and_logs_no_keys(closed, redis_url, stack, caplog):
    _, made = closed
    with sync_redis.Redis.from_url(redis_url) as client:
        kept = client.hgetall(keys.API_KEYS)
        client.delete(keys.API_KEYS)
        caplog.set_level("INFO")
        url = stack.start_gateway(pepper=PEPPER)
        assert ask(url).status_code == ask(url, made["acme"]).status_code == 200
        client.hset(keys.API_KEYS, mapping=kept)
    assert [r.levelname for r in caplog.records if "there are no API keys" in r.getMessage()] == ["WARNING"]
    closed_url = stack.start_gateway(pepper=PEPPER)
    assert ask(closed_url, made["acme"]).status_code == 200
    assert [r.levelname for r in caplog.records if "there are no API keys" in r.getMessage()] == ["WARNING"]

    def said() -> str:
        return json.dumps([record.__dict__ for record in caplog.records], default=str)

    # A request is logged after its answer has gone out.
    wait_until(lambda: made["acme"].split("-")[1] in said())
    assert made["acme"].split("-", 2)[2] not in said()
