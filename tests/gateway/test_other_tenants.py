"""One tenant cannot name what is another's: at each route and command, that is as unknown as what never was."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fakes.command import run_command
from fakes.waiting import wait_until
from fakes.webhook_receiver import ALLOWED, WebhookReceiver

from penstock.contract.tenant import Terms
from penstock.gateway.app import create_app
from penstock.gateway.settings import GatewaySettings
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack, clients_with, routes_of

CHAT = [{"role": "user", "content": "secret"}]
JOB = {"model": MODEL, "prompt": "secret", "tags": ["own"]}
HELD = {**JOB, "not_before_s": 600}
OTHERS = {"model", "name"}
"""Placeholders in paths that name nothing of a tenant."""
BODIES: Mapping[tuple[str, str], Any] = {
    ("PATCH", "/v1/jobs/{job_id}"): {"not_before_s": 1},
    ("POST", "/v1/webhook_endpoints/{endpoint_id}"): {"name": "taken over"},
    ("POST", "/v1/webhook_endpoints/{endpoint_id}/test"): {"event_type": "job.succeeded"},
}
"""What a request needs to be a right one."""
UNKNOWN = {
    "job_id": "echo.01890a5d-ac96-774b-bcce-b302099a8057",
    "response_id": "resp_echo.01890a5d-ac96-774b-bcce-b302099a8058",
    "bulk_id": "ba5eba11ba5eba11ba5eba11ba5eba11",
    "file_id": "file-0123456789abcdef0123456789abcdef",
    "batch_id": "batch_0123456789abcdef0123456789abcdef",
    "message_batch_id": "msgbatch_f123456789abcdef0123456789abcdef",
    "schedule_id": "sched_0123456789abcdef01234567",
    "endpoint_id": "we_0123456789abcdef",
    "event_id": "evt_e123456789abcdef0123456789abcdef",
}


class Tenants(NamedTuple):
    """Two tenants of a gateway, and the ids of what the first one has."""

    ann: httpx.Client
    bob: httpx.Client
    ids: dict[str, str]
    bobs_key: str


def posted(client: httpx.Client, path: str, body: Any, status: int = 200) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == status, (path, answer.text)
    return dict(answer.json())


def everything_of(ann: httpx.Client, receiver: WebhookReceiver) -> dict[str, str]:
    """Make one of each object that a path can name. Return the ids, by the names in the paths."""
    body = {"model": MODEL, "messages": CHAT}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    wrong = {**line, "custom_id": "b", "body": {**body, "temperature": -1}, "after": ["a"]}
    rows = [{**line, "custom_id": "a", "body": body}, wrong]
    form: dict[str, Any] = {
        "data": {"purpose": "batch"},
        "files": {"file": ("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())},
    }
    params = {"model": MODEL, "max_tokens": 9, "messages": CHAT}
    hook = {"name": "own", "url": receiver.url("/hook"), "event_types": ["job.succeeded"]}
    file_id = ann.post("/v1/files", **form).json()["id"]
    batch = {"input_file_id": file_id, "endpoint": "flow", "completion_window": "24h"}
    ids = {
        "file_id": file_id,
        "batch_id": posted(ann, "/v1/batches", batch)["id"],
        "message_batch_id": posted(ann, "/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]})[
            "id"
        ],
        "schedule_id": posted(ann, "/v1/schedules", {"job": {**JOB, "tags": []}, "every_s": 3600})["id"],
        "endpoint_id": posted(ann, "/v1/webhook_endpoints", hook)["id"],
        "response_id": posted(ann, "/v1/responses", {"model": MODEL, "input": "secret"})["id"],
        "job_id": posted(ann, "/v1/jobs", HELD, 202)["id"],
        "bulk_id": posted(ann, "/v1/jobs/bulk", {"action": "cancel", "filter": {"tag": "none"}}, 202)["id"],
    }
    deliveries = f"/v1/webhook_endpoints/{ids['endpoint_id']}/deliveries?status=delivered"
    posted(ann, "/v1/jobs", {**JOB, "webhooks": [ids["endpoint_id"]]}, 202)
    wait_until(lambda: len(ann.get(deliveries).json()["data"]) == 1)
    ids["event_id"] = ann.get(deliveries).json()["data"][0]["event_id"]
    wait_until(lambda: ann.get(f"/v1/batches/{ids['batch_id']}").json()["status"] == "completed")
    of_messages = f"/v1/messages/batches/{ids['message_batch_id']}"
    wait_until(lambda: ann.get(of_messages).json()["processing_status"] == "ended")
    wait_until(lambda: ann.get(f"/v1/jobs/bulk/{ids['bulk_id']}").json()["state"] == "ended")
    return ids


@pytest.fixture(scope="module")
def tenants(
    stack: Stack, shared_engine: EchoEngine, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenants]:
    async def keys() -> dict[str, str]:
        async with connect(redis_url) as redis:
            return {name: (await KeyStore(redis).add(name, ["infer"], Terms()))[0] for name in ("ann", "bob")}

    made = asyncio.run(keys())
    allowed: dict[str, Any] = {**ALLOWED}
    with WebhookReceiver() as receiver, pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(tmp_path_factory.mktemp("files")))
        url = stack.start_gateway(**allowed)
        with clients_with(url, made) as clients:
            ids = everything_of(clients["ann"], receiver)
            yield Tenants(clients["ann"], clients["bob"], ids, made["bob"])


def routes_with_ids() -> list[tuple[str, str, frozenset[str]]]:
    """Return method, path and placeholders of each route that names something of a tenant."""
    app = create_app(GatewaySettings.load(redis_url="redis://127.0.0.1:1"))
    found = []
    for route in routes_of(app):
        names = frozenset(re.findall(r"{(\w+)", route.path)) - OTHERS
        found += [(method, route.path, names) for method in sorted(route.methods or ()) if names]
    return sorted(found, key=lambda one: one[:2])


def path_of(path: str, ids: Mapping[str, str]) -> str:
    """Return a path with its ids. Those of Anthropic's batches have the same placeholder as those of OpenAI's."""
    batch = "message_batch_id" if path.startswith("/v1/messages/") else "batch_id"
    return re.sub(r"{(\w+)}", lambda found: ids[batch if found[1] == "batch_id" else found[1]], path)


def told(answer: httpx.Response, ids: Mapping[str, str]) -> tuple[int, str]:
    """Return the status and error of an answer, without the ids that it repeats."""
    error = json.dumps(answer.json().get("error", answer.json()))
    for name, one in ids.items():
        error = error.replace(one, f"<{name}>")
    return answer.status_code, error


def test_each_object_is_as_unknown_to_another_tenant_as_one_that_never_was(tenants: Tenants) -> None:
    routes = routes_with_ids()
    assert {name for *_, names in routes for name in names} == UNKNOWN.keys() - {"message_batch_id"}
    reads = [path_of(path, tenants.ids) for method, path, _ in routes if method == "GET"]
    before = {path: tenants.ann.get(path) for path in reads if not path.endswith(("/stream", "/why"))}
    assert {answer.status_code for answer in before.values()} == {200}, before
    for method, path, _ in routes:
        body = BODIES.get((method, path))
        of_ann, of_none = (
            told(tenants.bob.request(method, path_of(path, ids), json=body), ids) for ids in (tenants.ids, UNKNOWN)
        )
        assert of_ann == of_none and of_ann[0] == 404, (method, path)
    for path, answer in before.items():
        now, then = (re.sub(r'"now_ms":\d+', "", one.text) for one in (tenants.ann.get(path), answer))
        assert now == then


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/jobs?tenant=ann", 403),
        ("/v1/jobs?tenant=*", 403),
        ("/v1/jobs/counts?tenant=ann", 403),
        ("/v1/jobs/events?tenant=ann", 403),
        ("/v1/jobs/bulk?tenant=ann", 400),
        ("/v1/usage?tenant=ann", 403),
        ("/v1/jobs/counts?batch={batch_id}", 404),
        ("/v1/jobs/counts?bulk={bulk_id}", 404),
        ("/v1/files?after={file_id}", 400),
        ("/v1/batches?after={batch_id}", 400),
        ("/v1/schedules?after={schedule_id}", 400),
        ("/v1/webhook_endpoints?after={endpoint_id}", 404),
    ],
)
def test_no_query_names_what_is_anothers(tenants: Tenants, path: str, status: int) -> None:
    answers = [tenants.bob.get(path_of(path, ids)) for ids in (tenants.ids, UNKNOWN)]
    assert [answer.status_code for answer in answers] == [status] * 2, [answer.text for answer in answers]
    assert told(answers[0], tenants.ids) == told(answers[1], UNKNOWN)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/jobs", {**JOB, "webhooks": ["{endpoint_id}"]}, 400),
        ("/v1/jobs/bulk", {"action": "cancel", "filter": {"tenant": "ann", "tag": "own"}}, 403),
        ("/v1/jobs/pause", {"pool": "echo", "tenant": "ann"}, 403),
        ("/v1/jobs/resume", {"pool": "echo", "tenant": "ann"}, 403),
        ("/v1/batches", {"input_file_id": "{file_id}", "endpoint": "flow", "completion_window": "24h"}, 404),
        ("/v1/schedules", {"batch": {"input_file_id": "{file_id}", "endpoint": "flow"}, "every_s": 60}, 404),
        ("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "{response_id}"}, 400),
    ],
)
def test_no_body_names_what_is_anothers(tenants: Tenants, path: str, body: dict[str, Any], status: int) -> None:
    answers = [
        tenants.bob.post(path, content=path_of(json.dumps(body), ids), headers={"content-type": "application/json"})
        for ids in (tenants.ids, UNKNOWN)
    ]
    assert [answer.status_code for answer in answers] == [status] * 2, [answer.text for answer in answers]
    assert told(answers[0], tenants.ids) == told(answers[1], UNKNOWN)


def test_lists_and_counts_have_nothing_of_another_tenant(tenants: Tenants) -> None:
    for path in ("/v1/jobs", "/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/schedules"):
        of_ann, of_bob = (client.get(path).json()["data"] for client in (tenants.ann, tenants.bob))
        assert (bool(of_ann), of_bob) == (True, []), path
    assert tenants.bob.get("/v1/jobs/counts?tag=own").json()["total"] == 0
    assert tenants.bob.get("/v1/usage").json()["data"] == []
    bulk = posted(tenants.bob, "/v1/jobs/bulk", {"action": "cancel", "all_jobs": True}, 202)
    wait_until(lambda: tenants.bob.get(f"/v1/jobs/bulk/{bulk['id']}").json()["state"] == "ended")
    assert tenants.bob.get(f"/v1/jobs/bulk/{bulk['id']}").json()["changed"] == 0


def test_a_key_of_the_same_name_is_another_tenants_own(tenants: Tenants, engine: EchoEngine) -> None:
    """Neither a concurrency key nor an idempotency key of one tenant concerns another one."""
    keyed = {
        **JOB,
        "tags": ["keyed"],
        "concurrency_key": "doc",
        "max_concurrency": 1,
        "idempotency_key": "once",
        "background": True,
    }
    engine.may_go_on.clear()
    ids = [posted(client, "/v1/jobs", keyed, 202)["id"] for client in (tenants.ann, tenants.bob)]
    waiting = posted(tenants.bob, "/v1/jobs", {**keyed, "idempotency_key": "twice"}, 202)["id"]
    wait_until(lambda: tenants.bob.get(f"/v1/jobs/{ids[1]}").json()["state"] == "running")
    assert tenants.bob.get(f"/v1/jobs/{waiting}").json()["state"] == "queued"
    engine.may_go_on.set()
    assert ids[0] != ids[1]
    wait_until(lambda: tenants.bob.get(f"/v1/jobs/{waiting}").json()["state"] == "succeeded")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("batch", "status", "{batch_id}"), "batch"),
        (("batch", "wait", "{batch_id}"), "batch"),
        (("batch", "cancel", "{batch_id}"), "batch"),
        (("batch", "pause", "{batch_id}"), "batch"),
        (("batch", "resume", "{batch_id}"), "batch"),
        (("batch", "results", "{batch_id}", "-"), "batch"),
        (("flows", "show", "{batch_id}"), "batch"),
    ],
)
def test_no_command_with_a_key_names_what_is_anothers(tenants: Tenants, words: tuple[str, ...], why: str) -> None:
    base = ("--base-url", str(tenants.bob.base_url), "--api-key", tenants.bobs_key)
    told = [run_command(*(path_of(word, ids) for word in words), *base) for ids in (tenants.ids, UNKNOWN)]
    assert {one.returncode for one in told} == {2}, told
    of_ann, of_none = (
        one.stderr.replace(ids["batch_id"], "<id>") for one, ids in zip(told, (tenants.ids, UNKNOWN), strict=True)
    )
    assert of_ann == of_none and why in of_ann


def test_no_command_for_one_tenant_names_schedules_of_another(tenants: Tenants, redis_url: str, tmp_path: Path) -> None:
    of_bob = ("--tenant", "bob", "--redis-url", redis_url)
    for command in ("show", "pause", "resume", "run", "delete"):
        done = run_command("schedules", command, tenants.ids["schedule_id"], *of_bob)
        assert (done.returncode, "no schedule" in done.stderr) == (2, True), (command, done.stderr)
    assert json.loads(run_command("schedules", "list", *of_bob, "--json").stdout) == []
    assert run_command("jobs", "export", str(tmp_path / "out.jsonl"), "--tag", "own", *of_bob).stdout.startswith("0 ")
    assert json.loads(run_command("jobs", "progress", "--tag", "own", "--once", "--json", *of_bob).stdout)["total"] == 0
