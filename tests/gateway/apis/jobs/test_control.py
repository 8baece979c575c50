"""Steering of jobs over HTTP: lists with filters, changes, retries, bulk actions and pauses, by their tenant alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until

from penstock.contract.tenant import Scope, Terms
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack, clients_with

PEPPER = "of the tests"
POOL = "echo"
Callers = dict[str, httpx.Client]
TENANTS: dict[str, tuple[Scope, ...]] = {"acme": ("infer",), "rival": ("infer",), "ops": ("admin",)}


@pytest.fixture(scope="module")
def callers(redis_url: str, stack: Stack, shared_engine: EchoEngine) -> Iterator[Callers]:
    """A client with a key of each tenant."""
    made = asyncio.run(add_keys(redis_url))
    url = stack.start_gateway(pepper=PEPPER)
    with clients_with(url, made) as clients:
        yield clients


async def add_keys(redis_url: str) -> dict[str, str]:
    redis = connect(redis_url)
    made = {
        tenant: await KeyStore(redis).add(tenant, scopes, Terms(), highest_class="standard", label="", pepper=PEPPER)
        for tenant, scopes in TENANTS.items()
    }
    await redis.aclose()
    return {tenant: key for tenant, (key, _) in made.items()}


def submitted(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/v1/jobs", json={"model": MODEL, "prompt": "hello", "not_before_s": 600, **body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def listed(client: httpx.Client, **params: Any) -> list[str]:
    answer = client.get("/v1/jobs", params={"limit": 100, **params})
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["data"]]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def ended(client: httpx.Client, path: str) -> dict[str, Any]:
    return wait_until(lambda: client.get(path).json(), lambda report: report["state"] != "running")


def test_jobs_have_tags_and_metadata_and_are_listed_by_them(callers: Callers) -> None:
    http = callers["acme"]
    job_id = submitted(http, tags=["http:1", "eu"], metadata={"order": "4711"}, custom_id="row 17")
    job = http.get(f"/v1/jobs/{job_id}").json()
    (of_list,) = http.get("/v1/jobs", params={"tag": "http:1"}).json()["data"]
    assert job["custom_id"] == of_list["custom_id"] == "row 17"
    assert (job["state"], job["tags"], job["metadata"]) == ("scheduled", ["http:1", "eu"], {"order": "4711"})
    assert listed(http, tag="http:1", state="scheduled,running") == [job_id]
    assert listed(http, tag="http:1", priority="batch", background="true") == [job_id]
    assert listed(http, tag="http:1", priority="standard") == []
    assert listed(http, tag="http:1", submitted_after=time.time() - 60, submitted_before=time.time() + 60) == [job_id]
    assert listed(http, tag="http:1", submitted_before=time.time() - 60) == []
    assert listed(callers["rival"], tag="http:1") == []
    assert listed(callers["ops"], tag="http:1", tenant="*") == [job_id]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "metadata": {"of": "chat"}}
    answer = http.post("/v1/chat/completions", json={**chat, "tags": ["http:chat"]})
    assert answer.status_code == 200, answer.text
    (found,) = http.get("/v1/jobs", params={"tag": "http:chat"}).json()["data"]
    assert (found["state"], found["metadata"], "custom_id" in found) == ("succeeded", {"of": "chat"}, False)
    assert listed(http, tag="http:chat", state="succeeded") == [found["id"]]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("state=unknown", "state"),
        ("tag=a%20b", "tag"),
        ("priority=urgent", "priority"),
        ("background=1", "background"),
        ("submitted_after=x", "submitted_after"),
        ("after=junk", "after"),
        ("limit=1001", "limit"),
        ("color=red", "color"),
    ],
)
def test_wrong_filters_name_their_field(callers: Callers, query: str, param: str) -> None:
    error = error_of(callers["acme"].get(f"/v1/jobs?{query}"), 400)
    assert error["param"] == param
    assert param in error["message"]


def test_cursor_of_another_tenant_is_refused(callers: Callers) -> None:
    submitted(callers["rival"], tags=["cursor"])
    submitted(callers["rival"], tags=["cursor"])
    cursor = callers["rival"].get("/v1/jobs?limit=1").json()["next"]
    error = error_of(callers["acme"].get(f"/v1/jobs?after={cursor}"), 400)
    assert (error["param"], "another tenant" in error["message"]) == ("after", True)


def test_one_job_is_rescheduled_reclassed_canceled_and_retried(callers: Callers) -> None:
    http = callers["acme"]
    job_id = submitted(http, tags=["one"])
    path = f"/v1/jobs/{job_id}"
    job = http.patch(path, json={"not_before_s": 1200}).json()
    assert (job["state"], job["ledger"]["queued_ms"] / 1000 > time.time() + 1000) == ("scheduled", True)
    job = http.patch(path, json={"priority": "standard", "background": False}).json()
    assert (job["priority"], job["background"]) == ("standard", False)
    assert error_of(http.patch(path, json={"priority": "interactive"}), 403)["code"] == "class_not_allowed"
    assert error_of(http.patch(path, json={"not_before_s": -1}), 400)["param"] == "not_before_s"
    assert error_of(http.patch(path, json={"speed": 1}), 400)["param"] == "speed"
    assert error_of(http.patch(path, json={}), 400)["param"] == "priority"
    assert error_of(callers["rival"].patch(path, json={"not_before_s": 1}), 404)["code"] == "job_not_found"
    assert error_of(http.post(f"{path}/retry", json={}), 409)["code"] == "job_open"
    assert http.delete(path).json()["state"] == "cancelled"
    assert error_of(http.patch(path, json={"not_before_s": 1}), 409)["code"] == "job_ended"
    assert error_of(callers["rival"].post(f"{path}/retry"), 404)["code"] == "job_not_found"
    answer = http.post(f"{path}/retry")
    assert answer.status_code == 202, answer.text
    again = answer.json()
    assert (again["retry_of"], answer.headers["location"]) == (job_id, f"/v1/jobs/{again['id']}")
    assert http.post(f"{path}/retry").json()["id"] == again["id"]
    job = wait_until(lambda: http.get(f"/v1/jobs/{again['id']}").json(), lambda job: job["state"] == "succeeded")
    assert (job["retry_of"], job["tags"], job["result"]["choices"][0]["text"]) == (job_id, ["one"], "hello")


def test_bulk_action_is_reported_to_its_tenant_and_leaves_other_tenants_jobs(callers: Callers) -> None:
    http = callers["acme"]
    mine = [submitted(http, tags=["bulk"]) for _ in range(20)]
    theirs = submitted(callers["rival"], tags=["bulk"])
    answer = http.post("/v1/jobs/bulk", json={"action": "cancel", "filter": {"tag": "bulk"}, "dry_run": True})
    assert (answer.status_code, answer.json()["dry_run"]) == (202, True)
    assert ended(http, answer.headers["location"])["changed"] == 20
    assert listed(http, tag="bulk", state="scheduled") == mine[::-1]
    answer = http.post("/v1/jobs/bulk", json={"action": "cancel", "filter": {"tag": "bulk"}})
    report = ended(http, answer.headers["location"])
    assert [report[name] for name in ("changed", "already_over", "failed", "failures")] == [20, 0, 0, []]
    assert (report["left"], report["rate_per_s"] > 0, report["expected_end_ms"]) == (0, True, None)
    assert http.get("/v1/jobs/counts", params={"bulk": report["id"]}).json()["states"] == {"changed": 20}
    assert http.get("/v1/jobs/bulk").json() == {"object": "list", "data": []}
    assert listed(http, tag="bulk", state="cancelled") == mine[::-1]
    assert error_of(callers["rival"].get(answer.headers["location"]), 404)["code"] == "bulk_not_found"
    assert callers["rival"].get(f"/v1/jobs/{theirs}").json()["state"] == "scheduled"
    everyone = {"action": "cancel", "filter": {"tag": "bulk", "tenant": "*"}}
    assert error_of(callers["rival"].post("/v1/jobs/bulk", json=everyone), 403)["code"] == "insufficient_scope"
    answer = callers["ops"].post("/v1/jobs/bulk", json=everyone)
    assert ended(callers["ops"], answer.headers["location"])["changed"] == 1
    assert callers["rival"].get(f"/v1/jobs/{theirs}").json()["state"] == "cancelled"
    assert callers["ops"].delete(answer.headers["location"]).json()["state"] == "ended"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "action"),
        ({"action": "explode"}, "action"),
        ({"action": "cancel", "filter": {"color": "red"}}, "filter.color"),
        ({"action": "cancel", "filter": {"state": "unknown"}}, "state"),
        ({"action": "cancel", "filter": {"tag": "a b"}}, "tag"),
        ({"action": "cancel"}, "filter"),
        ({"action": "cancel", "filter": {"tenant": "acme"}}, "filter"),
        ({"action": "cancel", "all_jobs": True, "priority": "batch"}, "priority"),
        ({"action": "reschedule"}, "not_before_s"),
    ],
)
def test_wrong_bulk_actions_name_their_field(callers: Callers, body: dict[str, Any], param: str) -> None:
    assert error_of(callers["acme"].post("/v1/jobs/bulk", json=body), 400)["param"] == param


def test_tenant_pauses_itself_and_an_admin_the_rest(callers: Callers) -> None:
    http, ops = callers["acme"], callers["ops"]
    assert http.post("/v1/jobs/pause", json={"pool": POOL, "tenant": "acme"}).status_code == 200
    job_id = submitted(http, not_before_s=None)
    assert callers["rival"].post("/v1/completions", json={"model": MODEL, "prompt": "hello"}).status_code == 200
    assert http.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
    assert [one["tenant"] for one in http.get("/v1/jobs/paused").json()["data"]] == ["acme"]
    assert callers["rival"].get("/v1/jobs/paused").json()["data"] == []
    assert [one["tenant"] for one in ops.get("/v1/jobs/paused").json()["data"]] == ["acme"]
    for body in ({"pool": POOL}, {"pool": POOL, "priority": "batch"}, {"pool": POOL, "tenant": "rival"}):
        assert error_of(http.post("/v1/jobs/pause", json=body), 403)["code"] == "insufficient_scope"
    paused = ops.post("/v1/jobs/pause", json={"pool": POOL, "priority": "batch", "background": True}).json()["data"]
    assert {name: paused[0][name] for name in ("pool", "priority", "background")} == {
        "pool": POOL,
        "priority": "batch",
        "background": True,
    }
    assert error_of(ops.post("/v1/jobs/pause", json={"pool": "unknown"}), 404)["param"] == "pool"
    assert error_of(ops.post("/v1/jobs/pause", json={}), 400)["param"] == "pool"
    assert http.post("/v1/jobs/resume", json={"pool": POOL, "tenant": "acme"}).json()["data"] != []
    assert (
        ops.post("/v1/jobs/resume", json={"pool": POOL, "priority": "batch", "background": True}).json()["data"] == []
    )
    wait_until(lambda: http.get(f"/v1/jobs/{job_id}").json()["state"] == "succeeded")


def test_tags_and_metadata_above_their_limits_name_field_and_limit(callers: Callers) -> None:
    for body, param, limit in (
        ({"tags": list("abcde")}, "tags", "4"),
        ({"tags": ["x" * 65]}, "tags[0]", "64"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "16"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
    ):
        job = {"model": MODEL, "prompt": "hello", **body}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **body}
        for path, whole in (("/v1/jobs", job), ("/v1/chat/completions", chat)):
            error = error_of(callers["acme"].post(path, json=whole), 400)
            assert error["param"] == param
            assert limit in error["message"]


def test_callers_who_wait_for_what_is_paused_are_told_and_every_view_names_it(callers: Callers) -> None:
    http, ops = callers["acme"], callers["ops"]
    ops.post("/v1/jobs/pause", json={"pool": POOL})
    try:
        refused = http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})
        assert (error_of(refused, 503)["code"], refused.headers["Retry-After"]) == ("pool_paused", "5")
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["paused"]) == (200, [f"{POOL}: the pool"])
        accepted = http.post("/v1/jobs", json={"model": MODEL, "prompt": "hello", "return_progress": True})
        shown = http.get(f"/v1/jobs/{accepted.json()['id']}").json()
        for job in (accepted.json(), shown):
            assert (job["state"], job["estimated_wait_ms"], job["paused"]) == ("queued", None, "pool")
        ops.post("/v1/jobs/resume", json={"pool": POOL})
        ops.post("/v1/jobs/pause", json={"pool": POOL, "tenant": "acme"})
        assert http.get("/ready").json()["paused"] == [f"{POOL}: a tenant"]
        assert callers["rival"].post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 200
    finally:
        ops.post("/v1/jobs/resume", json={"pool": POOL})
        ops.post("/v1/jobs/resume", json={"pool": POOL, "tenant": "acme"})
    assert "paused" not in http.get("/ready").json()


def test_a_start_is_a_number_of_seconds_or_a_time_up_to_a_year_away(callers: Callers) -> None:
    http = callers["acme"]
    at = datetime.now(UTC) + timedelta(days=300)
    for given in (at.isoformat(), 300 * 86_400):
        job_id = submitted(http, not_before_s=given)
        assert http.get(f"/v1/jobs/{job_id}").json()["state"] == "scheduled"
        changed = http.patch(f"/v1/jobs/{job_id}", json={"not_before_s": (at + timedelta(days=30)).isoformat()})
        assert changed.status_code == 200
        http.delete(f"/v1/jobs/{job_id}")
    for wrong in ("soon", "2027-01-01T00:00:00", 400 * 86_400, (at + timedelta(days=200)).isoformat()):
        answer = http.post("/v1/jobs", json={"model": MODEL, "prompt": "hello", "not_before_s": wrong})
        assert error_of(answer, 400)["param"] == "not_before_s"
