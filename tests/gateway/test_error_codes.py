"""Each code in HTTP's table of errors: its status, the code in its line of the log, and its counter agree.

A code is provoked by a request where one request can do it, and by a job that fails at its node. Where it takes a state
of Redis, of files or of time, which other tests make, the error that they find is raised in the queue's client.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import httpx
import pytest

from penstock.contract.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    DamagedRecordError,
    ForbiddenError,
    GoneError,
    InvariantError,
    JobCancelledError,
    JobExpiredError,
    JobFailedError,
    NotFoundError,
    NotOnDiskError,
    NotReplicatedError,
    PenstockError,
    ProtocolVersionError,
    RequestError,
    StreamDivergedError,
    TooCostlyError,
    TooLargeError,
    UnavailableError,
    UnsupportedDurabilityError,
    UnsupportedKindError,
)
from penstock.contract.tenant import ApiKey
from penstock.gateway.apis.websocket.stream import SocketChannel, SocketStream
from penstock.gateway.http.file_content import RangeError
from penstock.gateway.http.middleware.access_log import log_socket_error
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request.encoding import Attach
from penstock.gateway.stream.writer import framing_of
from penstock.producer.client import AsyncClient
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.gateway.socket_client import SocketClient, is_end, socket_to
from tests.gateway.test_request_lines import Lines, lines
from tests.source_tree import ROOT

__all__ = ["lines"]
JOB = f"echo.{'0' * 8}-0000-7000-8000-{'0' * 12}"
TEXT = {"model": MODEL, "prompt": "abc"}
ENDPOINT = {"name": "n", "event_types": ["job.succeeded"]}
REQUESTS: dict[str, dict[str, Any]] = {
    "invalid_request": {"json": TEXT | {"temperature": "warm"}},
    "unknown_field": {"json": TEXT | {"bogus": 1}},
    "unsupported_value": {"json": TEXT | {"suffix": "x"}},
    "context_length_exceeded": {"json": TEXT | {"prompt": "x" * 64 * 513}},
    "model_not_found": {"json": TEXT | {"model": "none"}},
    "unsupported_media_type": {"content": b"x", "headers": {"content-encoding": "gzip"}},
    "not_found": {"method": "GET", "path": "/nowhere"},
    "method_not_allowed": {"method": "DELETE", "path": "/v1/models"},
    "job_not_found": {"method": "GET", "path": f"/v1/jobs/{JOB}"},
    "response_not_found": {"method": "GET", "path": f"/v1/responses/resp_{JOB}"},
    "bulk_not_found": {"method": "GET", "path": "/v1/jobs/bulk/bulk_0"},
    "previous_response_not_found": {
        "path": "/v1/responses",
        "json": {"model": MODEL, "input": "x", "previous_response_id": f"resp_{JOB}"},
    },
    "item_not_found": {
        "path": "/v1/responses",
        "json": {"model": MODEL, "input": [{"type": "item_reference", "id": f"msg_{JOB}_0"}]},
    },
    "schedule_not_found": {"method": "GET", "path": "/v1/schedules/sched_0"},
    "no_file_storage": {"method": "GET", "path": "/v1/files"},
    "invalid_webhook_url": {"path": "/v1/webhook_endpoints", "json": {"url": "ftp://x", **ENDPOINT}},
    "forbidden_webhook_url": {"path": "/v1/webhook_endpoints", "json": {"url": "https://127.0.0.1/", **ENDPOINT}},
    "webhook_endpoint_not_found": {"method": "GET", "path": "/v1/webhook_endpoints/we_0"},
    "host_not_allowed": {"method": "GET", "path": "/v1/models", "headers": {"host": "evil.example"}},
    "proxied_without_keys": {"method": "GET", "path": "/v1/models", "headers": {"x-forwarded-for": "10.0.0.1"}},
    "origin_not_allowed": {"json": TEXT, "headers": {"origin": "https://evil.example"}},
}
WITH_KEYS: dict[str, dict[str, Any]] = {"invalid_api_key": {"json": TEXT, "headers": {"authorization": "Bearer wrong"}}}
AT_THE_NODE = (
    *("model_error", "adapter_not_found", "adapter_changed", "adapter_unusable", "output_too_large", "bad_wire_data"),
    *("too_costly", "no_summary", "output_rejected"),
)
BUSY = partial(BusyError, "later", retry_after_ms=1000)
OF_CLASSES: dict[Callable[..., PenstockError], tuple[str, ...]] = {
    RequestError: (
        *("too_many_jobs", "body_timeout", "body_incomplete", "malformed_form", "upload_dropped", "foreign_compaction"),
        *("previous_response_not_completed", "conversation_too_large", "not_a_background_response", "bad_id"),
        *("webhook_test_failed", "not_a_flow"),
    ),
    ForbiddenError: ("insufficient_scope", "class_not_allowed"),
    NotFoundError: (
        *("pool_not_found", "key_not_found", "file_not_found", "batch_not_found", "delivery_not_found", "no_results"),
        *("no_object", "result_expired", "request_expired", "rows_gone"),
    ),
    GoneError: ("offset_gone",),
    ConflictError: (
        *("job_running", "job_ended", "job_open", "channel_conflict", "idempotency_conflict", "file_in_use"),
        *("too_many_webhook_endpoints", "batch_ended", "batch_open"),
        *("too_many_schedules", "too_many_runs", "schedule_busy"),
    ),
    TooLargeError: ("too_large", "body_too_large", "body_too_complex", "file_too_large"),
    JobFailedError: ("node_lost", "revision_gone"),
    JobExpiredError: ("deadline_exceeded", "not_started_in_time"),
    UnavailableError: (
        *("no_node", "redis_away", "other_file_storage", "files_unavailable", "answer_memory_full", "no_parser"),
        *("body_memory_full", "no_seal_key", "gateway_stopped", "pool_paused"),
    ),
}
BUSY_CODES = (
    *("pool_busy", "deadline_unreachable", "rate_limit_exceeded", "memory_share_exceeded", "redis_full"),
    *("file_storage_full", "uploads_busy", "too_many_batches", "too_many_rows", "too_many_viewers", "too_many_feeds"),
)
OWN_CODES: tuple[type[PenstockError], ...] = (
    *(UnsupportedDurabilityError, UnsupportedKindError, DamagedRecordError, JobCancelledError, StreamDivergedError),
    *(ConfigError, ProtocolVersionError, InvariantError),
)
RAISED: dict[str, Callable[[], PenstockError]] = {
    **{code: partial(kind, "no", code=code) for kind, codes in OF_CLASSES.items() for code in codes},
    **{code: partial(BUSY, code=code) for code in BUSY_CODES},
    **{kind.code: partial(kind, "no") for kind in OWN_CODES},
    "not_on_disk": partial(NotOnDiskError, "no", job_id=JOB),
    "not_replicated": partial(NotReplicatedError, "no", job_id=JOB),
    "range_not_satisfiable": partial(RangeError, "no"),
}
OF_THE_PARSER = {
    "invalid_http": b"garbage\r\n\r\n",
    "head_too_large": b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
    "transfer_encoding_unsupported": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
}
OF_SOCKETS = ("stream_not_found", "id_in_use", "too_many_streams", "too_many_sockets", "slow_reader")
WITH_OWN_TEST = ("too_many_connections",)
WITHOUT_LINE = ("inbox_ended",)
"""Only an answer of /ready, and probes have no line."""


def table() -> dict[str, set[int]]:
    """The statuses of each code in HTTP's table."""
    section = (ROOT / "docs/HTTP.md").read_text().split("\n## Errors\n", 1)[1].split("\n## ", 1)[0]
    found: dict[str, set[int]] = {}
    for statuses, codes in re.findall(r"^\| (\d{3}(?:, \d{3})*) \| ([^|]*) \|", section, re.MULTILINE):
        for code in re.findall(r"`(\w+)`", codes):
            found.setdefault(code, set()).update(map(int, statuses.split(", ")))
    return found


def test_each_code_of_the_table_is_provoked_here() -> None:
    ways = (REQUESTS, WITH_KEYS, AT_THE_NODE, RAISED, OF_THE_PARSER, OF_SOCKETS, WITH_OWN_TEST, WITHOUT_LINE)
    assert set().union(*ways) == set(table())


def answered(client: httpx.Client, code: str, given: dict[str, Any]) -> httpx.Response:
    headers = {"X-Request-Id": code, **given.get("headers", {})}
    rest = {name: value for name, value in given.items() if name in ("json", "content")}
    return client.request(given.get("method", "POST"), given.get("path", "/v1/completions"), headers=headers, **rest)


def check(client: httpx.Client, lines: Lines, code: str, answer: httpx.Response, before: float) -> None:
    assert (answer.json()["error"]["code"], answer.status_code in table()[code]) == (code, True), answer.text
    line = lines.of(answer.headers["X-Request-Id"])
    assert (line["code"], line["status"]) == (code, answer.status_code)
    assert refusals(client, code) == before + 1


def refusals(client: httpx.Client, code: str) -> float:
    found = re.search(
        rf'^penstock_http_refusals_total{{code="{code}"}} (\S+)$', client.get("/metrics").text, re.MULTILINE
    )
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("code", REQUESTS)
def test_a_refused_request(http: httpx.Client, lines: Lines, code: str) -> None:
    before = refusals(http, code)
    check(http, lines, code, answered(http, code, REQUESTS[code]), before)


@pytest.mark.parametrize("code", WITH_KEYS)
def test_a_request_with_a_wrong_key(stack: Stack, http: httpx.Client, lines: Lines, code: str) -> None:
    with httpx.Client(base_url=stack.start_gateway(require_keys=True), timeout=60) as client:
        answer = answered(client, code, WITH_KEYS[code])
    assert (answer.status_code, answer.json()["error"]["code"], lines.of(code)["code"]) == (401, code, code)


@pytest.mark.parametrize("code", AT_THE_NODE)
def test_a_job_that_its_node_fails(
    http: httpx.Client, lines: Lines, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def fail(request: object) -> None:
        raise (TooCostlyError if code == "too_costly" else RequestError)("no", code=code)

    monkeypatch.setattr(engine, "add", fail)
    before = refusals(http, code)
    answer = answered(http, code, {"json": TEXT})
    check(http, lines, code, answer, before)
    assert lines.of(code)["job"].startswith("echo.")


def test_errors_of_the_queue_and_of_files(http: httpx.Client, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, because a client for each would cost more than its requests."""
    for code, make in RAISED.items():

        async def fail(*_: object, make: Callable[[], PenstockError] = make, **__: object) -> None:
            raise make()

        before = refusals(http, code)
        with monkeypatch.context() as patched:
            patched.setattr(AsyncClient, "listed", fail)
            answer = answered(http, code, {"method": "GET", "path": "/v1/jobs"})
        check(http, lines, code, answer, before)


@pytest.mark.parametrize("code", OF_THE_PARSER)
def test_an_answer_of_the_parser(url: str, http: httpx.Client, lines: Lines, code: str) -> None:
    before = refusals(http, code)
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(OF_THE_PARSER[code])
        head, _, body = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    headers = dict(one.split(": ", 1) for one in head.decode().splitlines()[1:])
    check(
        http,
        lines,
        code,
        httpx.Response(status, headers={"X-Request-Id": headers["x-request-id"]}, content=body),
        before,
    )
    requests = http.get("/metrics").text
    assert f'penstock_http_requests_total{{path="other",status="{status}"}}' in requests


def test_a_connection_beyond_the_limit(stack: Stack, engine: EchoEngine, lines: Lines) -> None:
    url = httpx.URL(stack.start_gateway(max_connections=1))
    with httpx.Client(base_url=url, timeout=60) as first:
        assert first.get("/health").status_code == 200
        with httpx.Client(base_url=url, timeout=60) as second:
            refused = second.get("/v1/models")
        check(first, lines, "too_many_connections", refused, 0)


@pytest.fixture
def socket_client(url: str, engine: EchoEngine) -> Iterator[SocketClient]:
    with socket_to(url) as client:
        yield client


def test_a_message_of_a_websocket_that_is_refused(
    socket_client: SocketClient, http: httpx.Client, lines: Lines, engine: EchoEngine
) -> None:
    engine.may_go_on.clear()
    before = {code: refusals(http, code) for code in ("stream_not_found", "id_in_use")}
    socket_client.send("cancel", "none")
    assert socket_client.end_of("none")[-1]["error"]["code"] == "stream_not_found"
    socket_client.submit("a", "abc")
    socket_client.submit("a", "abc")
    assert socket_client.until(is_end)[-1]["error"]["code"] == "id_in_use"
    for code, number in before.items():
        line = lines.where("socket error", code=code)
        assert (line["tenant"], line["path"]) == ("default", "/v1/stream")
        assert refusals(http, code) == number + 1


@pytest.mark.parametrize(
    ("limit", "code"), [("max_socket_streams", "too_many_streams"), ("max_sockets", "too_many_sockets")]
)
def test_a_websocket_at_a_limit(stack: Stack, engine: EchoEngine, lines: Lines, limit: str, code: str) -> None:
    engine.may_go_on.clear()
    url = stack.start_gateway(**{limit: 0 if limit == "max_sockets" else 1})
    with httpx.Client(base_url=url, timeout=60) as http:
        if limit == "max_sockets":
            with pytest.raises(Exception, match="429"), socket_to(url):
                pass
            line = lines.where("socket", code=code)
        else:
            with socket_to(url) as client:
                client.submit("a", "abc")
                client.submit("b", "abc")
                assert client.until(is_end)[-1]["error"]["code"] == code
            line = lines.where("socket error", code=code)
        assert (line["code"], line["tenant"]) == (code, "default")
        assert refusals(http, code) == 1


async def test_a_websocket_that_is_read_too_slowly(lines: Lines) -> None:
    """The answer of a stream stops, because its client reads nothing, and has no end."""
    sent: list[str] = []
    metrics, caller = GatewayMetrics(), ApiKey(key_id="k1", digest="", tenant="acme")

    async def send(message: Any) -> None:
        sent.append(message["text"])

    async def stops(scope: Any, receive: Any, send: Any) -> None:
        framing = framing_of(scope)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", framing.content_type.encode())],
            }
        )

    scope = {"app": stops, "asgi": {}, "headers": [], "client": None, "server": None, "state": {"caller": caller}}
    note = partial(log_socket_error, metrics, caller=caller, path="/v1/stream")
    await SocketStream("a", SocketChannel(send), cast(AsyncClient, None), scope, note).attach(
        Attach(type="attach", id="a", job=JOB)
    )
    assert json.loads(sent[-1])["error"]["code"] == "slow_reader"
    line = lines.where("socket error", code="slow_reader")
    assert (line["tenant"], line["key_id"]) == ("acme", "k1")
    assert metrics.registry.get_sample_value("penstock_http_refusals_total", {"code": "slow_reader"}) == 1
