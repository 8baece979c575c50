"""Schedules over HTTP: by their tenant alone, on the terms of its key, and refused by the name of the wrong field."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fakes.scrapes import scraped
from fakes.waiting import wait_until

from penstock.contract.tenant import Scope, Terms
from penstock.gateway.apis.schedules import runner
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack, clients_with

PEPPER = "of the tests"
Callers = dict[str, httpx.Client]
TENANTS: dict[str, tuple[Scope, ...]] = {"acme": ("infer",), "rival": ("infer",), "ops": ("metrics",)}
JOB = {"model": MODEL, "prompt": "hello", "params": {"max_tokens": 3}, "tags": ["nightly"]}


@pytest.fixture(scope="module")
def callers(redis_url: str, stack: Stack, shared_engine: EchoEngine) -> Iterator[Callers]:
    """A client with a key of each tenant, at a gateway that looks often for what is due."""
    made = asyncio.run(add_keys(redis_url))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "LOOK_S", 0.05)
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


def created(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/schedules", json={"job": JOB, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def runs_of(client: httpx.Client, schedule_id: str) -> list[dict[str, Any]]:
    return list(client.get(f"/v1/schedules/{schedule_id}/runs").json()["data"])


def test_a_schedule_shows_its_next_runs_and_starts_jobs_of_its_tenant(callers: Callers) -> None:
    http, rival = callers["acme"], callers["rival"]
    made = created(http, cron="0 3 * * *", zone="Europe/Berlin", name="reports", overlap="cancel")
    assert (made["cron"], made["zone"], made["name"], made["missed"]) == (
        "0 3 * * *",
        "Europe/Berlin",
        "reports",
        "one",
    )
    assert made["job"]["words"] == "hello" and "request" not in made["job"]
    shown = http.get(f"/v1/schedules/{made['id']}", params={"next_runs": 3}).json()["next_runs"]
    first, second, _ = map(datetime.fromisoformat, shown)
    assert datetime.now(UTC) < first <= datetime.now(UTC) + timedelta(days=1)
    assert second - first in [timedelta(hours=hours) for hours in (23, 24, 25)]
    assert http.post(f"/v1/schedules/{made['id']}/run").status_code == 200
    wait_until(lambda: len(runs_of(http, made["id"])) == 1)
    (run,) = runs_of(http, made["id"])
    job = http.get(f"/v1/jobs/{run['id']}").json()
    assert (run["state"], job["tags"], job["background"]) == ("started", ["nightly", f"schedule:{made['id']}"], True)
    wait_until(lambda: http.get(f"/v1/jobs/{run['id']}").json()["state"] == "succeeded")
    assert rival.get(f"/v1/schedules/{made['id']}").json()["error"]["code"] == "schedule_not_found"
    for path in ("pause", "resume", "run"):
        assert rival.post(f"/v1/schedules/{made['id']}/{path}").status_code == 404
    assert rival.delete(f"/v1/schedules/{made['id']}").status_code == 404
    assert [one["id"] for one in http.get("/v1/schedules").json()["data"]] == [made["id"]]
    assert rival.get("/v1/schedules").json()["data"] == []
    assert http.post(f"/v1/schedules/{made['id']}/pause").json()["next_runs"] == []
    assert http.post(f"/v1/schedules/{made['id']}/resume").json()["next_runs"][:3] == shown
    assert http.delete(f"/v1/schedules/{made['id']}").json()["deleted"]
    assert http.get(f"/v1/schedules/{made['id']}").status_code == 404


def test_a_moment_starts_its_job_by_itself(callers: Callers) -> None:
    http = callers["acme"]
    at = (datetime.now(UTC) + timedelta(seconds=0.3)).isoformat()
    made = created(http, at=at)
    wait_until(lambda: len(runs_of(http, made["id"])) == 1)
    assert http.get(f"/v1/schedules/{made['id']}").json()["next_runs"] == []
    assert runs_of(http, made["id"])[0]["state"] == "started"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "cron"),
        ({"cron": "0 3 * * *", "every_s": 5}, 400, "every_s"),
        ({"cron": "0 25 * * *"}, 400, "cron"),
        ({"cron": "0 0 31 2 *"}, 400, "cron"),
        ({"cron": "0 3 * * *", "zone": "Mars/Olympus"}, 400, "zone"),
        ({"every_s": 0}, 400, "every_s"),
        ({"at": "2027-01-01T00:00:00"}, 400, "at"),
        ({"at": "soon"}, 400, "at"),
        ({"at": time.time() - 60}, 400, "at"),
        ({"every_s": 60, "missed": "never"}, 400, "missed"),
        ({"every_s": 60, "batch": {"input_file_id": "file-1", "endpoint": "/v1/completions"}}, 400, "job"),
        ({"every_s": 60, "job": None}, 400, "job"),
        ({"every_s": 60, "job": {**JOB, "params": {"max_tokens": 0}}}, 400, "job.params.max_tokens"),
        ({"every_s": 60, "job": {**JOB, "model": "unknown"}}, 404, "job.model"),
        ({"every_s": 60, "job": {**JOB, "priority": "interactive"}}, 403, "job.priority"),
        ({"every_s": 60, "job": {**JOB, "not_before_s": 5}}, 400, "job.not_before_s"),
        ({"every_s": 60, "colour": "red"}, 400, "colour"),
        (
            {
                "every_s": 60,
                "job": None,
                "batch": {"input_file_id": "f", "endpoint": "/v1/x", "completion_window": "9"},
            },
            400,
            "completion_window",
        ),
        ({"every_s": 60, "job": None, "batch": {"input_file_id": "f", "endpoint": "/v1/x"}}, 400, "batch.endpoint"),
        ({"every_s": 60, "job": None, "batch": {"input_file_id": "f", "endpoint": "flow"}}, 404, "input_file_id"),
        (
            {"every_s": 60, "job": None, "batch": {"input_file_id": "f", "endpoint": "flow", "max_attempts": 9}},
            400,
            "max_attempts",
        ),
    ],
)
def test_wrong_schedules_name_their_field(callers: Callers, body: dict[str, Any], status: int, param: str) -> None:
    answer = callers["acme"].post("/v1/schedules", json={"job": JOB, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_metrics_count_runs(callers: Callers) -> None:
    http = callers["acme"]
    made = created(http, every_s=3600)
    http.post(f"/v1/schedules/{made['id']}/run")
    wait_until(lambda: len(runs_of(http, made["id"])) == 1)
    text = wait_until(lambda: scraped(callers["ops"]), lambda seen: "penstock_schedule_runs_started_total 3.0" in seen)
    assert "penstock_schedules_late_seconds 0.0" in text
