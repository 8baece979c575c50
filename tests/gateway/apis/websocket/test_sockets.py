"""The WebSocket `/v1/stream`: submits, streams, cancellation, several streams at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fakes.waiting import until, wait_until

from penstock.contract.errors import UnavailableError
from penstock.gateway.apis.websocket.stream import SocketStream
from penstock.producer.client import AsyncClient
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.gateway.socket_client import SocketClient, data_of, socket_to, status_of_refusal, text_of


@pytest.fixture
def socket(url: str, engine: EchoEngine) -> Iterator[SocketClient]:
    with socket_to(url) as client:
        yield client


def state_of(http: httpx.Client, job_id: str) -> str:
    return str(http.get(f"/v1/jobs/{job_id}").json()["state"])


def test_job_is_accepted_streamed_and_ended(socket: SocketClient, http: httpx.Client) -> None:
    socket.submit("a", "hello", path="/v1/jobs")
    messages = socket.end_of("a")
    assert messages[0].keys() == {"type", "id", "jobs", "request_id"} and messages[0]["type"] == "accepted"
    (job_id,) = messages[0]["jobs"]
    assert text_of(messages) == "hello"
    assert messages[-2]["data"]["outcome"]["state"] == "succeeded"
    assert messages[-1] == {"type": "end", "id": "a"}
    assert state_of(http, job_id) == "succeeded"
    streamed = http.get(f"/v1/jobs/{job_id}/stream").text
    ids = [message["event_id"] for message in messages if message["type"] == "event"]
    assert ids == [line[4:] for line in streamed.splitlines() if line.startswith("id: ")]


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/completions", lambda data: data["choices"][0]["finish_reason"] == "stop"),
        ("/v1/chat/completions", lambda data: data["choices"][0]["finish_reason"] == "stop"),
        ("/v1/messages", lambda data: data["type"] == "message_stop"),
        ("/v1/responses", lambda data: data["type"] == "response.completed"),
    ],
)
def test_events_are_those_of_the_api_at_the_path(
    socket: SocketClient, path: str, last: Callable[[dict[str, Any]], bool]
) -> None:
    socket.submit("a", "hello", path=path)
    messages = socket.end_of("a")
    assert messages[0]["type"] == "accepted" and messages[-1]["type"] == "end"
    assert last(data_of(messages)[-1])


def test_streams_of_one_socket_run_side_by_side_and_each_keeps_its_order(
    socket: SocketClient, engine: EchoEngine
) -> None:
    engine.step_s = 0.005
    prompts = {f"s{number}": f"prompt {number} " * 5 for number in range(20)}
    for tag, prompt in prompts.items():
        socket.submit(tag, prompt, path="/v1/jobs" if tag in ("s1", "s2") else "/v1/completions")
    found = socket.until_end_of(*prompts)
    assert {tag: text_of(messages) for tag, messages in found.items()} == prompts
    assert all(messages[-1]["type"] == "end" for messages in found.values())


def test_cancel_ends_a_running_stream_with_one_error(
    socket: SocketClient, http: httpx.Client, engine: EchoEngine
) -> None:
    engine.step_s = 0.02
    socket.submit("a", "a" * 200)
    begun = socket.until(lambda message: message["type"] == "event")
    socket.send("cancel", "a")
    messages = socket.end_of("a")
    assert [message["type"] for message in messages if message["type"] != "event"] == ["error"]
    assert messages[-1]["status"] == 499 and messages[-1]["error"]["code"] == "cancelled"
    assert state_of(http, begun[0]["jobs"][0]) == "cancelled"
    socket.submit("a", "again")
    assert text_of(socket.end_of("a")) == "again"


def test_cancel_of_a_background_job_cancels_it(socket: SocketClient, http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.02
    socket.submit("a", "a" * 200, path="/v1/jobs")
    (accepted,) = socket.until(lambda message: message["type"] == "accepted")
    socket.send("cancel", "a")
    messages = socket.end_of("a")
    assert messages[-1]["type"] == "end"
    assert messages[-2]["data"]["outcome"]["state"] == "cancelled"
    assert state_of(http, accepted["jobs"][0]) == "cancelled"


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/completions", "/v1/responses"])
def test_cancel_right_after_its_submit_ends_the_job(
    socket: SocketClient, http: httpx.Client, engine: EchoEngine, path: str
) -> None:
    engine.step_s = 0.05
    known = http.get("/v1/jobs?limit=1").json()["data"]
    socket.submit("a", "a" * 200, path=path, body={"background": True} if path == "/v1/responses" else {})
    socket.send("cancel", "a")
    messages = socket.end_of("a")
    assert len(data_of(messages)) < 100

    def state_of_newest() -> str:
        newest = http.get("/v1/jobs?limit=1").json()["data"]
        return str(newest[0]["state"]) if newest and newest[0]["id"] not in [job["id"] for job in known] else "none"

    # A stream whose cancel comes before its job is submitted ends without one. A background job is submitted first.
    ends = {"cancelled", "none"} if path == "/v1/completions" else {"cancelled"}
    wait_until(lambda: state_of_newest() in ends)


def test_stream_is_accepted_although_its_early_cancel_fails(
    socket: SocketClient, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, cancel, cancels = AsyncClient.submit_unread, SocketStream.cancel, list[SocketStream]()

    async def submit_after_cancel(*args: Any, **options: Any) -> Any:
        await until(lambda: cancels)
        return await submit(*args, **options)

    async def noted_cancel(stream: SocketStream) -> None:
        await cancel(stream)
        cancels.append(stream)

    async def no_cancel(*_: object, **__: object) -> None:
        raise UnavailableError("Redis is away")

    monkeypatch.setattr(AsyncClient, "submit_unread", submit_after_cancel)
    monkeypatch.setattr(SocketStream, "cancel", noted_cancel)
    monkeypatch.setattr(AsyncClient, "cancel", no_cancel)
    engine.step_s = 0.02
    socket.submit("a", "hello", path="/v1/jobs")
    socket.send("cancel", "a")
    messages = socket.end_of("a")
    assert [message["type"] for message in messages] == ["accepted", "error"]
    assert messages[-1]["status"] == 503


def test_cancel_before_a_job_is_known_ends_the_stream(stack: Stack, url: str, shared_engine: EchoEngine) -> None:
    engine = EchoEngine()
    engine.step_s = 0.05
    stack.start_node(engine, model="acme/single", pool="single", max_num_seqs=1)
    with httpx.Client(base_url=url, timeout=60) as http, socket_to(url) as socket:
        wait_until(lambda: "acme/single" in http.get("/v1/models").text)
        socket.submit("first", "a" * 200, body={"model": "acme/single"})
        socket.until(lambda message: message["type"] == "event")
        socket.submit("second", "b", body={"model": "acme/single"})
        wait_until(lambda: len(http.get("/v1/jobs?pool=single&state=queued").json()["data"]) == 1)
        socket.send("cancel", "second")
        found = socket.until(lambda message: message["id"] == "second")
        assert (found[-1]["type"], found[-1]["error"]["code"]) == ("error", "cancelled")
        wait_until(lambda: not http.get("/v1/jobs?pool=single&state=queued").json()["data"])
        socket.send("cancel", "first")
        assert socket.end_of("first")[-1]["error"]["code"] == "cancelled"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/jobs"])
def test_job_of_a_closed_socket_ends_unless_it_is_a_background_job(
    url: str, http: httpx.Client, engine: EchoEngine, path: str
) -> None:
    engine.step_s = 0.02
    with socket_to(url) as socket:
        members = {"background": False} if path == "/v1/jobs" else {}
        socket.submit("lost", "a" * 200, path=path, body=members)
        socket.submit("kept", "b" * 100, path="/v1/jobs")
        jobs: dict[str, str] = {}
        while len(jobs) < 2:
            message = socket.receive()
            if message["type"] == "accepted":
                jobs[message["id"]] = message["jobs"][0]
    wait_until(lambda: state_of(http, jobs["lost"]) == "cancelled")
    wait_until(lambda: state_of(http, jobs["kept"]) == "succeeded")


def test_job_without_event_ids_is_canceled_as_soon_as_its_socket_closes(
    stack: Stack, url: str, shared_engine: EchoEngine
) -> None:
    """The pool waits a minute for a reader to return."""
    engine = EchoEngine()
    engine.step_s = 0.05
    stack.start_node(engine, model="acme/patient", pool="patient", reattach_grace_ms=60_000)
    with httpx.Client(base_url=url, timeout=60) as http:
        wait_until(lambda: "acme/patient" in http.get("/v1/models").text)
        with socket_to(url) as socket:
            socket.submit("a", "a" * 200, body={"model": "acme/patient"}, event_ids=False)
            first = socket.until(lambda message: message["type"] == "event")
        assert "event_id" not in first[-1]
        wait_until(lambda: state_of(http, first[0]["jobs"][0]) == "cancelled")


def test_idempotency_key_gives_the_same_job(socket: SocketClient) -> None:
    ends = []
    for tag in ("a", "b"):
        socket.submit(tag, "hello", idempotency_key="socket-key")
        ends.append(socket.end_of(tag))
    assert ends[0][0]["jobs"] == ends[1][0]["jobs"]
    assert text_of(ends[1]) == "hello"
    socket.submit("c", "other", idempotency_key="socket-key")
    (conflict,) = socket.end_of("c")
    assert (conflict["status"], conflict["error"]["code"]) == (409, "idempotency_conflict")


def test_whole_stream_has_usage_on_request(socket: SocketClient) -> None:
    socket.submit("a", "hello", body={"stream_options": {"include_usage": True}})
    assert data_of(socket.end_of("a"))[-1]["usage"]["completion_tokens"] == 5


# Limits. ----------------------------------------------------------------------------------------


def test_gateway_has_a_limit_of_websockets_and_a_closed_one_no_longer_counts(
    stack: Stack, shared_engine: EchoEngine
) -> None:
    url = stack.start_gateway(max_sockets=1)
    for _ in range(3):
        with socket_to(url):
            assert status_of_refusal(url) == (429, "too_many_sockets")


def test_websocket_has_a_limit_of_open_streams(stack: Stack, shared_engine: EchoEngine) -> None:
    shared_engine.step_s = 0.02
    try:
        with socket_to(stack.start_gateway(max_socket_streams=2)) as socket:
            for tag in ("a", "b", "c"):
                socket.submit(tag, "x" * 20)
            found = socket.until_end_of("a", "b", "c")
            (refused,) = found["c"]
            assert (refused["type"], refused["error"]["code"]) == ("refused", "too_many_streams")
            assert text_of(found["a"]) == text_of(found["b"]) == "x" * 20
            socket.submit("c", "later")
            assert text_of(socket.end_of("c")) == "later"
    finally:
        shared_engine.step_s = 0.0


def test_metrics_count_open_websockets_and_their_streams(stack: Stack, shared_engine: EchoEngine) -> None:
    url = stack.start_gateway()
    with socket_to(url) as socket:
        socket.submit("a", "hello")
        socket.end_of("a")
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
    assert "penstock_http_open_sockets 1.0" in metrics
    assert 'penstock_http_requests_total{path="/v1/completions",status="200"} 1.0' in metrics


# Invalid messages. -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "param", "said"),
    [
        ("{", None, "not valid JSON"),
        ("[]", None, "must be a JSON object"),
        ("{}", "type", "type: must be one of submit, attach, cancel"),
        ('{"type": "submit", "id": "a"}', "body", "body: is required"),
        ('{"type": "submit", "id": "a", "body": []}', "body", "body: must be an object"),
        ('{"type": "submit", "id": "", "body": {}}', "id", "id: must have at least 1 characters"),
        ('{"type": "submit", "id": 7, "body": {}}', "id", "id: must be a string"),
        ('{"type": "submit", "id": "a", "path": "/metrics", "body": {}}', "path", "path: must be one of /v1/jobs"),
        ('{"type": "submit", "id": "a", "bdoy": {}}', "bdoy", "the most similar known name is body"),
        ('{"type": "attach", "id": "a"}', "job", "job: is required"),
        ('{"type": "attach", "id": "a", "job": "../../metrics"}', "job", "job: must be the id of a job"),
        ('{"type": "submit", "id": "a", "body": {}, "after": []}', "after", "must be the id of an event"),
        ('{"type": "cancel", "id": "a", "job": "x"}', "job", "job: unknown field"),
    ],
)
def test_invalid_message_is_refused_by_name(socket: SocketClient, text: str, param: str | None, said: str) -> None:
    socket.connection.send(text)
    refused = socket.receive()
    assert (refused["type"], refused["status"], refused["error"]["param"]) == ("refused", 400, param)
    assert said in refused["error"]["message"]
    assert refused.get("id") == ("a" if '"id": "a"' in text else "" if '"id": ""' in text else None)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/jobs", {}, None),
        ("/v1/jobs", {"prompt": "a", "params": {"temperature": -1}}, "params.temperature"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "max_token": 1}, "max_token"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "stream": False}, "stream"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user"}]}, "messages[0]"),
        ("/v1/completions", {"model": MODEL, "prompt": "a" * 300}, "prompt"),
    ],
)
def test_invalid_body_is_an_error_that_names_the_field(
    socket: SocketClient, path: str, body: dict[str, Any], param: str | None
) -> None:
    socket.send("submit", "a", path=path, body=body)
    (error,) = socket.end_of("a")
    assert (error["type"], error["status"], error["error"]["param"]) == ("error", 400, param)


def test_bug_in_parsing_refuses_one_message_and_other_streams_go_on(
    socket: SocketClient, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object, **__: object) -> None:
        raise OverflowError

    engine.step_s = 0.02
    socket.submit("a", "hello")
    assert socket.receive()["type"] == "accepted"
    with monkeypatch.context() as patch:
        patch.setattr("penstock.gateway.request.reading.parse_socket_message", parse)
        socket.submit("b", "hello")
        (*_, refused) = events = socket.until(lambda message: message["type"] == "refused")
    assert refused["status"] == 500
    assert text_of(events[:-1] + socket.end_of("a")) == "hello"


def test_open_id_is_refused_and_its_stream_goes_on(socket: SocketClient, engine: EchoEngine) -> None:
    engine.step_s = 0.02
    socket.submit("a", "a" * 20)
    socket.submit("a", "other")
    messages = socket.until(lambda message: message["type"] == "end")
    (refused,) = [message for message in messages if message["type"] == "refused"]
    assert (refused["id"], refused["error"]["code"], refused["error"]["param"]) == ("a", "id_in_use", "id")
    assert text_of(messages) == "a" * 20


def test_id_is_free_as_soon_as_its_stream_has_ended(socket: SocketClient) -> None:
    for number in range(20):
        socket.submit("a", f"prompt {number}", path="/v1/jobs")
        assert text_of(socket.end_of("a")) == f"prompt {number}"


def test_cancel_of_no_open_stream_is_refused(socket: SocketClient) -> None:
    socket.send("cancel", "never")
    refused = socket.receive()
    assert (refused["type"], refused["error"]["code"]) == ("refused", "stream_not_found")


def test_unknown_model_and_unknown_job_are_errors(socket: SocketClient) -> None:
    socket.submit("a", "hello", body={"model": "acme/none"})
    assert socket.end_of("a")[-1]["status"] == 404
    socket.send("attach", "b", job="echo.01a1fa14-846e-7256-a773-ee21bc2d4d97")
    assert socket.end_of("b")[-1]["error"]["code"] == "job_not_found"


def test_unknown_fields_are_listed_if_the_gateway_ignores_them(stack: Stack, shared_engine: EchoEngine) -> None:
    with socket_to(stack.start_gateway(unknown_fields="ignore")) as socket:
        socket.submit("a", "hello", body={"flavor": 1})
        assert socket.end_of("a")[0]["ignored_fields"] == ["flavor"]


def test_large_message_is_parsed_in_the_other_process(socket: SocketClient) -> None:
    biases = {str(token): 0.5 for token in range(256)}
    socket.submit("a", "hello" + " " * (300 << 10), body={"logit_bias": biases, "max_tokens": 2})
    (error,) = socket.end_of("a")
    assert (error["status"], error["error"]["code"]) == (400, "context_length_exceeded")
    socket.submit("b", "hello", body={"user": "u" * (300 << 10)})
    assert text_of(socket.end_of("b")) == "hello"
