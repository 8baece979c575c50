"""A job may have the body of another endpoint, as in a line of a batch file, and sampling options without `params`."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from fakes.fake_node import FakeNode
from fakes.processes.reference_engine import fake_embedding
from fakes.waiting import wait_until

from penstock.contract.tasks import Embed
from penstock.queue.broker.connection import connect
from penstock.queue.broker.scripts import PoolClocks, sweep
from tests.gateway.apis.jobs.test_jobs import TEXT, ended, error_of, shown, submit
from tests.gateway.conftest import MODEL, EchoEngine

CHAT = {"messages": [{"role": "user", "content": TEXT}]}


BODIES_WITH_TTL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": TEXT, "ttl_s": 2},
    "/v1/chat/completions": {"model": MODEL, **CHAT, "ttl_s": 2},
    "/v1/responses": {"model": MODEL, "input": TEXT, "ttl_s": 2},
}


def line(url: str, body: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"custom_id": "row-1", "method": "POST", "url": url, "body": body, **beside}


def posted(http: httpx.Client, body: Any) -> httpx.Response:
    return http.post("/v1/jobs", content=json.dumps(body).encode(), headers={"content-type": "application/json"})


def accepted(http: httpx.Client, body: Any) -> dict[str, Any]:
    answer = posted(http, body)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def text_of(http: httpx.Client, body: Any) -> str:
    return str(ended(http, accepted(http, body)["id"])["result"]["choices"][0]["text"])


@pytest.mark.parametrize("named", [{}, {"model": MODEL}])
def test_a_line_of_a_batch_file_is_a_job(http: httpx.Client, engine: EchoEngine, named: dict[str, str]) -> None:
    chat = {**CHAT, "max_completion_tokens": 5, "temperature": 0.5, "seed": 7, **named}
    answer = accepted(http, line("/v1/chat/completions", chat))
    assert (answer["custom_id"], answer["object"], answer["state"]) == ("row-1", "job", "queued")
    job = ended(http, answer["id"])
    assert (job["result"]["choices"][0]["text"], job["background"], job["priority"]) == (TEXT[:5], True, "batch")
    assert engine.last_params is not None
    assert (engine.last_params.temperature, engine.last_params.seed) == (0.5, 7)
    assert text_of(http, line("/v1/completions", {"prompt": TEXT, "max_tokens": 3, **named})) == TEXT[:3]


def test_texts_are_embedded_by_jobs(http: httpx.Client) -> None:
    job = ended(http, accepted(http, line("/v1/embeddings", {"input": "Hello", "dimensions": 4}))["id"])
    assert (job["state"], job["ledger"]["usage"]["prompt_tokens"]) == ("succeeded", 5)
    wanted = fake_embedding([*b"Hello"], Embed(dimensions=4))
    assert job["result"]["embedding"] == pytest.approx(wanted, abs=1e-6)


def test_a_response_of_a_job_is_not_stored(http: httpx.Client, engine: EchoEngine) -> None:
    body = {"input": TEXT, "instructions": "be short", "max_output_tokens": 4, "store": False}
    job_id = accepted(http, line("/v1/responses", body))["id"]
    assert ended(http, job_id)["result"]["choices"][0]["text"] == TEXT[:4]
    (messages, _tools) = engine.tokenizer.last_chat or ((), None)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert http.get(f"/v1/responses/resp_{job_id}").status_code == 404


def test_options_of_the_queue_stand_in_the_body_or_beside_it(http: httpx.Client) -> None:
    beside = {"priority": "standard", "not_before_s": 600, "idempotency_key": "line", "deadline_s": 700}
    one = accepted(http, line("/v1/chat/completions", {**CHAT, "deadline_s": 700, "priority": "standard"}, **beside))
    assert (shown(http, one["id"])["state"], shown(http, one["id"])["priority"]) == ("scheduled", "standard")
    again = accepted(http, line("/v1/chat/completions", {**CHAT, "not_before_s": 600}, **beside, model=MODEL))
    assert again["id"] == one["id"]
    http.delete(f"/v1/jobs/{one['id']}")
    flex = accepted(http, line("/v1/chat/completions", {**CHAT, "service_tier": "flex"}))
    assert ended(http, flex["id"])["priority"] == "batch"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (line("/v1/models", {}), "url"),
        (line("/v1/completions", {"prompt": TEXT}, method="GET"), "method"),
        (line("/v1/completions", {"prompt": TEXT}, custom_id="c" * 257), "custom_id"),
        ({"url": "/v1/completions"}, "body"),
        ({"body": {"prompt": TEXT}}, "url"),
        (line("/v1/completions", {"prompt": TEXT}, prompt="x"), "prompt"),
        (line("/v1/completions", {"prompt": TEXT}, temperature=0), "temperature"),
        (line("/v1/completions", {"prompt": TEXT}, params={"n": 1}), "params"),
        (line("/v1/completions", {"prompt": TEXT, "heat": 1}), "body.heat"),
        (line("/v1/completions", {"prompt": TEXT, "n": 17}), "body.n"),
        (line("/v1/completions", {"prompt": [TEXT, TEXT]}), "body.prompt"),
        (line("/v1/completions", {"prompt": "x" * 600}), "body.prompt"),
        (line("/v1/completions", {"prompt": TEXT, "stream": True}), "body.stream"),
        (line("/v1/completions", {"prompt": TEXT, "deadline_s": -1}), "body.deadline_s"),
        (line("/v1/completions", {"prompt": TEXT, "model": "nobody"}), "body.model"),
        (line("/v1/completions", {"prompt": TEXT}, model="nobody"), "model"),
        (line("/v1/completions", {"prompt": TEXT}, deadline_s=-1), "deadline_s"),
        (line("/v1/completions", {"prompt": TEXT, "deadline_s": 5}, deadline_s=6), "deadline_s"),
        (line("/v1/completions", {"prompt": TEXT, "model": MODEL}, model="echo"), "model"),
        (line("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}), "body.messages[0].role"),
        (line("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}), "body.max_completion_tokens"),
        (line("/v1/chat/completions", {**CHAT, "priority": "interactive"}), "body.priority"),
        (line("/v1/embeddings", {"input": ["a", "b"]}), "body.input"),
        (line("/v1/embeddings", {"input": "a", "pooling": "x"}), "body.pooling"),
        (line("/v1/responses", {"input": TEXT, "store": True}), "body.store"),
        (line("/v1/responses", {"input": TEXT, "previous_response_id": "resp_1"}), "body.previous_response_id"),
        (line("/v1/responses", {"input": []}), "body.input"),
    ],
)
def test_wrong_member_of_a_line_is_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = posted(http, body)
    assert answer.status_code in (202, 400, 403, 404), answer.text
    if answer.status_code == 202:
        # The node refuses what only it can count.
        assert ended(http, answer.json()["id"])["outcome"]["code"] == "context_length_exceeded"
        return
    assert error_of(answer)["param"] == param


def test_two_different_values_of_an_option_are_named(http: httpx.Client) -> None:
    one = {"model": MODEL, "prompt": TEXT}
    refused = error_of(posted(http, {**one, "max_tokens": 3, "params": {"max_tokens": 4}}))
    assert (refused["param"], refused["code"]) == ("max_tokens", "unsupported_value")
    assert "params.max_tokens" in refused["message"]
    refused = error_of(posted(http, line("/v1/completions", {"prompt": TEXT, "ttl_s": 5}, ttl_s=6)))
    assert "ttl_s" in refused["message"]
    assert "body.ttl_s" in refused["message"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 3}, "abc"),
        ({"max_tokens": 3.0, "params": {"temperature": 0}}, "abc"),
        ({"max_tokens": 3, "params": {"max_tokens": 3}}, "abc"),
        ({"stop": "c", "params": {"stop": ["c"]}}, "ab"),
        ({"stop": ["c"], "params": {"stop": "c"}}, "ab"),
        ({"stop": ["d"], "n": 2, "logit_bias": {"7": 1}, "params": {"logit_bias": {"7": 1}}}, "abc"),
        ({"max_tokens": None, "temperature": 0, "structured_outputs": {"choice": [TEXT]}}, TEXT),
    ],
)
def test_sampling_options_need_no_params(http: httpx.Client, options: dict[str, Any], text: str) -> None:
    assert text_of(http, {"model": MODEL, "prompt": TEXT, **options}) == text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"temperature": 11}, "temperature"),
        ({"params": {"temperature": 11}, "n": 2}, "params.temperature"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"min_tokens": 3, "params": {"max_tokens": 2}}, "min_tokens"),
        ({"heat": 1}, "heat"),
    ],
)
def test_wrong_sampling_option_is_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    answer = posted(http, {"model": MODEL, "prompt": TEXT, **change})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


# Time to live


async def start_late(redis_url: str, http: httpx.Client) -> dict[str, Any]:
    """Submit a job to a pool whose only node takes jobs only after the TTL."""
    async with FakeNode(redis_url, auto=False, pool="late", model="acme/late"), connect(redis_url) as redis:
        body = {"model": "acme/late", "prompt": TEXT, "ttl_s": 0.2}
        job_id = (await asyncio.to_thread(accepted, http, body))["id"]
        while (await asyncio.to_thread(shown, http, job_id))["outcome"] is None:
            # Every node and every reading process does so from time to time.
            await sweep(redis, "late", PoolClocks())
            await asyncio.sleep(0.05)
        return await asyncio.to_thread(shown, http, job_id)


def test_a_job_that_no_node_starts_within_its_ttl_expires(http: httpx.Client, redis_url: str) -> None:
    job = asyncio.run(start_late(redis_url, http))
    assert (job["state"], job["outcome"]["code"], job["result"]) == ("expired", "not_started_in_time", None)
    assert job["ledger"]["taken_ms"] is None


def test_a_job_that_a_node_has_started_outlives_its_ttl(http: httpx.Client, engine: EchoEngine) -> None:
    engine.may_go_on.clear()
    begun = {
        "jobs": submit(http, ttl_s=2),
        **{url: accepted(http, line(url, body))["id"] for url, body in BODIES_WITH_TTL.items()},
    }
    wait_until(lambda: all(shown(http, job_id)["state"] != "queued" for job_id in begun.values()))
    time.sleep(2.1)  # The TTL ends while they run.
    engine.may_go_on.set()
    assert {ended(http, job_id)["state"] for job_id in begun.values()} == {"succeeded"}


@pytest.mark.parametrize("path", ["completions", "chat/completions", "embeddings", "responses", "jobs"])
@pytest.mark.parametrize("ttl_s", [0, -1, 31_622_401, "5"])
def test_a_wrong_ttl_is_named(http: httpx.Client, path: str, ttl_s: object) -> None:
    prompts = {"chat/completions": CHAT, "embeddings": {"input": TEXT}, "responses": {"input": TEXT}}
    body = {"model": MODEL, **prompts.get(path, {"prompt": TEXT}), "ttl_s": ttl_s}
    answer = http.post(f"/v1/{path}", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "ttl_s")
    if not isinstance(ttl_s, str):
        assert "31622400" in error_of(answer)["message"]


def test_a_job_may_not_wait_for_its_time_beyond_its_ttl(http: httpx.Client) -> None:
    answer = posted(http, {"model": MODEL, "prompt": TEXT, "not_before_s": 9, "ttl_s": 3})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "not_before_s")
    assert "ttl_s (3.0)" in error_of(answer)["message"]
