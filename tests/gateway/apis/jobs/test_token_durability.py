"""`token_durability` over HTTP: streams, whole answers and stream reads of all APIs, the setting, and the errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from faults.tools.replica import ReplicatedRedis

from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.gateway.socket_client import socket_to

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "abc"},
    "/v1/responses": {"model": MODEL, "input": "abc"},
    "/v1/messages": {**CHAT, "max_tokens": 8},
}
SAFE = {"token_durability": "replicated"}


@pytest.fixture(scope="module")
def engine_of_pair() -> EchoEngine:
    return EchoEngine()


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, engine_of_pair: EchoEngine
) -> Iterator[tuple[ReplicatedRedis, str, str]]:
    """A Redis with a replica and a node, and two gateways: the second one confirms tokens by default, for 0.5 s."""
    with ReplicatedRedis(tmp_path_factory.mktemp("pair")) as both:
        stack = Stack(both.url)
        try:
            stack.start_node(engine_of_pair, model=MODEL, pool="echo")
            first = stack.start_gateway()
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("PENSTOCK_CLIENT_OUTAGE_S", "0.5")
                quick = stack.start_gateway(token_durability="replicated", keep_alive_s=0.2, first_chunk_wait_s=0.1)
            yield both, first, quick
        finally:
            stack.close()


@pytest.mark.parametrize("path", PATHS)
def test_each_api_answers_alike_at_each_durability(pair: tuple[ReplicatedRedis, str, str], path: str) -> None:
    _, url, quick = pair

    def check(url: str, **more: Any) -> None:
        whole = httpx.post(url + path, json={**PATHS[path], **more}, timeout=60)
        streamed = httpx.post(url + path, json={**PATHS[path], **more, "stream": True}, timeout=60)
        assert whole.status_code == streamed.status_code == 200, (whole.text, streamed.text)
        assert "abc" in whole.text
        # Chunks may be grouped otherwise each time.
        said = "".join(re.findall(r'"(?:content|text|delta)":"([abc]*)"', streamed.text))
        assert said.startswith("abc"), streamed.text

    check(url)
    check(url, **SAFE)
    check(quick)


def test_what_no_replica_confirms_ends_with_an_error_event_and_goes_on_later(
    pair: tuple[ReplicatedRedis, str, str], engine_of_pair: EchoEngine
) -> None:
    both, url, quick = pair
    engine_of_pair.waits_after = 1
    engine_of_pair.may_go_on.clear()
    try:
        body = {**CHAT, "stream": True, "stream_options": {"include_event_ids": True}}
        with httpx.stream("POST", f"{quick}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            event_id = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
            first = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
            both.replica.pause()
            engine_of_pair.may_go_on.set()
            rest = list(lines)
        assert any(line.startswith(": ") for line in rest)
        error = json.loads([line for line in rest if line.startswith("data: ")][-1].removeprefix("data: "))["error"]
        assert error["code"] == "not_replicated" and error["message"].startswith("token_durability: Redis did not ")
        seen = [line for line in rest if line.startswith("data: ")]
        refused = httpx.post(f"{quick}/v1/chat/completions", json=CHAT, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_replicated")
    finally:
        engine_of_pair.may_go_on.set()
        both.replica.resume()
        both.wait_for_replica()
    assert len(seen) == 1 and first["choices"][0]["delta"].get("content", "a")
    resumed = httpx.post(f"{url}/v1/chat/completions", params={"after": event_id}, json={**body, **SAFE}, timeout=60)
    assert resumed.text.rstrip().endswith("data: [DONE]"), resumed.text
    said = [json.loads(one[6:]) for one in resumed.text.split("\n") if one.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for one in said for choice in one["choices"])
    assert (first["choices"][0]["delta"].get("content") or "") + text == "abc"


def test_reads_of_a_job_wait_too(pair: tuple[ReplicatedRedis, str, str]) -> None:
    _, url, _ = pair
    job_id = httpx.post(f"{url}/v1/jobs", json={"model": MODEL, "prompt": "abc"}, timeout=60).json()["id"]
    streamed = httpx.get(f"{url}/v1/jobs/{job_id}/stream", params=SAFE, timeout=60).text
    assert streamed == httpx.get(f"{url}/v1/jobs/{job_id}/stream", timeout=60).text
    by_offset = httpx.get(f"{url}/v1/jobs/{job_id}/stream", params={"offset": "-1", **SAFE}, timeout=60)
    assert by_offset.headers["Stream-Closed"] == "true"
    shown = httpx.get(f"{url}/v1/jobs/{job_id}", params=SAFE, timeout=60).json()
    assert shown["result"]["choices"][0]["text"] == "abc"
    made = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "abc"}, timeout=60).json()["id"]
    for query in ({}, {"stream": "true"}):
        assert "abc" in httpx.get(f"{url}/v1/responses/{made}", params={**SAFE, **query}, timeout=60).text
    with socket_to(url) as socket:
        socket.send("attach", "a", job=job_id, **SAFE)
        assert socket.end_of("a")[-1]["type"] == "end"


def test_each_read_is_refused_where_no_replica_is(http: httpx.Client, engine: EchoEngine) -> None:
    before = http.get("/v1/jobs", params={"limit": 1}).json()["data"]
    for path, body in PATHS.items():
        for stream in (False, True):
            answer = http.post(path, json={**body, **SAFE, "stream": stream})
            assert (answer.status_code, "token_durability: no replica" in answer.text) == (503, True), path
            unable = http.post(path, json={**body, "token_durability": "fsync", "stream": stream})
            assert (unable.status_code, "token_durability: fsync is not possible" in unable.text) == (400, True), path
    assert http.get("/v1/jobs", params={"limit": 1}).json()["data"] == before
    job_id = http.post("/v1/jobs", json={"model": MODEL, "prompt": "abc"}).json()["id"]
    for query in ({}, {"offset": "-1"}):
        answer = http.get(f"/v1/jobs/{job_id}/stream", params={**query, **SAFE})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_replicated")


def test_a_submission_without_a_reader_refuses_the_option(http: httpx.Client, engine: EchoEngine) -> None:
    refused = http.post("/v1/jobs", json={"model": MODEL, "prompt": "abc", **SAFE}).json()["error"]
    assert (refused["code"], refused["param"]) == ("unknown_field", "token_durability")
    held = {"url": "/v1/chat/completions", "body": {**CHAT, **SAFE}}
    refused = http.post("/v1/jobs", json=held).json()["error"]
    assert refused["param"] == "body.token_durability"
    assert refused["message"].endswith("submitting a job shows no tokens; name it where the job is read")
