"""`/metrics` counts requests, streams and pools at any gateway, and answers while Redis is unreachable."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import httpx
import pytest
import redis as sync_redis
from fakes.scrapes import scraped
from fakes.waiting import until, wait_until
from faults.tools.redis_process import RedisProcess, free_port
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    PromptTooLongError,
    UnavailableError,
)
from penstock.contract.job import Priority
from penstock.contract.pool import EVENTS, RedisState
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.redis_watch import RedisMetrics
from penstock.producer.client import ClientStats
from penstock.producer.client.settings import DECISIONS, decision_of
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.broker.pools import StatsBroker
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import MAX_MODEL_LEN

MODEL = "acme/echo"


def scrape(url: str, *, timeout_s: float = 60) -> dict[tuple[str, ...], float]:
    """Return values by (name, label values in the order of the labels' names)."""
    answer = httpx.get(f"{url}/metrics", timeout=timeout_s)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return values_of(answer.text)


def fresh_scrape(url: str) -> dict[tuple[str, ...], float]:
    """Scrape what the gateway reads in Redis from now on."""
    with httpx.Client(base_url=url, timeout=60) as http:
        return values_of(scraped(http))


def values_of(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape_until(url: str, reached: Callable[[dict[tuple[str, ...], float]], bool]) -> dict[tuple[str, ...], float]:
    """Scrape until the condition holds: a request is counted after its answer."""
    return wait_until(lambda: fresh_scrape(url), reached)


@pytest.fixture
def fresh(stack, engine):
    """A gateway without any request yet."""
    return stack.start_gateway()


def test_requests_are_counted_by_route_and_errors_by_code(fresh):
    http = httpx.Client(base_url=fresh, timeout=60)
    with http:
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"}).status_code == 200
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "bogus": 1}).status_code == 400
        assert http.get(f"/v1/models/{MODEL}").status_code == 200
        for path in ("/nowhere", "/somewhere"):
            assert http.get(path).status_code == 404
    found = scrape_until(fresh, lambda found: found.get(("penstock_http_requests_total", "other", "404")) == 2)
    assert found["penstock_http_requests_total", "/v1/completions", "200"] == 1
    assert found["penstock_http_requests_total", "/v1/completions", "400"] == 1
    assert {key[1] for key in found if key[0] == "penstock_http_requests_total"} <= {
        *("/v1/completions", "/v1/models/{model:path}", "other", "/metrics")
    }
    assert found["penstock_http_refusals_total", "unknown_field"] == 1


def test_submissions_are_counted_by_decision(fresh, redis_url, engine):
    with httpx.Client(base_url=fresh, timeout=60) as http:
        before = fresh_scrape(fresh)
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"}).status_code == 200
        assert http.post("/tokenize", json={"model": MODEL, "prompt": "hi"}).status_code == 200
        too_long = {"model": MODEL, "prompt": "x" * 64 * (MAX_MODEL_LEN + 1)}
        assert http.post("/v1/completions", json=too_long).json()["error"]["code"] == "context_length_exceeded"
        with sync_redis.Redis.from_url(redis_url) as client:
            limit = client.hget(keys.config("echo"), "max_open_jobs")
            client.hset(keys.config("echo"), "max_open_jobs", 0)
            assert http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"}).status_code == 429
            client.hset(keys.config("echo"), "max_open_jobs", limit)
    found = fresh_scrape(fresh)
    decisions = {key[1]: value for key, value in found.items() if key[0] == "penstock_admission_decisions_total"}
    assert decisions == dict.fromkeys(DECISIONS, 0) | {"admitted": 2, "too_long": 1, "busy": 1}
    assert found["penstock_pool_refused_busy_total", "echo"] == before["penstock_pool_refused_busy_total", "echo"] + 1


@pytest.mark.parametrize(
    ("error", "decision"),
    [
        (BusyError("", retry_after_ms=1), "busy"),
        (BusyError("", retry_after_ms=1, code="rate_limit_exceeded"), "tenant_limit"),
        (BusyError("", retry_after_ms=1, code="a new code"), "error"),
        (UnavailableError("", code="no_node"), "no_node"),
        (UnavailableError("", code="redis_away"), "unavailable"),
        (ConflictError("", code="idempotency_conflict"), "conflict"),
        (ForbiddenError("", code="class_not_allowed"), "not_allowed"),
        (PromptTooLongError(""), "too_long"),
        (NotFoundError("", code="model_not_found"), "invalid"),
    ],
)
def test_every_error_of_a_submission_is_one_of_the_decisions(error, decision):
    assert decision_of(error) == decision
    assert decision in DECISIONS


def test_metrics_of_vllms_router_have_its_names(fresh):
    with httpx.Client(base_url=fresh, timeout=60) as http:
        for _ in range(30):
            assert http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 1}).is_success
    found = scrape_until(fresh, lambda found: found["vllm:current_qps", "gateway"] == pytest.approx(0.5))
    assert found["vllm:healthy_pods_total", "echo"] == 1
    assert found["vllm:num_incoming_requests_total", "echo"] == found["penstock_pool_submitted_total", "echo"] >= 30
    for name in ("cpu", "memory", "disk"):
        assert 0 <= found[f"router_{name}_usage_percent",] <= 100 * 64
    assert found["process_resident_memory_bytes",] > 1 << 20


def test_streams_are_timed_once_each(fresh, engine):
    engine.step_s = 0.2
    body = {"model": MODEL, "prompt": "abcdefghij", "stream": True}
    with httpx.stream("POST", f"{fresh}/v1/completions", json=body, timeout=60) as answer:
        events = answer.iter_lines()
        next(events)
        assert scrape(fresh)["penstock_http_open_streams",] == 1
        engine.step_s = 0.01
        assert list(events)[-2] == "data: [DONE]"
    found = scrape_until(fresh, lambda found: found["penstock_http_open_streams",] == 0)
    assert found["penstock_time_to_first_token_seconds_count",] == 1
    assert found["penstock_time_per_output_token_seconds_count",] == 1
    assert found["penstock_time_per_output_token_seconds_sum",] >= 0.009


def test_job_streams_are_timed_and_replayed_streams_are_not(fresh, engine):
    def num_timed() -> float:
        found = scrape_until(fresh, lambda found: found["penstock_http_open_streams",] == 0)
        return float(found["penstock_time_to_first_token_seconds_count",])

    body = {"model": MODEL, "prompt": "abcdefghij", "stream": True}
    with httpx.Client(base_url=fresh, timeout=60) as http:
        lines = http.post("/v1/completions", json=body, headers={"X-Penstock-Event-Ids": "true"}).text.splitlines()
        assert num_timed() == 1
        first_id = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
        resumed = http.post("/v1/completions", json=body, headers={"Last-Event-ID": first_id})
        assert resumed.text.endswith("data: [DONE]\n\n") and num_timed() == 1
        response = {"model": MODEL, "input": "abc", "background": True}
        response_id = http.post("/v1/responses", json=response).json()["id"]
        assert "response.completed" in http.get(f"/v1/responses/{response_id}?stream=true").text
        assert num_timed() == 1
        job_id = http.post("/v1/jobs", json={"model": MODEL, "prompt": "abc"}).json()["id"]
        assert '"outcome"' in http.get(f"/v1/jobs/{job_id}/stream").text
        assert num_timed() == 2
        assert '"outcome"' in http.get(f"/v1/jobs/{job_id}/stream?after=0").text
        assert num_timed() == 2


def test_metrics_of_pools_are_those_of_redis(fresh, redis_url, engine):
    with httpx.Client(base_url=fresh, timeout=60) as http:
        before = fresh_scrape(fresh)
        http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
    with sync_redis.Redis.from_url(redis_url) as client:
        seconds, _ = client.time()
        client.zadd(keys.waiting("echo", int(Priority.BATCH)), {"no.job": (seconds - 90) * 1000})
        client.hincrby(keys.backlog("echo"), str(int(Priority.BATCH)), 70)
        client.hincrby(keys.counts("echo"), "fenced", 3)
        found = fresh_scrape(fresh)
        client.zrem(keys.waiting("echo", int(Priority.BATCH)), "no.job")
        client.hincrby(keys.backlog("echo"), str(int(Priority.BATCH)), -70)
    assert found["penstock_queue_depth", "false", "echo", "batch", "queued"] == 1
    assert found["penstock_queue_depth", "false", "echo", "interactive", "queued"] == 0
    states = {key[-1] for key in found if key[0] == "penstock_queue_depth"}
    assert states == {"queued", "scheduled", "awaiting_tokens", "awaiting_key", "running"}
    assert found["penstock_queue_expired_total", "true", "echo", "batch"] == 0
    assert found["penstock_queue_backlog_seconds", "true", "echo"] == 0
    assert found["penstock_queue_age_seconds", "false", "echo", "batch", "queued"] == pytest.approx(90, abs=30)
    assert found["penstock_queue_cost_tokens", "false", "echo", "batch"] == 70
    assert found["penstock_nodes", "echo"] == 1
    assert found["penstock_kv_blocks", "echo"] > 0
    assert found["penstock_pool_fenced_total", "echo"] == before["penstock_pool_fenced_total", "echo"] + 3
    assert found["penstock_pool_submitted_total", "echo"] == before["penstock_pool_submitted_total", "echo"] + 1
    assert found["penstock_pool_ended_succeeded_total", "echo"] >= before["penstock_pool_ended_succeeded_total", "echo"]
    assert {f"penstock_pool_{event}_total" for event in EVENTS} <= {key[0] for key in found}
    assert found["penstock_redis_up",] == 1
    assert found["penstock_redis_max_bytes",] == 512 << 20
    assert found["penstock_client_chunks_total",] > 0
    meanings = re.findall(r"# HELP penstock_client_\w+ (.+)", httpx.get(f"{fresh}/metrics", timeout=60).text)
    # The decisions have a metric of their own, with a label.
    assert len(set(meanings)) == len(fields(ClientStats)) - 1, "each says what it counts"


def test_pauses_are_measured_by_what_they_pause(fresh, engine):
    with httpx.Client(base_url=fresh, timeout=60) as http:
        assert http.post("/v1/jobs/pause", json={"pool": "echo", "tenant": "acme"}).status_code == 200
        found = scrape_until(fresh, lambda found: ("penstock_pool_paused_seconds", "echo", "tenant") in found)
        assert 0 <= found["penstock_pool_paused_seconds", "echo", "tenant"] < 60
        assert http.post("/v1/jobs/resume", json={"pool": "echo", "tenant": "acme"}).status_code == 200
        scrape_until(fresh, lambda found: ("penstock_pool_paused_seconds", "echo", "tenant") not in found)


def test_own_metrics_are_served_while_redis_is_unreachable(stack, monkeypatch):
    # Or the copy of them would do for as long as the test takes.
    monkeypatch.setattr("penstock.producer.client.pools.KEYS_TTL_S", 0.01)
    with EmbeddedRedis() as server:
        url = stack.start_gateway(redis_url=server.url)
        scrape_until(url, lambda found: found["penstock_redis_up",] == 1)
    found = wait_until(lambda: scrape(url, timeout_s=10), lambda found: found["penstock_redis_up",] == 0)
    assert ("penstock_client_messages_total",) in found


def test_alerts_see_the_first_of_their_errors_because_these_count_from_0() -> None:
    text = generate_latest(GatewayMetrics().registry).decode()
    assert 'penstock_http_refusals_total{code="stream_diverged"} 0.0' in text
    assert 'penstock_http_refusals_total{code="no_node"} 0.0' in text


async def test_a_replica_and_another_redis_are_seen(tmp_path: Path) -> None:
    metrics = RedisMetrics()

    async def found(url: str) -> dict[str, float]:
        async with connect(url) as redis:
            state = await StatsBroker(redis).redis_state()
            metrics.note(state)
            families = metrics.metrics(state)
            return {
                ":".join([sample.name, *sample.labels.values()]): sample.value
                for family in families
                for sample in family.samples
            }

    with RedisProcess(tmp_path / "master", port=free_port()) as master:
        alone = await found(master.url)
        assert alone["penstock_redis_persistence_ok:aof"] == alone["penstock_redis_persistence_ok:snapshot"] == 1
        assert alone["penstock_redis_replicas"] == 0
        assert "penstock_redis_replica_lag_seconds" not in alone
        with RedisProcess(tmp_path / "replica", port=free_port(), replicaof=("127.0.0.1", master.port)) as replica:
            copied = await until(lambda: found(master.url), lambda copied: copied["penstock_redis_replicas"])
            assert copied["penstock_redis_replica_lag_seconds"] < 60
            assert copied["penstock_redis_replica_lag_bytes"] >= 0
            assert copied["penstock_redis_changes_total"] == 0
            assert (await found(replica.url))["penstock_redis_changes_total"] == 1


def test_redis_away_is_no_change_of_redis() -> None:
    metrics, state = RedisMetrics(), RedisState(used_bytes=1, max_bytes=2, run_id="a", is_aof_on=True, is_aof_ok=False)
    values = []
    for seen in (state, None, state, replace(state, run_id="b")):
        if seen is not None:
            metrics.note(seen)
        found = {family.name: family for family in metrics.metrics(seen)}
        values.append((found["penstock_redis_up"].samples[0].value, found["penstock_redis_changes"].samples[0].value))
    assert values == [(1, 0), (0, 0), (1, 0), (1, 1)]
    ok = {sample.labels["kind"]: sample.value for sample in found["penstock_redis_persistence_ok"].samples}
    assert ok == {"aof": 0, "snapshot": 1}
