"""Request bytes that HTTP clients do not produce: unusual heads, and bytes after a body."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from fakes.waiting import wait_until

from penstock.gateway.app import make_server
from penstock.gateway.http import protocol
from penstock.gateway.settings import GatewaySettings

BODY = json.dumps({"model": "acme/echo", "prompt": "hi"}).encode()
LINE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


@pytest.fixture
def connection(url, engine) -> Iterator[socket.socket]:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        yield connection


def read_answers(connection: socket.socket, num_texts: int) -> bytes:
    """Read until this many answers have arrived, or one with an error."""
    answer = b""
    while answer.count(b'"text":"hi"') < num_texts and b'"error"' not in answer:
        part = connection.recv(1 << 16)
        assert part, answer
        answer += part
    return answer


def answer_to_endless(connection: socket.socket, line: bytes) -> bytes:
    """Return the answer while the same bytes are sent repeatedly."""
    num_sent, answer = 0, b""
    connection.settimeout(0.01)
    while not answer:
        assert num_sent < 4 << 20, "any size is taken"
        with contextlib.suppress(TimeoutError):
            connection.sendall(line)
            num_sent += len(line)
            answer = connection.recv(4096) if num_sent > 64 << 10 else b""
    return answer


UPGRADES = {
    # As Java's HttpClient begins a connection without TLS, whatever it sends.
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n",
    "two lines": b"Upgrade: h2c\r\nConnection: Upgrade\r\nConnection: HTTP2-Settings\r\n",
    "websocket": b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize(("framing", "body"), [(LENGTH, BODY), (CHUNKED, CHUNK + b"0\r\n\r\n")], ids=["all", "chunks"])
@pytest.mark.parametrize("cut", [0, 1, 20, len(LINE) + 30, -20, -1])
def test_upgrade_offer_is_ignored(connection, upgrade, framing, body, cut):
    request = LINE + upgrade + framing + b"\r\n" + body
    for part in (request[:cut], request[cut:]):
        connection.sendall(part)
    connection.sendall(LINE + LENGTH + b"\r\n" + BODY)
    assert read_answers(connection, 2).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("line", [b"x-%d: " + b"y" * 1000 + b"\r\n", b"y" * 1000])
def test_endless_request_head_is_refused(connection, line):
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: ")
    answer = answer_to_endless(connection, line)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


@pytest.mark.parametrize(
    ("size", "is_refused"), [(protocol.MAX_HEAD_BYTES - 500, False), (protocol.MAX_HEAD_BYTES, True)]
)
@pytest.mark.parametrize("upgrade", [b"", UPGRADES["h2c"]], ids=["plain", "upgrade"])
def test_a_large_head_in_a_single_read_is_measured_too(connection, size, is_refused, upgrade):
    time.sleep(0.05)
    connection.sendall(LINE + upgrade + LENGTH + b"X-Long: " + b"h" * size + b"\r\n\r\n" + BODY)
    answer = read_answers(connection, 1)
    assert (b"431" in answer and b"head_too_large" in answer) == is_refused


@pytest.mark.parametrize(
    ("begin", "line"),
    [(b"0\r\n", b"x: " + b"y" * 1000 + b"\r\n"), (b"0\r\nx: ", b"y" * 1000), (b"1;", b"y" * 1000)],
    ids=["trailers", "one trailer", "extension"],
)
def test_chunk_headers_and_trailers_are_bounded_as_the_head_is(connection, begin, line):
    connection.sendall(LINE + CHUNKED + b"\r\n" + CHUNK + begin)
    assert answer_to_endless(connection, line).startswith(b"HTTP/1.1 431 ")


def test_short_trailers_are_ignored(connection):
    connection.sendall(LINE + CHUNKED + b"\r\n" + CHUNK + b"0\r\nx-sum: 5\r\n\r\n")
    assert b"HTTP/1.1 200 OK" in read_answers(connection, 1)


GOOD = LINE + LENGTH + b"\r\n" + BODY
UNKNOWN = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "on_and_on"),
    [(b"", b""), (LINE, b""), (LINE, b"x: y\r\n"), (GOOD, b"\r\n"), (UNKNOWN, b"x")],
    ids=["nothing", "half a head", "an endless head", "empty lines", "a refused body"],
)
def test_connection_without_a_whole_head_in_time_is_closed(url, engine, monkeypatch, begin, on_and_on):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(begin)
        connection.settimeout(0.02 if on_and_on else 20)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1 << 16):
                        return
                connection.sendall(on_and_on)
            pytest.fail("it is kept")


def test_timeout_of_heads_does_not_limit_answers(connection, engine, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)
    connection.sendall(GOOD)
    assert read_answers(connection, 1)
    engine.step_s = 0.1
    connection.sendall(GOOD[:30])
    connection.sendall(GOOD[30:])
    assert b"HTTP/1.1 200 OK" in read_answers(connection, 1)


def test_idle_connections_stay_open_longer_than_clients_keep_them():
    """The client should be first to close an idle connection: it cannot know that a server just did."""
    kept_by_nginx_s = 60
    assert make_server(GatewaySettings(redis_url="redis://nobody")).config.timeout_keep_alive > kept_by_nginx_s


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x02\x00\x01", b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_invalid_http_is_refused_in_openais_shape(connection, said):
    connection.sendall(said)
    answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")


@pytest.fixture
def no_tracebacks(caplog) -> Iterator[None]:
    """Assert that no request logs an exception."""
    yield
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def until_closed(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("garbage", [b"garbage", b"\x16\x03\x01", b"NONSENSE\r\n\r\n", b"x" * 100_000])
@pytest.mark.parametrize("queued", [b"", MODELS], ids=["one request", "a second request waits"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_s", [0.0, 0.05])
@pytest.mark.usefixtures("no_tracebacks")
def test_invalid_bytes_during_an_answer_end_the_connection_after_it(
    connection, engine, garbage, queued, stream, pause_s
):
    engine.step_s = 0.05
    body = json.dumps({"model": "acme/echo", "prompt": "hello", "stream": stream}).encode()
    connection.sendall(LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    time.sleep(pause_s)
    connection.sendall(queued + garbage)
    answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def test_bytes_that_follow_invalid_ones_do_not_reset_the_connection(connection, engine):
    engine.step_s = 0.2
    for part in (GOOD, MODELS + b"garbage", b"more of it"):
        connection.sendall(part)
        time.sleep(0.1)
    answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.count(b"HTTP/1.1 ") == 1 and answer.endswith(b"}")


@pytest.mark.usefixtures("no_tracebacks")
def test_invalid_bytes_after_an_answer_are_refused(connection):
    connection.sendall(GOOD)
    read_answers(connection, 1)
    connection.sendall(b"garbage")
    assert b"HTTP/1.1 400 " in until_closed(connection)


@pytest.mark.usefixtures("no_tracebacks")
def test_a_body_with_a_broken_chunk_is_refused(connection):
    connection.sendall(LINE + CHUNKED + b"\r\n" + CHUNK + b"no chunk\r\n")
    answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.usefixtures("no_tracebacks")
def test_client_that_disconnects_with_two_open_requests_causes_no_error(url, engine):
    address = urlsplit(url)
    engine.step_s = 0.05
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(GOOD + MODELS)
        time.sleep(0.03)
    wait_until(lambda: not engine.has_work())
    time.sleep(0.1)


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_header_of_70_kb_is_refused_on_a_used_connection_too(connection, num_before):
    for _ in range(num_before):
        connection.sendall(GOOD)
        read_answers(connection, 1)
    connection.sendall(LINE + LENGTH + b"X-Long: " + b"h" * 70_000 + b"\r\n\r\n" + BODY)
    assert until_closed(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_only_http_1_1_gets_chunks(connection, version):
    body = json.dumps({"model": "acme/echo", "prompt": "hello", "stream": True}).encode()
    line = LINE.replace(b"1.1", version) + b"Connection: close\r\n"
    connection.sendall(line + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    head, _, events = until_closed(connection).partition(b"\r\n\r\n")
    assert (b"transfer-encoding" in head) == (version == b"1.1")
    if version == b"1.0":
        assert b"connection: close" in head
        lines = [line for line in events.decode().split("\n") if line]
        assert {line.split(":")[0] for line in lines} <= {"id", "data"} and lines[-1] == "data: [DONE]"


def test_http_1_0_gets_a_whole_answer_with_its_length(connection):
    connection.sendall(LINE.replace(b"1.1", b"1.0") + LENGTH + b"\r\n" + BODY)
    head, _, answer = until_closed(connection).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(answer) in head and json.loads(answer)["choices"][0]["text"] == "hi"


def test_http_1_0_gets_a_long_answer_without_chunks(url, engine):
    with ask_for_much(url, stream=False, takes=1 << 16, version=b"1.0") as connection:
        head, _, answer = until_closed(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"content-length" not in head
    assert len(json.loads(answer)["choices"]) == 16


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/health/nodes", "/v1/usage"])
def test_head_answers_as_get_does_without_a_body(url, engine, path):
    got, head = httpx.get(url + path, timeout=60), httpx.head(url + path, timeout=60)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers.keys() == got.headers.keys()


def test_head_on_a_route_without_get_names_the_method_that_is_allowed(url, engine):
    answer = httpx.head(url + "/v1/completions", timeout=60)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (405, "POST", b"")


LARGE = {"messages": [{"role": "user", "content": "x" * 250}], "n": 16, "logprobs": True, "top_logprobs": 20}
"""Its answer is of more than the few MB that a system takes for a reader that does not read."""


def ask_for_much(url: str, *, stream: bool, takes: int = 4096, version: bytes = b"1.1") -> socket.socket:
    body = json.dumps({"model": "acme/echo", "stream": stream, **LARGE}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes)
    connection.settimeout(30)
    address = urlsplit(url)
    connection.connect((address.hostname, address.port))
    line = LINE.replace(b"/v1/", b"/v1/chat/").replace(b"1.1", version)
    protocol = line + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.sendall(protocol + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_reads_nothing_is_disconnected(stack, shared_engine, monkeypatch, stream):
    monkeypatch.setattr(protocol, "TAKE_TIMEOUT_S", 0.2)
    with ask_for_much(stack.start_gateway(send_timeout_s=0.2), stream=stream) as connection:
        ended = select.poll()
        ended.register(connection, 0)
        assert ended.poll(30_000), "it is kept"


def test_slow_reader_gets_the_whole_answer(url, engine, monkeypatch):
    monkeypatch.setattr(protocol, "TAKE_TIMEOUT_S", 1.0)
    answer = b""
    with ask_for_much(url, stream=False, takes=1 << 16) as connection:
        while part := connection.recv(1 << 16):
            answer += part
            time.sleep(0.01)
    sent, _, chunks = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in sent
    assert len(json.loads(b"".join(chunks.split(b"\r\n")[1::2]))["choices"]) == 16


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n", b"400"),
        (b"GET /health HTTP/1.0\r\nHost: a\r\nHost: b\r\n", b"400"),
        (b"GET /v1/stream HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n", b"200"),
        (b"GET /health HTTP/1.0\r\n", b"200"),
    ],
)
def test_host_header_comes_exactly_once(connection, head, status):
    connection.sendall(head + b"\r\n")
    answer = connection.recv(4096)
    assert answer.split(b" ")[1] == status
    assert status == b"200" or b"Host headers" in answer


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip,\tchunked", b"x-gzip, chunked", b"identity, chunked"])
def test_a_transfer_coding_that_is_not_decoded_is_refused(connection: socket.socket, coding: bytes) -> None:
    connection.sendall(LINE + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + CHUNK + b"0\r\n\r\n")
    answer = read_answers(connection, 1)
    assert answer.startswith(b"HTTP/1.1 501 ") and b"transfer_encoding_unsupported" in answer


def test_chunked_in_capitals_is_chunked(connection: socket.socket) -> None:
    connection.sendall(LINE + b"Transfer-Encoding: Chunked\r\n\r\n" + CHUNK + b"0\r\n\r\n")
    assert read_answers(connection, 1).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://evil.example/v1/models", b"localhost", b"403"),
        (b"http://localhost:1/v1/models", b"evil.example", b"200"),
        (b"HTTP://user@evil.example/v1/models", b"localhost", b"403"),
        (b"/v1/models", b"localhost", b"200"),
    ],
)
def test_the_host_of_an_absolute_target_counts(
    connection: socket.socket, target: bytes, host: bytes, status: bytes
) -> None:
    connection.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("path", [b"/v1/models", b"/", b"/web/main.js", b"/nowhere", b"/v1/files/file-0/content"])
def test_no_browser_takes_an_answer_for_another_kind_of_file(connection: socket.socket, path: bytes) -> None:
    connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n")
    head = connection.recv(1 << 16).partition(b"\r\n\r\n")[0].lower()
    assert head.count(b"x-content-type-options: nosniff") == 1
