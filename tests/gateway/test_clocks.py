"""A gateway, a node and Redis whose clocks differ by minutes or hours serve, and say by how much they differ."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until
from fakes.webhook_receiver import ALLOWED, WebhookReceiver
from faults.tools.redis_process import RedisProcess, find_libfaketime
from prometheus_client.parser import text_string_to_metric_families
from uuid_utils import UUID

from penstock.producer.files.storage import Storage
from tests.gateway.conftest import EchoEngine, Stack

MODEL = "acme/echo"
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_libfaketime() is None, reason="libfaketime is not installed (Debian's libfaketime)"),
]


@pytest.fixture(scope="module", params=[-7200, -600, 600, 7200], ids=lambda clock_s: f"Redis {clock_s:+d} s")
def skewed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, int]]:
    """A gateway and a node with a Redis whose clock differs from theirs, as if these two had a wrong one."""
    folder = tmp_path_factory.mktemp("clocks")
    with RedisProcess(folder / "redis", clock_s=request.param) as server:
        stack = Stack(server.url)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PENSTOCK_FILES_URL", str(folder / "files"))
            stack.start_node(EchoEngine(), model=MODEL, pool="echo")
            url = stack.start_gateway(**ALLOWED)
        with httpx.Client(base_url=url, timeout=60) as http:
            yield http, request.param
        stack.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "ab"}]}),
        ("/v1/completions", {"model": MODEL, "prompt": "ab"}),
        ("/v1/responses", {"model": MODEL, "input": "ab"}),
        ("/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 4}),
        ("/v1/jobs", {"model": MODEL, "prompt": "ab"}),
        ("/tokenize", {"model": MODEL, "prompt": "ab"}),
    ],
)
def test_a_process_whose_clock_is_wrong_makes_ids_that_the_pool_takes(skewed, path: str, body: dict[str, Any]) -> None:
    http, clock_s = skewed
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    job_id = answer.headers["X-Penstock-Job"] if "X-Penstock-Job" in answer.headers else answer.json()["id"]
    made_s = UUID(job_id.rpartition(".")[2]).timestamp / 1000
    assert made_s == pytest.approx(time.time() + clock_s, abs=60)


def test_the_date_of_an_answer_is_that_of_the_gateways_machine(skewed) -> None:
    http, _ = skewed
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "ab"}).json()
    assert answer["created"] == pytest.approx(time.time(), abs=60)


def test_the_dashboard_has_redis_time(skewed) -> None:
    http, clock_s = skewed
    assert http.get("/dashboard").json()["at_ms"] / 1000 == pytest.approx(time.time() + clock_s, abs=60)


def test_the_offset_is_a_metric_and_a_warning_and_the_gateway_stays_ready(skewed, caplog) -> None:
    http, clock_s = skewed
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }
    assert found["penstock_gateway_clock_offset_seconds"] == pytest.approx(clock_s, abs=2)
    assert http.get("/ready").status_code == 200


def test_the_difference_is_logged_once(tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING), RedisProcess(tmp_path / "redis", clock_s=600) as server:
        stack = Stack(server.url)
        stack.start_gateway()
        lines = wait_until(lambda: [r for r in caplog.records if "clock differs" in r.getMessage()])
        stack.close()
    assert {round(vars(line)["offset_s"], -1) for line in lines} == {600}


def test_a_batch_expires_by_redis_clock(skewed) -> None:
    http, _ = skewed
    row = (
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "acme/echo", "prompt": "ab"}}'
    )
    file = http.post("/v1/files", files={"file": ("rows.jsonl", row)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    path = f"/v1/batches/{http.post('/v1/batches', json=asked).json()['id']}"
    batch = wait_until(lambda: http.get(path).json(), lambda one: one["status"] in ("completed", "failed", "expired"))
    assert batch["status"] == "completed", batch


def test_webhooks_are_stamped_by_redis_clock(skewed) -> None:
    http, clock_s = skewed
    with WebhookReceiver() as receiver:
        made = http.post(
            "/v1/webhook_endpoints", json={"url": receiver.url(), "name": "a", "event_types": ["job.succeeded"]}
        ).json()
        http.post(f"/v1/webhook_endpoints/{made['id']}/test", json={"event_type": "job.succeeded"})
        stamp_s = int(receiver.received[0].headers["webhook-timestamp"])
    assert stamp_s == pytest.approx(time.time() + clock_s, abs=60)


@pytest.mark.parametrize("ahead_s", [-7200, 0, 7200])
def test_a_wrong_clock_deletes_no_running_upload(tmp_path, monkeypatch, ahead_s: int) -> None:
    storage = Storage(str(tmp_path))
    storage.create()
    for name in ("young", "old"):
        writer = storage.writer(f"files/{name}")
        writer.write(b"x")
        writer.commit()
    (old,) = tmp_path.glob("*/files/old")
    os.utime(old, (time.time() - 10_000,) * 2)
    monkeypatch.setattr("penstock.producer.files.storage.time", SimpleNamespace(time=lambda: time.time() + ahead_s))
    # With a clock that is behind, strays stay longer.
    assert storage.older_names("files", 3600) == ([] if ahead_s < 0 else ["old"])
    assert [path.name for path in tmp_path.glob("*/*") if path.is_file()] == ["penstock-storage"]
