"""`return_progress`: a stream reports its job's queue position, and then how much of its prompt is computed."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from fakes.waiting import wait_until

from penstock.contract.output import PrefillProgress
from penstock.gpu_node.engine.records import EngineRequest, StepOutput
from penstock.producer.client import AsyncClient
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.gateway.socket_client import data_of, socket_to

JOB = "x-penstock-job"
PROMPT_TOKENS = 8
PREFILL_STEP_S = 0.05
MAX_WAIT_S = 600
"""A node on a busy machine is slow, and the estimated wait of a foreground job must not refuse it."""


class SlowPrefill(EchoEngine):  # type: ignore[misc]  # a conftest module has no types
    """Computes the prompts of requests that report it two tokens a step, one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._in_prefill: list[tuple[str, int, int]] = []

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        if request.reports_prefill:
            self._in_prefill.append((request.request_id, len(request.prompt_token_ids), 0))

    def step(self) -> list[StepOutput]:
        if not self._in_prefill:
            tokens: list[StepOutput] = super().step()
            return tokens
        time.sleep(PREFILL_STEP_S)
        request_id, total, done = self._in_prefill.pop()
        done = min(total, done + 2)
        if done < total:
            self._in_prefill.append((request_id, total, done))
        return [StepOutput(request_id, 0, 0, (), "", None, prefill=PrefillProgress(total, 0, done, done))]


@pytest.fixture(scope="module")
def queue_engine(stack: Stack) -> EchoEngine:
    """The engine of a node with one slot."""
    engine = SlowPrefill()
    stack.start_node(engine, model="acme/queue", pool="queue", max_num_seqs=1, reattach_grace_ms=60_000)
    return engine


@pytest.fixture
def jobs_ahead(stack: Stack, queue_engine: EchoEngine) -> Iterator[list[Any]]:
    """Jobs that wait before the test's job. The test ends each."""
    queue_engine.step_s = 0.02

    async def submit() -> tuple[AsyncClient, list[Any]]:
        client = await stack.client().connect()
        options: Any = {"model": "acme/queue", "background": False, "max_wait_s": MAX_WAIT_S}
        return client, [await client.submit("x" * 250, **options) for _ in range(4)]

    async def end(client: AsyncClient, jobs: Sequence[Any]) -> None:
        for job in jobs:
            await job.cancel()
        await client.close()

    client, jobs = stack.call(submit())
    yield jobs
    stack.call(end(client, jobs))
    queue_engine.step_s = 0.0


def body_of(path: str, prompt: str = "abcdefgh", **fields: Any) -> dict[str, Any]:
    given = {"prompt": prompt} if path == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    return {"model": "acme/queue", **given, "stream": True, "max_wait_s": MAX_WAIT_S, **fields}


def check_rising(processed: Sequence[int]) -> None:
    """Assert that progress rises. Frequent updates may be omitted, except the last one."""
    assert processed[-1] == 8 and [*processed] == sorted({*processed} & {2, 4, 6, 8})
    assert processed[-1] == PROMPT_TOKENS


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(("path", "limit"), [("/v1/jobs", {}), ("/v1/completions", {"max_wait_s": MAX_WAIT_S})])
def test_stream_of_a_websocket_reports_the_position_of_its_job(
    stack: Stack, url: str, jobs_ahead: list[Any], path: str, limit: dict[str, int]
) -> None:
    with socket_to(url) as socket:
        body = {"model": "acme/queue", "return_progress": True} | limit
        socket.submit("a", "abcdefgh", path=path, body=body)
        first = socket.until(lambda message: "queue_progress" in message.get("data", {}))
        for job in jobs_ahead:
            stack.call(job.cancel())
        events = data_of(socket.end_of("a"))
    assert first[-1]["data"]["queue_progress"]["position"] == 4
    check_rising([event["prompt_progress"]["processed"] for event in events if "prompt_progress" in event])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_position_decreases_and_then_the_prompt_is_computed(
    stack: Stack, url: str, jobs_ahead: list[Any], path: str
) -> None:
    events, positions = list[dict[str, Any]](), list[int]()
    body = body_of(path, return_progress=True, stream_options={"include_event_ids": True, "include_usage": True})
    with httpx.stream("POST", f"{url}/v1/{path}", json=body, timeout=60) as response:
        lines = list[str]()
        for line in response.iter_lines():
            lines.append(line)
            if not line.startswith("data: {"):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if (place := events[-1].get("queue_progress")) is not None:
                positions.append(place["position"])
                # End one of the jobs ahead: the running one first.
                if len(positions) <= 4:
                    stack.call(jobs_ahead[len(positions) - 1].cancel())
    assert positions[:4] == [4, 3, 2, 1]
    assert positions[4:] in ([], [0])
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    check_rising([one["processed"] for one in progress])
    assert all(one.keys() == {"total", "cache", "processed", "time_ms"} for one in progress)
    waiting = [event for event in events if "queue_progress" in event or "prompt_progress" in event]
    assert waiting == events[: len(waiting)]
    nothing: dict[str, Any] = {"text": ""} if path == "completions" else {"delta": {}}
    assert all(
        event["choices"] == [{**nothing, "index": 0, "logprobs": None, "finish_reason": None}] for event in waiting
    )
    # Only what can be resumed has an id; the usage counts no event of the wait.
    num_ids = sum(line.startswith("id: ") for line in lines)
    assert num_ids == sum(1 for event in events if event not in waiting and event["choices"])
    assert events[-1]["usage"]["completion_tokens"] == PROMPT_TOKENS


def test_openais_client_puts_an_answer_with_progress_together(url: str, queue_engine: EchoEngine) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        messages: Any = [{"role": "user", "content": "abcdefgh"}]
        extra = {"return_progress": True}
        with api.chat.completions.stream(model="acme/queue", messages=messages, extra_body=extra) as stream:
            extras = [event.chunk.model_extra or {} for event in stream if event.type == "chunk"]
            message = stream.get_final_completion().choices[0].message
    check_rising([extra["prompt_progress"]["processed"] for extra in extras if "prompt_progress" in extra])
    assert (message.role, message.content) == ("assistant", "abcdefgh")


def test_prompts_of_one_request_have_progress_of_their_own(url: str, queue_engine: EchoEngine) -> None:
    body = body_of("completions", return_progress=True) | {"prompt": ["ab", "cd"], "n": 2}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    events = list(events_of(iter(response.text.splitlines())))
    indices = [event["choices"][0]["index"] for event in events if "prompt_progress" in event]
    assert set(indices) == {0, 2}


def test_stream_without_return_progress_is_byte_for_byte_the_same(
    stack: Stack, url: str, jobs_ahead: list[Any]
) -> None:
    timer = threading.Timer(0.8, lambda: [stack.call(job.cancel()) for job in jobs_ahead])
    timer.start()
    response = httpx.post(f"{url}/v1/completions", json=body_of("completions", "a"), timeout=60)
    timer.join()
    assert response.status_code == 200, response.text
    assert response.elapsed.total_seconds() > 0.7
    choice = b'{"text":"a","index":0,"logprobs":null,"finish_reason":"stop"}'
    head = (
        b'{"id":"cmpl-%s","created":0,"model":"acme/queue","object":"text_completion",' % response.headers[JOB].encode()
    )
    assert re.sub(rb'"created":\d+', b'"created":0', response.content) == (
        b"data: " + head + b'"choices":[' + choice + b"]}\n\ndata: [DONE]\n\n"
    )


def test_progress_needs_a_stream(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "return_progress": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_progress")


def test_a_stream_resumed_after_its_first_event_has_no_progress(url: str, queue_engine: EchoEngine) -> None:
    queue_engine.step_s = 0.02
    body = body_of("completions", return_progress=True, stream_options={"include_event_ids": True})
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        last_id = next(line for line in response.iter_lines() if line.startswith("id: ")).removeprefix("id: ")
    rest = httpx.post(f"{url}/v1/completions", json=body, headers={"Last-Event-ID": last_id}, timeout=60)
    queue_engine.step_s = 0.0
    assert "progress" not in rest.text
    said = "".join(event["choices"][0]["text"] for event in events_of(iter(rest.text.splitlines())))
    assert "abcdefgh".endswith(said) and len(said) < PROMPT_TOKENS


def test_a_job_shows_its_position_and_its_stream_the_progress(stack: Stack, url: str, jobs_ahead: list[Any]) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        body = {"model": "acme/queue", "prompt": "abcdefgh", "return_progress": True}
        answer = http.post("/v1/jobs", json=body).json()
        job_id = answer["id"]
        assert (answer["num_waiting_ahead"], answer["position"]) == (3, 4)
        assert {"estimated_wait_ms", "estimated_wait_p10_ms", "estimated_wait_p90_ms"} <= answer.keys()
        wait_until(lambda: http.get(f"/v1/jobs/{job_id}").json().get("position") == 4)
        shown = http.get(f"/v1/jobs/{job_id}").json()
        assert (shown["state"], shown["num_waiting_ahead"]) == ("queued", 3)
        assert shown["estimated_wait_ms"] is None or shown["estimated_wait_ms"] > 0

        events = list[dict[str, Any]]()
        with http.stream("GET", f"/v1/jobs/{job_id}/stream?return_progress=true") as response:
            for event in events_of(response.iter_lines()):
                events.append(event)
                if event.get("queue_progress", {}).get("position") == 4:
                    for job in jobs_ahead:
                        stack.call(job.cancel())
        progress = [event["prompt_progress"]["processed"] for event in events if "prompt_progress" in event]
        check_rising(progress)
        assert events[-1]["outcome"]["state"] == "succeeded"
        plain = http.get(f"/v1/jobs/{job_id}/stream").text
        again = http.get(f"/v1/jobs/{job_id}/stream?return_progress=true").text
        assert plain == again and "progress" not in plain
        wrong = http.get(f"/v1/jobs/{job_id}/stream?return_progress=1")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "return_progress")


def test_a_refusal_by_a_full_queue_says_how_many_jobs_wait(stack: Stack, url: str) -> None:
    engine = EchoEngine()
    engine.step_s = 0.05
    stack.start_node(engine, model="acme/full", pool="full", max_num_seqs=1, max_open_jobs=3)
    with httpx.Client(base_url=url, timeout=60) as http:
        wait_until(lambda: "acme/full" in http.get("/v1/models").text)
        body = {"model": "acme/full", "prompt": "x" * 250}
        jobs = [http.post("/v1/jobs", json={**body, "background": False}).json()["id"] for _ in range(3)]
        wait_until(lambda: http.get(f"/v1/jobs/{jobs[0]}").json()["state"] == "running")
        for path in ("/v1/completions", "/v1/jobs"):
            refused = http.post(path, json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["num_waiting_ahead"]) == (429, 2)
            assert error["retry_after_ms"] == int(refused.headers["retry-after-ms"])
        for job_id in jobs:
            http.delete(f"/v1/jobs/{job_id}")


# Responses -----------------------------------------------------------------------------------------


def test_progress_of_a_response_changes_no_number_of_its_stored_events(
    stack: Stack, url: str, jobs_ahead: list[Any]
) -> None:
    body = {"model": "acme/queue", "input": "abcdefgh", "background": True, "return_progress": True}
    with httpx.Client(base_url=url, timeout=60) as http:
        path = "/v1/responses/" + http.post("/v1/responses", json=body).json()["id"]
        asked = {"stream": "true", "return_progress": "true"}
        with http.stream("GET", path, params={**asked, "starting_after": "0"}) as response:
            events = list[dict[str, Any]]()
            for event in events_of(response.iter_lines()):
                events.append(event)
                if event.get("position") == 4:
                    for job in jobs_ahead:
                        stack.call(job.cancel())
        plain = list(events_of(iter(http.get(path, params={"stream": "true"}).text.splitlines())))
        again = list(events_of(iter(http.get(path, params=asked).text.splitlines())))
    progress = [event for event in events if event["type"].startswith("penstock:")]
    # Between `response.queued`, whose number they repeat, and `response.in_progress`.
    assert progress == events[1 : 1 + len(progress)]
    assert {event["sequence_number"] for event in progress} == {1}
    assert (progress[0]["type"], progress[0]["position"]) == ("penstock:queue_progress", 4)
    check_rising([event["processed"] for event in progress if event["type"] == "penstock:prompt_progress"])
    assert plain == again == plain[:1] + [event for event in events if event not in progress]
    assert [event["sequence_number"] for event in plain] == list(range(len(plain)))


def test_openais_client_puts_a_response_with_progress_together(url: str, queue_engine: EchoEngine) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        extra = {"return_progress": True}
        with api.responses.stream(model="acme/queue", input="abcdefgh", extra_body=extra) as stream:
            types = [event.type for event in stream]
            response = stream.get_final_response()
    assert types[0] == "response.created" and "penstock:prompt_progress" in types
    assert (response.status, response.output_text) == ("completed", "abcdefgh")


def test_progress_of_a_response_needs_a_stream(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "x", "return_progress": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_progress")
    stored = http.post("/v1/responses", json={"model": MODEL, "input": "x"}).json()["id"]
    for query in ({"return_progress": "true"}, {"stream": "true", "return_progress": "1"}):
        wrong = http.get(f"/v1/responses/{stored}", params=query)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "return_progress")
