"""Responses whose client closes the stream, and the headers of a response's answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until

MODEL = "acme/slow-responses"
JOB = "x-penstock-job"


@pytest.fixture(scope="module")
def slow(stack: Any, shared_engine: Any) -> Any:
    """A node whose jobs may have no reader for a minute."""
    engine = type(shared_engine)()
    engine.step_s = 0.03
    stack.start_node(engine, model=MODEL, pool="slow_responses", reattach_grace_ms=60_000)
    return engine


def left_stream(http: httpx.Client, **options: Any) -> str:
    """Return the job of a response whose client closes the stream at the first event."""
    body = {"model": MODEL, "input": "gates open by pressure", "stream": True, **options}
    with http.stream("POST", "/v1/responses", json=body) as response:
        next(response.iter_lines())
        return response.headers[JOB]


def test_the_stream_of_a_stored_response_is_resumed_after_its_caller_left(http: httpx.Client, slow: Any) -> None:
    job_id = left_stream(http)
    asked = {"stream": "true", "starting_after": "1"}
    rest = http.get(f"/v1/responses/resp_{job_id}", params=asked).text
    events = [json.loads(line.removeprefix("data: ")) for line in rest.splitlines() if line.startswith("data: {")]
    assert events[0]["sequence_number"] == 2
    assert events[-1]["type"] == "response.completed"
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == "gates open by pressure"


def test_a_response_that_is_not_stored_is_canceled_as_soon_as_its_caller_left(http: httpx.Client, slow: Any) -> None:
    job_id = left_stream(http, store=False)
    state = wait_until(
        lambda: http.get(f"/v1/jobs/{job_id}").json()["state"], lambda one: one not in ("running", "cancelling")
    )
    assert state == "cancelled"


def test_a_background_response_with_a_reader_grace_is_canceled_when_it_has_passed(
    http: httpx.Client, slow: Any
) -> None:
    text = "gates open by pressure, and not before " * 5
    brief, patient = (left_stream(http, input=text, background=True, reader_grace_s=seconds) for seconds in (1, 600))
    job = wait_until(
        lambda: http.get(f"/v1/jobs/{brief}").json(), lambda one: one["state"] not in ("running", "cancelling")
    )
    assert job["state"] == "cancelled"
    assert job["outcome"]["code"] == "unread"
    assert job["background"] is False
    lines = http.get(f"/v1/responses/resp_{patient}", params={"stream": "true"}).text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))
    assert last["response"]["output"][0]["content"][0]["text"] == text


@pytest.mark.parametrize("seconds", [0.5, 601])
def test_a_reader_grace_out_of_range_is_refused_by_name(http: httpx.Client, seconds: float) -> None:
    body = {"model": "acme/echo", "input": "hi", "background": True, "reader_grace_s": seconds}
    refused = http.post("/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reader_grace_s")
    assert "from 1 to 600 seconds" in refused.json()["error"]["message"]


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"background": True}])
def test_a_gateway_may_ignore_unknown_fields_of_a_response_and_lists_them(
    stack: Any, shared_engine: Any, options: dict[str, Any]
) -> None:
    lenient = stack.start_gateway(unknown_fields="ignore")
    body = {"model": "acme/echo", "input": "hi", "top_a": 1, **options}
    answer = httpx.post(f"{lenient}/v1/responses", json=body, timeout=60)
    assert (answer.status_code, answer.headers["x-penstock-ignored-fields"]) == (200, "top_a")


def test_a_response_is_a_job_with_a_ledger(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"model": "acme/echo", "input": "hi"})
    job = http.get(f"/v1/jobs/{answer.headers[JOB]}").json()
    assert job["state"] == "succeeded"
    assert job["ledger"]["usage"]["completion_tokens"] == answer.json()["usage"]["output_tokens"] == 2
    assert job["id"] in [listed["id"] for listed in http.get("/v1/jobs").json()["data"]]
    assert http.delete(f"/v1/responses/{answer.json()['id']}").json()["deleted"]
    assert http.get(f"/v1/jobs/{job['id']}").json()["result_expired"]
