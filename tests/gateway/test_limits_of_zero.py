"""A limit of 0 would let nothing through: jobs, flows, batches, schedules, keys and pools refuse it by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.command import run_command
from fakes.waiting import wait_until

from penstock import AsyncClient, Client
from penstock.contract.errors import ConfigError, RequestError
from penstock.gpu_node.settings import NodeSettings
from tests.gateway.conftest import MODEL, EchoEngine, Stack

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
JOB = {"model": MODEL, "prompt": "hello"}
KEYED = {"concurrency_key": "document"}
LIMITS: dict[str, dict[str, Any]] = {
    "max_tokens": {},
    "max_attempts": {},
    "max_concurrency": KEYED,
    "max_per_second": KEYED,
    "deadline_s": {},
    "ttl_s": {},
}
"""Limits of a job, with what else a request needs to have them."""
OF_POOLS = ("max_open_jobs", "max_queued_cost", "max_wait_ms", "max_losses", "max_attempts", "tenant_memory_percent")


@pytest.fixture(scope="module")
def http(stack: Stack, shared_engine: EchoEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(tmp_path_factory.mktemp("files")))
        url = stack.start_gateway()
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def refused(answer: httpx.Response) -> str | None:
    """Return the field that a refusal names."""
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LIMITS)
def test_jobs_chats_and_schedules_refuse_it(http: httpx.Client, name: str) -> None:
    for value, is_right in ((1, True), (0, False)):
        asked = {name: value, **LIMITS[name]}
        answers = {
            name: http.post("/v1/jobs", json={**JOB, **asked}),
            f"{name} ": http.post("/v1/completions", json={**JOB, **asked}),
            f" {name}": http.post("/v1/chat/completions", json={**CHAT, **asked}),
            f"job.{name}": http.post("/v1/schedules", json={"job": {**JOB, **asked}, "every_s": 3600}),
        }
        if is_right:
            assert all(answer.is_success for answer in answers.values()), [one.text for one in answers.values()]
        else:
            assert [param.strip() for param in answers] == [refused(answer) for answer in answers.values()]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "flow"])
def test_a_row_fails_by_its_name_and_the_others_go_on(http: httpx.Client, endpoint: str, engine: EchoEngine) -> None:
    line = {"method": "POST", "url": "/v1/chat/completions"}
    rows = [{**line, "custom_id": "right", "body": CHAT}]
    rows += [{**line, "custom_id": name, "body": {**CHAT, name: 0, **more}} for name, more in LIMITS.items()]
    content = "\n".join(map(json.dumps, rows)).encode()
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", content)}}
    wanted = {"input_file_id": http.post("/v1/files", **form).json()["id"], "completion_window": "24h"}
    for whole in ({"max_attempts": 0}, {"completion_window": "0h"}):
        assert refused(http.post("/v1/batches", json={**wanted, "endpoint": endpoint, **whole})) in whole
    batch_id = http.post("/v1/batches", json={**wanted, "endpoint": endpoint}).json()["id"]
    wait_until(lambda: http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
    batch = http.get(f"/v1/batches/{batch_id}").json()
    assert batch["request_counts"] == {"total": len(rows), "completed": 1, "failed": len(LIMITS)}
    errors = map(json.loads, http.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines())
    for one in errors:
        assert one["custom_id"] in json.dumps(one["error"] or one["response"]), one


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/schedules", {"job": JOB, "every_s": 0}),
        ("/v1/schedules", {"batch": {"input_file_id": "file-1", "endpoint": "flow", "max_attempts": 0}, "every_s": 60}),
    ],
)
def test_schedules_refuse_it(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert refused(http.post(path, json=body)) in ("every_s", "max_attempts")


@pytest.mark.parametrize("name", [*LIMITS, "max_wait_s"])
def test_the_clients_refuse_it_before_they_submit(redis_url: str, shared_engine: EchoEngine, name: str) -> None:
    options: dict[str, Any] = {name: 0, "model": MODEL, **LIMITS.get(name, {})}

    async def by_async() -> None:
        async with AsyncClient(redis_url) as client:
            with pytest.raises(RequestError) as caught:
                await client.submit("hello", **options)
            assert caught.value.param == name

    asyncio.run(by_async())
    with Client(redis_url) as client:
        (outcome,) = client.submit_many([{"prompt": "hello", **options}])
        assert isinstance(outcome, RequestError) and outcome.param == name
        if name == "max_attempts":
            with pytest.raises(RequestError) as caught:
                client.flow(max_attempts=0)
            assert caught.value.param == name
        with pytest.raises(RequestError) as caught:
            client.schedules.create("hello", every_s=3600, **options)
        assert caught.value.param == name


@pytest.mark.parametrize("name", OF_POOLS)
def test_pools_refuse_it(redis_url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"PENSTOCK_NODE_{name.upper()}"
    with pytest.raises(ConfigError, match=name):
        NodeSettings.load(model=MODEL, redis_url=redis_url, **{name: 0})
    monkeypatch.setenv(variable, "0")
    done = run_command("pools", "declare", "zero", "--redis-url", redis_url)
    assert (done.returncode, variable in done.stderr or name in done.stderr) == (2, True), done.stderr
    assert "zero" not in json.loads(run_command("pools", "list", "--all", "--json", "--redis-url", redis_url).stdout)


def test_commands_refuse_it(redis_url: str, http: httpx.Client, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    server = ("--base-url", str(http.base_url))
    for words, named in (
        (("batch", "submit", str(source), "--max-attempts", "0", *server), "--max-attempts"),
        (("submit", "hello", "--max-tokens", "0", "--redis-url", redis_url), "max_tokens"),
        (("submit", "hello", "--max-attempts", "0", "--redis-url", redis_url), "max_attempts"),
        (("schedules", "create", "hello", "--every", "0", "--redis-url", redis_url), "every"),
        (
            ("schedules", "create", "hello", "--every", "60", "--max-tokens", "0", "--redis-url", redis_url),
            "max-tokens",
        ),
    ):
        done = run_command(*words)
        assert (done.returncode, named.replace("-", "_") in done.stderr.replace("-", "_")) == (2, True), done.stderr
