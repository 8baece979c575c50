"""The line of each request in the access log: its caller, the job that it became, and how its answer ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.waiting import wait_until
from prometheus_client.parser import text_string_to_metric_families

from penstock.queue import keys
from tests.gateway.socket_client import socket_to

MODEL = "acme/echo"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "abcdef"}]}
COMPLETION = {"model": MODEL, "prompt": "abcdef"}
STREAMS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
    ("/v1/responses", {"model": MODEL, "input": "abcdef"}),
    ("/v1/messages", CHAT | {"max_tokens": 6}),
]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    with caplog.at_level("INFO", "penstock.gateway.access"):
        yield Lines(caplog)


class Lines:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def of(self, request_id: str, message: str = "request") -> dict[str, Any]:
        """Return the line of a request. It is written behind the answer."""
        return self._wait(message, request_id=request_id)[0]

    def where(self, message: str, **fields: str) -> dict[str, Any]:
        """Return the newest line with these fields."""
        return self._wait(message, **fields)[-1]

    def _wait(self, message: str, **fields: str) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            lines = [vars(record) for record in self._caplog.records if record.getMessage() == message]
            return [line for line in lines if fields.items() <= line.items()]

        return wait_until(found, what=lambda: f"a line {message!r} with {fields} in {self._caplog.text}")

    def has_path(self, path: str) -> bool:
        return any(vars(record).get("path") == path for record in self._caplog.records)


def counter(http: httpx.Client, name: str, code: str) -> float:
    found = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in found for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if sample.labels.get("code") == code)


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answers_line_has_tenant_pool_job_and_tokens(http, lines, path: str, body: Any, stream: bool) -> None:
    answer = http.post(path, json=body | {"stream": stream}, headers={"X-Request-Id": f"{path}-{stream}"})
    assert answer.status_code == 200
    line = lines.of(f"{path}-{stream}")
    assert (line["tenant"], line["pool"], line["job"]) == ("default", "echo", answer.headers["X-Penstock-Job"])
    assert (line["prompt_tokens"], line["output_tokens"]) == (6, 6)
    assert "code" not in line
    assert line.get("outcome") == ("complete" if stream else None)
    assert ("ttft_s" in line) == stream


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "pool"),
    [
        ("POST", "/v1/completions", COMPLETION | {"bogus": 1}, 400, "unknown_field", None),
        ("POST", "/v1/chat/completions", CHAT | {"model": "none"}, 404, "model_not_found", None),
        ("POST", "/v1/completions", COMPLETION | {"prompt": "x" * 64 * 513}, 400, "context_length_exceeded", "echo"),
        ("GET", "/nowhere", None, 404, "not_found", None),
        ("DELETE", "/v1/models", None, 405, "method_not_allowed", None),
        ("GET", "/v1/jobs/echo.none", None, 404, "job_not_found", None),
        ("GET", "/v1/stream", None, 426, "invalid_request", None),
    ],
)
def test_a_refusals_line_has_its_code_which_is_counted(http, lines, method, path, body, status, code, pool) -> None:
    before = counter(http, "penstock_http_refusals_total", code)
    answer = http.request(method, path, json=body, headers={"X-Request-Id": f"refused-{path}-{code}"})
    assert answer.status_code == status, answer.text
    line = lines.of(f"refused-{path}-{code}")
    assert (line["code"], line.get("pool")) == (code, pool)
    assert counter(http, "penstock_http_refusals_total", code) == before + 1


def test_a_full_pools_429_names_the_pool(http, lines, redis_url) -> None:
    with sync_redis.Redis.from_url(redis_url) as client:
        limit = client.hget(keys.config("echo"), "max_open_jobs")
        client.hset(keys.config("echo"), "max_open_jobs", 0)
        try:
            assert http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "full"}).status_code == 429
        finally:
            client.hset(keys.config("echo"), "max_open_jobs", limit)
    line = lines.of("full")
    assert (line["code"], line["pool"], line["tenant"]) == ("pool_busy", "echo", "default")


@pytest.mark.parametrize(("path", "body"), STREAMS[:3])
def test_a_stream_that_fails_after_its_status_says_so_and_counts_once(http, lines, engine, path, body) -> None:
    engine.may_go_on.clear()
    before = counter(http, "penstock_http_failed_streams_total", "deadline_exceeded")
    asked = body | {"stream": True, "deadline_s": 1}
    answer = http.post(path, json=asked, headers={"X-Request-Id": f"failed-{path}"})
    assert answer.status_code == 200
    line = lines.of(f"failed-{path}")
    assert (line["outcome"], line["code"], line["status"]) == ("failed", "deadline_exceeded", 200)
    assert line["ttft_s"] < 60
    assert counter(http, "penstock_http_failed_streams_total", "deadline_exceeded") == before + 1


def test_a_whole_answer_of_a_failed_job_names_the_job_and_is_no_failed_stream(http, lines, engine) -> None:
    engine.may_go_on.clear()
    before = counter(http, "penstock_http_failed_streams_total", "deadline_exceeded")
    asked = COMPLETION | {"deadline_s": 1}
    assert http.post("/v1/completions", json=asked, headers={"X-Request-Id": "whole"}).status_code == 504
    line = lines.of("whole")
    assert (line["code"], line["pool"], line["job"].partition(".")[0]) == ("deadline_exceeded", "echo", "echo")
    assert counter(http, "penstock_http_failed_streams_total", "deadline_exceeded") == before


def test_a_stream_whose_caller_leaves_says_so(http, lines, engine) -> None:
    engine.may_go_on.clear()
    with http.stream(
        "POST", "/v1/completions", json=COMPLETION | {"stream": True}, headers={"X-Request-Id": "left"}
    ) as answer:
        next(answer.iter_lines())
    try:
        assert lines.of("left")["outcome"] == "caller_left"
    finally:
        engine.may_go_on.set()


def test_scrapes_and_probes_have_no_line_and_starts_have_one_by_a_setting(stack, engine, lines) -> None:
    with httpx.Client(base_url=stack.start_gateway(log_starts=True), timeout=60) as http:
        assert http.get("/metrics").status_code == http.get("/ready").status_code == 200
        assert http.get("/v1/models", headers={"X-Request-Id": "models"}).status_code == 200
    assert lines.of("models", "request begins")["path"] == "/v1/models"
    assert lines.of("models")["status"] == 200
    assert not lines.has_path("/metrics")
    assert not lines.has_path("/ready")


@pytest.mark.parametrize(
    ("path", "body", "num_tokens"),
    [
        ("/v1/embeddings", {"model": MODEL, "input": ["abc", "de"]}, 5),
        ("/rerank", {"model": MODEL, "query": "a", "documents": ["bc", "de"]}, 5),
        ("/score", {"model": MODEL, "text_1": "abc", "text_2": "de"}, 5),
    ],
)
def test_the_line_of_a_request_of_several_jobs_names_all_with_their_tokens(http, lines, path, body, num_tokens) -> None:
    answer = http.post(path, json=body, headers={"X-Request-Id": path})
    assert answer.status_code == 200, answer.text
    line = lines.of(path)
    assert (line["pool"], line["job"]) == ("echo", answer.headers["X-Penstock-Job"])
    assert len(line["job"].split(", ")) == len(set(line["job"].split(", "))) >= 2
    assert (line["prompt_tokens"], line["output_tokens"]) == (num_tokens, 0)
    assert "outcome" not in line


def test_each_request_about_a_job_names_it(http, lines) -> None:
    job_id = http.post("/v1/jobs", json=COMPLETION, headers={"X-Request-Id": "submitted"}).json()["id"]
    assert http.get(f"/v1/jobs/{job_id}/stream", headers={"X-Request-Id": "streamed"}).status_code == 200
    assert http.get(f"/v1/jobs/{job_id}", headers={"X-Request-Id": "shown"}).status_code == 200
    assert http.get(f"/v1/jobs/{job_id}/why", headers={"X-Request-Id": "why"}).status_code == 200
    assert http.post(f"/v1/jobs/{job_id}/ack", headers={"X-Request-Id": "acked"}).status_code == 200
    assert http.delete(f"/v1/jobs/{job_id}", headers={"X-Request-Id": "cancelled"}).status_code == 200
    for request_id in ("submitted", "streamed", "shown", "why", "acked", "cancelled"):
        line = lines.of(request_id)
        assert (line["tenant"], line["pool"], line["job"]) == ("default", "echo", job_id), request_id
    streamed = lines.of("streamed")
    assert (streamed["outcome"], streamed["prompt_tokens"], streamed["output_tokens"]) == ("complete", 6, 6)
    assert streamed["ttft_s"] < 60


def test_each_request_about_a_stored_response_names_its_job(http, lines) -> None:
    made = http.post("/v1/responses", json={"model": MODEL, "input": "abc", "store": True})
    path = f"/v1/responses/{made.json()['id']}"
    assert http.get(path, headers={"X-Request-Id": "read"}).status_code == 200
    assert http.delete(path, headers={"X-Request-Id": "deleted"}).status_code == 200
    for request_id in ("read", "deleted"):
        assert lines.of(request_id)["job"] == made.headers["X-Penstock-Job"]


def test_a_list_of_jobs_names_those_accepted_and_counts_each_refusal(http, lines) -> None:
    before = counter(http, "penstock_http_refusals_total", "model_not_found")
    wrong = COMPLETION | {"model": "none"}
    answer = http.post("/v1/jobs", json=[COMPLETION, wrong, COMPLETION, wrong], headers={"X-Request-Id": "list"})
    assert answer.status_code == 207
    line = lines.of("list")
    assert line["job"] == ", ".join(one["id"] for one in answer.json()["data"] if "id" in one)
    assert (line["code"], line["pool"], line["status"]) == ("model_not_found", "echo", 207)
    assert counter(http, "penstock_http_refusals_total", "model_not_found") == before + 2


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/jobs", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
def test_a_stream_of_a_websocket_has_the_line_of_its_request(url, engine, lines, path) -> None:
    with socket_to(url) as client:
        client.submit("a", "abc", path=path)
        (accepted, *_) = client.end_of("a")
    (job_id,) = accepted["jobs"]
    if path == "/v1/jobs":
        line = lines.where("request", path=f"/v1/jobs/{job_id}/stream")
    else:
        line = lines.of(accepted["request_id"])
    assert (line["job"], line["pool"], line["tenant"], line["outcome"]) == (job_id, "echo", "default", "complete")
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 3)
    assert lines.where("socket", path="/v1/stream")["num_streams"] == 1


def test_a_websocket_with_a_wrong_key_has_a_line_with_its_code(stack, engine, lines) -> None:
    url = stack.start_gateway(require_keys=True)
    with pytest.raises(Exception, match="401"), socket_to(url):
        pass
    assert lines.where("socket", code="invalid_api_key")["path"] == "/v1/stream"
    with httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/metrics").status_code == 401
