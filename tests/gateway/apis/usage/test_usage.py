"""`GET /v1/usage`: used tokens by day and by hour, as JSON and CSV, of the caller's key or of all keys."""

from __future__ import annotations

import asyncio
import csv
import gc
import io
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import httpx
import pytest
import redis as sync_redis
from fakes.command import run_command
from fakes.waiting import wait_until

from penstock.contract.tenant import UNLIMITED, Scope
from penstock.contract.usage import MAX_DAYS
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack, clients_with

POOL = "echo"
TENANTS: dict[str, Scope] = {"acme": "infer", "rival": "infer", "ops": "admin", "prometheus": "metrics"}
Callers = dict[str, httpx.Client]


@pytest.fixture(scope="module")
def callers(redis_url: str, stack: Stack, shared_engine: EchoEngine) -> Iterator[Callers]:
    """A client with a key of each tenant."""

    async def add() -> dict[str, str]:
        async with connect(redis_url) as redis:
            return {tenant: (await KeyStore(redis).add(tenant, [it], UNLIMITED))[0] for tenant, it in TENANTS.items()}

    made = asyncio.run(add())
    url = stack.start_gateway()
    with clients_with(url, made) as clients:
        yield clients
    with sync_redis.Redis.from_url(redis_url) as client:
        client.delete(keys.API_KEYS)


def key_id_of(client: httpx.Client) -> str:
    return str(client.headers["authorization"]).split("-")[1]


def rows_of(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    answer = client.get("/v1/usage", params=query)
    assert answer.status_code == 200, answer.text
    return cast(list[dict[str, Any]], answer.json()["data"])


def sums_of(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for row in rows:
        jobs, prompt, completion = found.get(row["tenant"], (0, 0, 0))
        counts = (int(row["jobs"]), int(row["prompt_tokens"]), int(row["completion_tokens"]))
        found[row["tenant"]] = (jobs + counts[0], prompt + counts[1], completion + counts[2])
    return found


@pytest.fixture(scope="module")
def used(callers: Callers, redis_url: str) -> Iterator[None]:
    """Jobs of two tenants today, and usage that was stored some days ago."""
    for tenant, times in (("acme", 2), ("rival", 1)):
        for _ in range(times):
            body = {"model": MODEL, "prompt": "12345", "max_tokens": 3}
            assert callers[tenant].post("/v1/completions", json=body).status_code == 200
    owner = f"acme:{key_id_of(callers['acme'])}"
    with sync_redis.Redis.from_url(redis_url) as client:
        for days_ago, jobs in ((3, 30), (40, 400)):
            day = int(time.time()) // 86_400 - days_ago
            client.hset(keys.usage(POOL, day), mapping={f"{owner}:jobs": jobs, f"{owner}:prompt": 7})
        hour = int(time.time()) // 3_600 - 30
        client.hset(keys.hour_usage(POOL, hour), mapping={f"{owner}:jobs": 5, f"{owner}:cached": 2})
    yield


def day_of(days_ago: int) -> str:
    return datetime.fromtimestamp(time.time() - days_ago * 86_400, UTC).date().isoformat()


@pytest.mark.usefixtures("used")
class TestReport:
    def test_key_sees_its_own_usage_and_no_other(self, callers: Callers) -> None:
        rows = rows_of(callers["acme"], days=1)
        assert sums_of(rows) == {"acme": (2, 10, 6)}
        assert {row["key_id"] for row in rows} == {key_id_of(callers["acme"])}
        assert {(row["pool"], row["model"]) for row in rows} == {(POOL, MODEL)}
        assert rows_of(callers["acme"], days=1, key_id=key_id_of(callers["acme"]), tenant="acme", all="false") == rows

    @pytest.mark.parametrize("name", ["all", "tenant", "key_id"])
    def test_usage_of_others_is_refused_without_the_scope_admin(self, callers: Callers, name: str) -> None:
        asked = {"all": "true", "tenant": "rival", "key_id": key_id_of(callers["rival"])}[name]
        answer = callers["acme"].get("/v1/usage", params={name: asked})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
        assert "admin" in answer.json()["error"]["message"]

    def test_admin_sees_all_keys_or_those_that_it_names(self, callers: Callers) -> None:
        admin = callers["ops"]
        assert sums_of(rows_of(admin, days=1)) == {"acme": (2, 10, 6), "rival": (1, 5, 3)}
        assert sums_of(rows_of(admin, days=1, all="true", tenant="rival")) == {"rival": (1, 5, 3)}
        assert sums_of(rows_of(admin, days=1, key_id=key_id_of(callers["acme"]))) == {"acme": (2, 10, 6)}
        assert rows_of(admin, days=1, all="false") == []
        for query in ({"key_id": "0" * 16}, {"key_id": key_id_of(callers["acme"]), "tenant": "rival"}):
            answer = admin.get("/v1/usage", params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "key_id")

    def test_start_and_end_are_part_of_the_report(self, callers: Callers) -> None:
        def jobs_of(**query: Any) -> list[tuple[str, int]]:
            return [(row["date"], row["jobs"]) for row in rows_of(callers["acme"], **query)]

        early, late, today = (day_of(40), 400), (day_of(3), 30), (day_of(0), 2)
        assert jobs_of() == [late, today]
        assert jobs_of(start=day_of(40)) == [early, late, today]
        assert jobs_of(start=day_of(39), end=day_of(3)) == [late]
        assert jobs_of(start=day_of(40), end=day_of(4)) == [early]
        assert jobs_of(end=day_of(3), days=1) == [late]
        assert jobs_of(start=day_of(2), end=day_of(-5)) == jobs_of(end=day_of(-50), days=1) == [today]

    def test_hours_have_their_own_rows(self, callers: Callers) -> None:
        rows = rows_of(callers["acme"], by="hour", days=3)
        then = datetime.fromtimestamp(time.time() - 30 * 3600, UTC)
        first = rows[0]
        assert (first["date"], first["hour"]) == (then.date().isoformat(), then.hour)
        assert (first["jobs"], first["cached_tokens"]) == (5, 2)
        assert sum(row["jobs"] for row in rows[1:]) == 2
        assert sums_of(rows_of(callers["acme"], by="hour")) == {"acme": (2, 10, 6)}
        of_the_day = rows_of(callers["acme"], by="hour", start=then.date().isoformat(), end=then.date().isoformat())
        assert [row["hour"] for row in of_the_day] == [then.hour]
        hour = then.strftime("%Y-%m-%dT%H")
        assert [row["jobs"] for row in rows_of(callers["acme"], by="hour", start=hour, end=hour)] == [5]

    def test_rows_are_those_of_a_pool_or_a_model(self, callers: Callers) -> None:
        everything = rows_of(callers["ops"])
        assert len(everything) == 3
        for query in ({"pool": POOL}, {"model": MODEL}, {"model": "echo-alias"}, {"pool": POOL, "model": MODEL}):
            assert rows_of(callers["ops"], **query) == everything
        for name, code in (("pool", "pool_not_found"), ("model", "model_not_found")):
            error = callers["ops"].get("/v1/usage", params={name: "none"}).json()["error"]
            assert (error["code"], error["param"]) == (code, name)

    def test_pages_hold_each_row_once(self, callers: Callers) -> None:
        everything = rows_of(callers["ops"], start=day_of(50))
        url, found, has_more = "/v1/usage?" + f"start={day_of(50)}&limit=1", [], True
        while has_more:
            answer = callers["ops"].get(url)
            page = answer.json()
            found += page["data"]
            has_more = page["has_more"]
            assert has_more is (page["next"] is not None) is ("next" in answer.links)
            url = answer.links["next"]["url"] if has_more else ""
        assert found == everything
        assert len(found) == 4

    @pytest.mark.parametrize("how", ["header", "parameter"])
    def test_csv_has_the_rows_of_json(self, callers: Callers, how: str) -> None:
        by_header = how == "header"
        query = {"start": day_of(50)} | ({} if by_header else {"format": "csv"})
        headers = {"accept": "text/csv, application/json;q=0.5"} if by_header else {}
        answer = callers["ops"].get("/v1/usage", params=query, headers=headers)
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        expected = rows_of(callers["ops"], start=day_of(50))
        assert rows == [
            {name: "" if value is None else str(value) for name, value in row.items() if name != "object"}
            for row in expected
        ]

    def test_long_report_as_csv_says_where_it_continues(self, callers: Callers) -> None:
        answer = callers["ops"].get("/v1/usage", params={"start": day_of(50), "format": "csv", "limit": 3})
        assert answer.text.count("\n") == 1 + 3
        rest = callers["ops"].get(answer.links["next"]["url"])
        assert rest.text.count("\n") == 1 + 1
        assert rest.headers["content-type"].startswith("text/csv")
        assert rest.links == {}

    @pytest.mark.parametrize(
        ("accept", "kind"),
        [
            ("*/*", "application/json"),
            ("application/json", "application/json"),
            ("text/csv", "text/csv"),
            ("text/csv;q=0.1, */*", "text/csv"),
            ("text/csv, application/json", "application/json"),
            ("text/csv;q=0", "application/json"),
            (",;q=,text/html;q=x", "application/json"),
        ],
    )
    def test_json_is_sent_unless_csv_is_preferred(self, callers: Callers, accept: str, kind: str) -> None:
        answer = callers["acme"].get("/v1/usage", headers={"accept": accept})
        assert answer.headers["content-type"].partition(";")[0] == kind
        forced = callers["acme"].get("/v1/usage", params={"format": "json"}, headers={"accept": accept})
        assert forced.json()["object"] == "list"

    def test_answer_matches_the_document(self, callers: Callers) -> None:
        validator = pytest.importorskip("openapi_schema_validator")
        operation = callers["ops"].get("/openapi.json").json()["paths"]["/v1/usage"]["get"]
        content = operation["responses"]["200"]["content"]
        assert content["text/csv"]["schema"] == {"type": "string"}
        schema = content["application/json"]["schema"]
        for query in ({}, {"by": "hour"}, {"limit": 1}):
            answer = callers["ops"].get("/v1/usage", params=query).json()
            assert answer["data"]
            validator.OAS31Validator(schema).validate(answer)
            assert answer["data"][0].keys() == schema["properties"]["data"]["items"]["properties"].keys()
        assert {one["name"] for one in operation["parameters"]} > {"start", "end", "by", "format", "pool", "key_id"}
        assert all(one["description"] for one in operation["parameters"])


@pytest.mark.parametrize(
    ("query", "param", "said"),
    [
        ({"days": "0"}, "days", "at least 1"),
        ({"days": str(MAX_DAYS + 1)}, "days", f"at most {MAX_DAYS}"),
        ({"days": "4", "by": "hour"}, "days", "from 1 to 3"),
        ({"days": "many"}, "days", "integer"),
        ({"days": "1", "start": "2026-11-22"}, "days", "start"),
        ({"start": "yesterday"}, "start", "a date such as"),
        ({"start": "2026-02-30"}, "start", "a date such as"),
        ({"start": "2026-11-22T05"}, "start", "a date such as"),
        ({"by": "hour", "end": "2026-11-22T24"}, "end", "an hour such as"),
        ({"start": "2001-01-01"}, "start", "kept for 92 days"),
        ({"by": "hour", "end": "2001-01-01T00"}, "end", "kept for 72 hours"),
        ({"start": day_of(1), "end": day_of(2)}, "start", "after end"),
        ({"start": day_of(-2)}, "start", "after now"),
        ({"by": "minute"}, "by", "'day' or 'hour'"),
        ({"format": "xml"}, "format", "'json' or 'csv'"),
        ({"limit": "10001"}, "limit", "at most 10000"),
        ({"limit": "0"}, "limit", "at least 1"),
        ({"after": "x"}, "after", "next"),
        ({"after": "99999999999999:a:b:c"}, "after", "next"),
        ({"tenant": "a b"}, "tenant", "pattern"),
        ({"all": "maybe"}, "all", "true or false"),
        ({"since": "ever"}, "since", "unknown field"),
        ({"day": "3"}, "day", "days"),
    ],
)
def test_wrong_parameter_is_refused_by_name(callers: Callers, query: dict[str, str], param: str, said: str) -> None:
    for caller in ("acme", "ops"):
        answer = callers[caller].get("/v1/usage", params=query)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert said in error["message"]


def test_report_of_many_keys_leaves_the_event_loop_free(callers: Callers, stack: Stack, redis_url: str) -> None:
    name = keys.usage(POOL, int(time.time()) // 86_400 - 80)
    fields = {f"t{number}:k{number}:{what}": number for number in range(12_000) for what in ("jobs", "prompt")}
    query: dict[str, str | int] = {"start": day_of(80), "end": day_of(80), "limit": 10_000}
    with (
        sync_redis.Redis.from_url(redis_url) as redis,
        httpx.Client(base_url=stack.start_gateway(), headers=callers["ops"].headers, timeout=60) as admin,
    ):
        redis.hset(name, mapping=fields)
        # As a gateway's process does: a collection of all objects of this test process would hold the loop.
        gc.freeze()
        page = admin.get("/v1/usage", params=query).json()
        redis.delete(name)
        assert len(page["data"]) == 10_000 and page["has_more"]
        held_s = re.search(r'penstock_gateway_loop_hold_seconds\{clock="cpu"\} (\S+)', admin.get("/metrics").text)
        assert held_s is not None and float(held_s[1]) < 0.05


def test_schedules_flows_and_keys_of_a_tenant_count_in_its_usage(
    callers: Callers, engine: EchoEngine, redis_url: str, stack: Stack
) -> None:
    def held(client: httpx.Client, **query: Any) -> dict[str, tuple[int, int | None]]:
        found = client.get("/v1/usage", params={"days": 1, **query}).json()["holds"]
        return {name: (one["used"], one["limit"]) for name, one in found.items()}

    acme = callers["acme"]
    nothing = {
        "schedules": (0, 1000),
        "open_batches": (0, 100),
        "open_rows": (0, 2_000_000),
        "concurrency_keys": (0, 10_000),
    }
    assert held(acme) == nothing
    job = {"prompt": "text", "model": MODEL}
    schedules = [acme.post("/v1/schedules", json={"every_s": 3600, "job": job}).json()["id"] for _ in range(2)]
    keyed = [{**job, "concurrency_key": f"user-{at % 3}", "max_concurrency": 1} for at in range(6)]
    engine.may_go_on.clear()
    jobs = [acme.post("/v1/jobs", json=one).json()["id"] for one in keyed]
    assert (held(acme)["schedules"], held(acme)["concurrency_keys"]) == ((2, 1000), (3, 10_000))
    assert held(callers["rival"]) == nothing
    assert held(callers["ops"], tenant="acme") == held(acme)
    assert callers["ops"].get("/v1/usage").json()["holds"] is None
    with sync_redis.Redis.from_url(redis_url) as redis:
        redis.hset("penstock:{.files}:num_open", "acme", 4)
        redis.hset("penstock:{.files}:rows_left", "acme", 70)
        assert (held(acme)["open_batches"], held(acme)["open_rows"]) == ((4, 100), (70, 2_000_000))
        said = run_command("keys", "usage", "acme", "--redis-url", redis_url).stderr.splitlines()[-1]
        assert said == "now schedules=2/1000 open_batches=4 open_rows=70 concurrency_keys=3/10000"
        redis.hdel("penstock:{.files}:num_open", "acme")
        redis.hdel("penstock:{.files}:rows_left", "acme")
    for one in schedules:
        assert acme.delete(f"/v1/schedules/{one}").status_code == 200
    engine.may_go_on.set()
    wait_until(lambda: all(acme.get(f"/v1/jobs/{one}").json()["state"] == "succeeded" for one in jobs))
    assert held(acme) == nothing


def test_open_gateway_reports_all_usage(stack: Stack, engine: EchoEngine, redis_url: str) -> None:
    with sync_redis.Redis.from_url(redis_url) as client:
        kept = client.hgetall(keys.API_KEYS)
        client.delete(keys.API_KEYS)
        try:
            with httpx.Client(base_url=stack.start_gateway(), timeout=60) as caller:
                assert caller.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 200
                assert sums_of(rows_of(caller, days=1))["default"][0] >= 1
        finally:
            if kept:
                client.hset(keys.API_KEYS, mapping=kept)
