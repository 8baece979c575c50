"""`/v1/jobs`: jobs are submitted, shown, streamed, canceled and listed over HTTP, by their tenant alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from fakes.fake_node import FakeNode
from fakes.waiting import until, wait_until

from penstock.queue import keys
from tests.gateway.conftest import MODEL, EchoEngine, Stack

TEXT = "abcdefghij"


def submit(http: httpx.Client, **body: Any) -> str:
    """Submit a job and return its id."""
    body = body if body.keys() & {"tokens", "messages"} else {"prompt": TEXT, **body}
    answer = http.post("/v1/jobs", json={"model": MODEL, **body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def shown(http: httpx.Client, job_id: str) -> dict[str, Any]:
    answer = http.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ended(http: httpx.Client, job_id: str) -> dict[str, Any]:
    """Wait for a job's end and return the job."""
    return wait_until(lambda: shown(http, job_id), lambda job: job["outcome"] is not None)


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id and the data of each event."""
    event_id = ""
    for line in lines:
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield event_id, json.loads(line.removeprefix("data: "))


def streamed(http: httpx.Client, job_id: str, after: str = "", **headers: str) -> list[tuple[str, dict[str, Any]]]:
    query = f"?after={after}" if after else ""
    with http.stream("GET", f"/v1/jobs/{job_id}/stream{query}", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events(answer.iter_lines()))


def text_of(found: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(chunk.get("text", "") for _, chunk in found)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.json().keys() == {"error"}
    return dict(answer.json()["error"])


def test_submitted_job_runs_without_a_reader_and_is_shown_with_result_and_ledger(
    http: httpx.Client, engine: EchoEngine
) -> None:
    answer = http.post("/v1/jobs", json={"model": MODEL, "prompt": TEXT, "params": {"max_tokens": 5}})
    job_id = answer.json()["id"]
    path = f"/v1/jobs/{job_id}"
    links = {"self": path, "stream": f"{path}/stream", "cancel": path, "why": f"{path}/why"}
    assert answer.json() == {"id": job_id, "object": "job", "state": "queued", "links": links}
    assert (answer.headers["location"], answer.headers["x-penstock-job"]) == (links["self"], job_id)

    job = ended(http, job_id)
    assert (job["state"], job["outcome"]["state"]) == ("succeeded", "succeeded")
    assert (job["priority"], job["pool"]) == ("batch", "echo")
    assert job["result"]["choices"] == [
        {"index": 0, "text": "abcde", "token_ids": [*b"abcde"], "finish_reason": "length"}
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 0, "reasoning_tokens": 0}
    assert job["result"]["usage"] == job["ledger"]["usage"] == usage
    ledger = job["ledger"]
    assert [event["event"] for event in ledger["events"]] == ["queued", "taken", "first_token", "finished"]
    times = [event["at_ms"] for event in ledger["events"]]
    assert times == [ledger[f"{name}_ms"] for name in ("queued", "taken", "first_token", "finished")] == sorted(times)
    assert abs(times[0] / 1000 - time.time()) < 60
    assert ledger["events"][1]["node"] == ledger["events"][3]["node"] == ledger["node"]
    assert (ledger["losses"], ledger["preemptions"], ledger["num_past_leases"]) == (0, 0, 0)
    assert ledger["engine_preemptions"] == 0
    assert ledger["kv_token_seconds"] >= 0


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"tokens": [*b"xyz"]}, "xyz"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "hello"),
        ({"prompt": "a.b", "params": {"stop": ["."], "n": 2, "logit_bias": {"7": 1}}}, "a"),
    ],
)
def test_prompt_may_be_text_tokens_or_messages(http: httpx.Client, body: dict[str, Any], text: str) -> None:
    job = ended(http, submit(http, **body))
    assert {choice["text"] for choice in job["result"]["choices"]} == {text}


def test_why_says_where_the_time_of_a_job_went(http: httpx.Client) -> None:
    job_id = submit(http)
    ended(http, job_id)
    told = http.get(f"/v1/jobs/{job_id}/why").json()
    assert (told["object"], told["state"], told["waits_for"]) == ("job.explanation", "succeeded", [])
    assert [part["part"] for part in told["parts"]][:2] == ["queue", "first_token"]
    late = http.get(f"/v1/jobs/{submit(http, not_before_s=600)}/why").json()
    assert late["waits_for"][0]["waits_for"].startswith("its start time, in ")


def test_logprobs_come_with_result_and_chunks(http: httpx.Client) -> None:
    job_id = submit(http, prompt="ab", params={"logprobs": 1, "prompt_logprobs": 1})
    result = ended(http, job_id)["result"]
    (choice,) = result["choices"]
    assert [row["token"] for row in choice["logprobs"]["content"]] == ["a", "b"]
    assert len(result["prompt_logprobs"]) == 2
    chunks = [chunk for _, chunk in streamed(http, job_id)]
    rows = [row for chunk in chunks for row in chunk.get("logprobs", {}).get("content", ())]
    assert [row["token"] for row in rows] == ["a", "b"]
    assert sum(len(chunk.get("prompt_logprobs", ())) for chunk in chunks) == 2


def test_stream_has_every_chunk_and_the_outcome(http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.01
    job_id = submit(http)
    found = streamed(http, job_id)
    assert text_of(found) == TEXT
    assert [chunk["index"] for _, chunk in found] == list(range(len(found)))
    assert found[0][1]["num_prompt_tokens"] == len(TEXT)
    assert found[-1][1]["outcome"]["state"] == "succeeded"
    assert streamed(http, job_id) == found


def test_stream_continues_after_any_chunk_at_another_gateway(
    stack: Stack, http: httpx.Client, engine: EchoEngine
) -> None:
    engine.step_s = 0.02
    job_id = submit(http, prompt=TEXT * 3)
    with http.stream("GET", f"/v1/jobs/{job_id}/stream") as answer:
        first = [next(each) for each in [events(answer.iter_lines())] for _ in range(3)]
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as other:
        whole = streamed(other, job_id)
        assert whole[: len(first)] == first
        assert text_of(whole) == TEXT * 3
        for at, (event_id, chunk) in enumerate(whole[:-1]):
            assert streamed(other, job_id, event_id) == whole[at + 1 :]
            assert streamed(other, job_id, str(chunk["index"])) == whole[at + 1 :]
            # A browser that lost its connection repeats its URL, and says in the header where it was.
            assert streamed(other, job_id, "0", **{"Last-Event-ID": event_id}) == whole[at + 1 :]
        at_end = other.get(f"/v1/jobs/{job_id}/stream?after={whole[-1][0]}")
        assert (at_end.status_code, at_end.content) == (204, b"")


def test_stream_with_another_log_than_the_caller_read_diverges(http: httpx.Client) -> None:
    job_id = submit(http)
    ended(http, job_id)
    found = streamed(http, job_id)
    index, end = found[0][0].split(":")
    answer = http.get(f"/v1/jobs/{job_id}/stream?after={index}:{int(end) + 1}")
    assert (answer.status_code, error_of(answer)["code"]) == (500, "stream_diverged")


def test_an_acknowledged_job_keeps_its_state_without_its_result(http: httpx.Client, engine: EchoEngine) -> None:
    job_id = submit(http)
    later = submit(http, not_before_s=600)
    early = http.post(f"/v1/jobs/{later}/ack")
    http.delete(f"/v1/jobs/{later}")
    assert (early.status_code, early.json()["state"], early.json()["freed"]) == (200, "scheduled", False)
    before = ended(http, job_id)
    answers = [http.post(f"/v1/jobs/{job_id}/ack").json() for _ in range(2)]
    assert [(answer["state"], answer["freed"]) for answer in answers] == [("succeeded", True), ("succeeded", False)]
    after = http.get(f"/v1/jobs/{job_id}").json()
    assert before["result"] is not None
    assert (after["result"], after["result_expired"], after["ledger"]) == (None, True, before["ledger"])


def test_canceled_job_ends_and_says_so(http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.05
    job_id = submit(http, prompt=TEXT * 20)
    answer = http.delete(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200
    assert answer.json()["state"] in ("cancelling", "cancelled")
    job = ended(http, job_id)
    assert (job["state"], job["outcome"]["code"]) == ("cancelled", "cancelled")
    assert job["ledger"]["events"][-1]["reason"] == "cancelled"
    assert http.delete(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"
    assert streamed(http, job_id)[-1][1]["outcome"]["state"] == "cancelled"


def test_job_with_a_reader_ends_soon_without_one(http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.05
    job = ended(http, submit(http, prompt=TEXT * 20, background=False))
    assert (job["state"], job["outcome"]["code"]) == ("cancelled", "unread")


def test_repeated_submission_with_a_key_is_the_same_job(http: httpx.Client) -> None:
    job_id = submit(http, idempotency_key="one")
    assert submit(http, idempotency_key="one") == job_id
    headers = {"Idempotency-Key": "one"}
    again = http.post("/v1/jobs", json={"model": MODEL, "prompt": TEXT}, headers=headers)
    assert (again.status_code, again.json()["id"]) == (202, job_id)
    other = http.post("/v1/jobs", json={"model": MODEL, "prompt": "other"}, headers=headers)
    assert (other.status_code, error_of(other)["code"]) == (409, "idempotency_conflict")
    both = http.post("/v1/jobs", json={"model": MODEL, "prompt": TEXT, "idempotency_key": "two"}, headers=headers)
    assert (both.status_code, error_of(both)["param"]) == (400, "idempotency_key")


def test_job_waits_until_its_time_and_ends_at_its_deadline(http: httpx.Client, engine: EchoEngine) -> None:
    job_id = submit(http, not_before_s=1, deadline_s=60)
    job = shown(http, job_id)
    assert (job["state"], job["num_waiting_ahead"], job["result"]) == ("scheduled", 0, None)
    job = ended(http, job_id)
    assert job["ledger"]["taken_ms"] >= job["ledger"]["queued_ms"] > time.time() * 1000 - 20_000
    engine.step_s = 0.05
    late = ended(http, submit(http, deadline_s=0.2))
    assert (late["state"], late["outcome"]["code"]) == ("expired", "deadline_exceeded")


def test_large_body_is_parsed_in_the_parser_process_with_all_its_options(http: httpx.Client) -> None:
    """It has too many values for the event loop."""
    messages = [{"role": "user", "content": text} for text in [*["before"] * 600, "hello"]]
    body = {"messages": messages, "priority": "batch", "params": {"max_tokens": 3}, "idempotency_key": "large"}
    job_id = submit(http, **body, not_before_s=0.3, deadline_s=60)
    assert submit(http, **body, not_before_s=0.3, deadline_s=60) == job_id
    job = ended(http, job_id)
    assert (job["priority"], job["result"]["choices"][0]["text"]) == ("batch", "hel")
    assert job["ledger"]["taken_ms"] >= job["ledger"]["queued_ms"]
    refused = http.post("/v1/jobs", json={"model": MODEL, "tokens": [*range(50_000)]})
    assert (error_of(refused)["code"], error_of(refused)["param"]) == ("context_length_exceeded", "tokens")


def test_large_result_expires_soon_after_it_was_fetched_but_the_job_does_not(
    http: httpx.Client, redis_url: str
) -> None:
    job_id = submit(http, prompt="x" * 200, params={"n": 4, "logprobs": 20})
    first = ended(http, job_id)
    assert len(first["result"]["choices"][3]["logprobs"]["content"]) == 200
    with redis.Redis.from_url(redis_url) as client:
        assert 0 < client.pttl(keys.result(job_id)) <= 120_000
        client.delete(keys.result(job_id))
    again = shown(http, job_id)
    assert (again["state"], again["result"], again["result_expired"]) == ("succeeded", None, True)
    assert again["ledger"]["usage"] == first["result"]["usage"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, None),
        ({"tokens": [1]}, None),
        ({"prompt": 3}, "prompt"),
        ({"prompt": None, "tokens": []}, "tokens"),
        ({"prompt": None, "tokens": [-1]}, "tokens[0]"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
        ({"params": {"temperature": "0.5"}}, "params.temperature"),
        ({"params": {"n": 17}}, "params.n"),
        ({"params": {"heat": 1}}, "params.heat"),
        ({"params": {"stop": ["a"] * 17}}, "params.stop"),
        ({"params": {"logit_bias": {"a": 1}}}, "params.logit_bias.a.[key]"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": 1, "not_before_s": 2}, "not_before_s"),
        ({"priority": "interactive"}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"model": "nobody"}, "model"),
        ({"temperature": 11}, "temperature"),
    ],
)
def test_wrong_field_is_named(http: httpx.Client, change: dict[str, Any], param: str | None) -> None:
    body = json.dumps({"model": MODEL, "prompt": TEXT, **change}).encode()
    answer = http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 403, 404), answer.text
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize("path", ["", "/stream", "/why"])
@pytest.mark.parametrize("job_id", ["nothing", "echo.01890a5d-ac96-774b-bcce-b302099a8057"])
def test_unknown_job_is_not_found(http: httpx.Client, path: str, job_id: str) -> None:
    answer = http.get(f"/v1/jobs/{job_id}{path}")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "job_not_found")
    assert http.delete(f"/v1/jobs/{job_id}").status_code == 404


@pytest.mark.parametrize("after", ["x", "-2", "1:", ":1", "1:2:3", "1" * 20])
def test_wrong_position_of_a_stream_is_named(http: httpx.Client, after: str) -> None:
    answer = http.get(f"/v1/jobs/{submit(http)}/stream?after={after}")
    assert (answer.status_code, error_of(answer)["param"]) == (400, "after")


def test_list_has_pages_and_filters(http: httpx.Client, engine: EchoEngine) -> None:
    mine = [submit(http) for _ in range(5)]
    for job_id in mine:
        ended(http, job_id)
    waiting = submit(http, not_before_s=600)

    found: list[str] = []
    query, num_pages = "?limit=2", 0
    while query:
        page = http.get(f"/v1/jobs{query}").json()
        found += [job["id"] for job in page["data"]]
        assert len(page["data"]) <= 2
        assert page["has_more"] is (page["next"] is not None)
        query = f"?limit=2&after={page['next']}" if page["next"] else ""
        num_pages += 1
    assert found[:6] == [waiting, *reversed(mine)]
    assert len(found) == len(set(found))
    assert num_pages >= 3

    scheduled = {job["id"]: job for job in http.get("/v1/jobs?state=scheduled").json()["data"]}
    assert waiting in scheduled and not scheduled.keys() & set(mine)
    assert "result" not in scheduled[waiting]
    assert waiting not in {job["id"] for job in http.get("/v1/jobs?state=succeeded&limit=100").json()["data"]}
    empty = http.get("/v1/jobs?pool=other").json()
    assert abs(empty.pop("now_ms") / 1000 - time.time()) < 60
    assert empty == {"object": "list", "data": [], "has_more": False, "next": None}
    assert http.get("/v1/jobs?pool=echo&limit=1").json()["data"][0]["id"] == waiting
    http.delete(f"/v1/jobs/{waiting}")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("state=over", "state"),
        ("after=x", "after"),
        ("pool=" + "x" * 100, "pool"),
        ("order=asc", "order"),
    ],
)
def test_wrong_query_is_named(http: httpx.Client, query: str, param: str | None) -> None:
    answer = http.get(f"/v1/jobs?{query}")
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_generation_may_wait_and_have_a_deadline(
    http: httpx.Client, engine: EchoEngine, path: str, stream: bool
) -> None:
    prompt = {"prompt": TEXT} if path == "completions" else {"messages": [{"role": "user", "content": TEXT}]}
    body = {"model": MODEL, **prompt, "stream": stream}
    begun_s = time.monotonic()
    answer = http.post(f"/v1/{path}", json={**body, "not_before_s": 0.5, "deadline_s": 30})
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - begun_s >= 0.5

    engine.step_s = 0.05
    answer = http.post(f"/v1/{path}", json={**body, "deadline_s": 0.2})
    assert "deadline_exceeded" in answer.text
    assert answer.status_code == (200 if stream else 504)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_wrong_times_of_a_generation_are_named(http: httpx.Client, path: str) -> None:
    prompt = {"prompt": TEXT} if path == "completions" else {"messages": [{"role": "user", "content": TEXT}]}
    for times, param in (({"deadline_s": 0}, "deadline_s"), ({"not_before_s": 9, "deadline_s": 3}, "not_before_s")):
        answer = http.post(f"/v1/{path}", json={"model": MODEL, **prompt, **times})
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_a_job_may_wait_for_a_node(stack: Stack, http: httpx.Client, redis_url: str) -> None:
    async def leave() -> None:
        async with FakeNode(redis_url, auto=False, pool="away", model="acme/away") as node:
            await node.broker.leave()

    async def serve(job_id: str) -> None:
        async with FakeNode(redis_url, pool="away", model="acme/away"):
            await until(lambda: shown(http, job_id)["outcome"] is not None)

    asyncio.run(leave())
    body = {"model": "acme/away", "prompt": TEXT, "params": {"max_tokens": 2}}
    refused = http.post("/v1/jobs", json={**body, "background": False})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_node")
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    assert shown(http, job_id)["state"] == "queued"
    asyncio.run(asyncio.wait_for(serve(job_id), 20))
    assert ended(http, job_id)["state"] == "succeeded"


@pytest.mark.parametrize("after", ["", "x", "0", "%00", "%FF", "resp_1", "a.00000000-0000-7000-8000-000000000000%0A"])
def test_wrong_cursor_of_a_list_is_named(http: httpx.Client, after: str) -> None:
    submit(http)
    answer = http.get(f"/v1/jobs?after={after}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
