"""The gateway as a process, and its endpoints for orchestrators."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import redis as sync_redis
from fakes.command import run_command
from fakes.processes.python_process import PythonProcess, run_python
from fakes.waiting import wait_until
from faults.tools.redis_process import RedisProcess

from penstock.contract.errors import ConfigError
from penstock.contract.tenant import UNLIMITED
from penstock.gateway.errors import READ_TIMEOUT_S
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.tenants.key_store import KeyStore
from penstock.runtime.embedded_redis import EmbeddedRedis

MODEL = "acme/echo"


@contextmanager
def gateway_process(redis_url: str, *, program: str = "", **variables: str) -> Iterator[tuple[PythonProcess, str]]:
    settings = {"PENSTOCK_GATEWAY_PORT": "0", "PENSTOCK_GATEWAY_PROGRESS": "json", "PENSTOCK_REDIS_URL": redis_url}
    words = ("-c", program) if program else ("-m", "penstock", "gateway")
    process = PythonProcess(*words, env={**os.environ, **settings, **variables})
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        ready = json.loads(line)
        assert ready["event"] == "ready"
        yield process, ready["url"]
    finally:
        process.kill()
        process.communicate()


def test_gateway_reports_its_address_and_logs_no_prompts(redis_url, engine):
    with gateway_process(redis_url) as (process, url):
        body = {"model": MODEL, "prompt": "s3cret"}
        assert httpx.post(f"{url}/v1/completions?q=s3cret", json=body, timeout=60).status_code == 200
        assert (
            httpx.post(f"{url}/v1/completions", json={**body, "prompt": {"s3cret": 1}}, timeout=60).status_code == 400
        )
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=60)
    lines = [json.loads(line) for line in log.splitlines() if '"request"' in line]
    requests = sorted(lines, key=lambda line: line["status"])  # A line may come after the next request's.
    assert [(r["method"], r["path"], r["status"]) for r in requests] == [
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 400),
    ]
    assert requests[0]["job"].startswith("echo.") and "job" not in requests[1]
    assert "color_message" not in log
    assert "s3cret" not in log
    assert out == ""


def test_sigterm_lets_an_open_answer_end(redis_url, engine):
    engine.step_s = 0.02
    with gateway_process(redis_url) as (process, url):
        body = {"model": MODEL, "prompt": "a" * 50, "max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert process.wait(timeout=60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=60)


def test_sigterm_ends_an_open_stream_of_completions_at_once(redis_url, engine):
    with (
        gateway_process(redis_url, PENSTOCK_GATEWAY_DRAIN_S="300") as (process, url),
        httpx.stream("GET", f"{url}/v1/jobs/events", timeout=60) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("id: ")
        process.send_signal(signal.SIGTERM)
        assert not [line for line in lines if "error" in line]
        assert process.wait(timeout=60) == 0, "it does not wait for the end of the drain"


def test_a_stop_past_its_drain_ends_answers_with_an_error_and_logs_no_traceback(redis_url, engine):
    engine.step_s = 0.2
    answers = {}
    with gateway_process(redis_url, PENSTOCK_GATEWAY_DRAIN_S="1") as (process, url), ExitStack() as stack:
        callers = {}
        for kind in ("stream", "whole", "half a body"):
            body = json.dumps(
                {"model": MODEL, "prompt": "a" * 250, "max_tokens": 250, "stream": kind == "stream"}
            ).encode()
            head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
            sent = "\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode()
            callers[kind] = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            callers[kind].sendall(sent + (body[:10] if kind == "half a body" else body))
        answers["stream"] = callers["stream"].recv(100)
        time.sleep(0.3)
        stopped_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert 1 <= time.monotonic() - stopped_s < 40  # The stream would last for fifty.
        for kind, caller in callers.items():
            answers[kind] = answers.get(kind, b"") + b"".join(iter(lambda c=caller: c.recv(65536), b""))
    lines = [json.loads(line) for line in log.splitlines()]
    assert process.returncode == 0
    assert all(b'"code":"gateway_stopped"' in answer for answer in answers.values()), answers
    assert answers["stream"].startswith(b"HTTP/1.1 200") and answers["stream"].endswith(b"}}\n\n\r\n0\r\n\r\n")
    for kind in ("whole", "half a body"):
        assert answers[kind].startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 2\r\n" in answers[kind]
    assert "Traceback" not in log and not [line for line in lines if line["level"] == "ERROR"]
    (cut,) = [line for line in lines if line["message"] == "answers were cut off at the end of the drain"]
    assert (cut["level"], cut["num_answers"]) == ("WARNING", 3)


def test_streams_of_a_stopped_gateway_wait_longer_for_their_callers_than_those_that_callers_left(redis_url, engine):
    """The pool's grace time after a reader left is 0.5 s."""
    engine.step_s = 0.05

    async def status(job_id):
        redis = connect(redis_url)
        try:
            return await ProducerBroker(redis).status(job_id, "default")
        finally:
            await redis.aclose()

    with gateway_process(redis_url, PENSTOCK_GATEWAY_DRAIN_S="0") as (process, url):
        body = {"model": MODEL, "prompt": "a" * 250, "max_tokens": 250, "stream": True}
        asked = {"json": body, "headers": {"X-Penstock-Event-Ids": "true"}, "timeout": 60}
        with httpx.stream("POST", f"{url}/v1/completions", **asked) as response:
            lines = response.iter_lines()
            while not next(lines).startswith("data: "):
                pass
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
            job_id = response.headers["x-penstock-job"]
    chunks = asyncio.run(status(job_id)).num_chunks
    time.sleep(1.5)
    now = asyncio.run(status(job_id))
    assert (now.state, now.num_chunks > chunks) == ("running", True)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PENSTOCK_GATEWAY_PORTT": "1"}, "PENSTOCK_GATEWAY_PORTT"),
        ({"PENSTOCK_GATEWAY_PORT": "no"}, "PENSTOCK_GATEWAY_PORT"),
        ({"PENSTOCK_GATEWAY_REDIS_URL": "redis://127.0.0.1:1"}, "PENSTOCK_GATEWAY_REDIS_URL"),
        ({"PENSTOCK_REDIS_URL": ""}, "or PENSTOCK_REDIS_URL"),
    ],
)
def test_wrong_settings_are_one_line(variables, said):
    done = run_command("gateway", **{"PENSTOCK_REDIS_URL": "redis://127.0.0.1:1", **variables})
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_unreachable_redis_at_the_start_is_one_line():
    process = run_python("-m", "penstock", "gateway", "--redis-url", "redis://127.0.0.1:1")
    assert process.returncode == 75
    assert "no Redis answers at redis://127.0.0.1:1" in process.stderr
    assert process.stderr.count("\n") == 1


def test_port_in_use_is_one_line_before_anything_else(redis_url):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = run_python("-m", "penstock", "gateway", "--redis-url", redis_url, "--port", str(port))
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert json.loads(line)["reason"].startswith(f"port {port} on 127.0.0.1 is in use; choose another with --port")


def test_health_and_ready(stack, http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    for path in ("/health", "/ready"):
        looked = http.head(path)
        assert (looked.status_code, looked.content) == (200, b"")


def test_health_shows_each_node_and_its_unhealthy_parts(stack, http):
    pools = http.get("/health/nodes").json()
    (node,) = pools["echo"]
    # A machine that is held up makes these two, and nothing else.
    assert node["kv_blocks_total"] > 0 and node["troubles"].keys() <= {"loop", "clock"}


def test_redis_going_away_is_seen_by_ready_and_not_by_health():
    with EmbeddedRedis() as server, gateway_process(server.url) as (_, url):
        server.stop()
        assert httpx.get(f"{url}/ready", timeout=10).status_code == 503
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200


def test_not_ready_without_a_node():
    with EmbeddedRedis() as empty, gateway_process(empty.url) as (_, url):
        response = httpx.get(f"{url}/ready", timeout=60)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        body = {"model": MODEL, "prompt": "a"}
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")


def test_cors_allows_only_named_origins(stack, shared_engine, http):
    preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in http.options("/v1/models", headers=preflight).headers
    url = stack.start_gateway(cors_origins=("https://page.example",))
    allowed = httpx.options(f"{url}/v1/models", headers=preflight, timeout=60)
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"


PAGE = "https://page.example"


def test_cors_never_covers_the_paths_of_operators_and_never_allows_credentials(stack, shared_engine):
    url = stack.start_gateway(cors_origins=(PAGE,))
    preflight = {"origin": PAGE, "access-control-request-method": "GET", "access-control-request-headers": "x"}
    for path in ("/dashboard?one=1", "/metrics", "/health/nodes", "/v1/usage"):
        answers = [httpx.options(f"{url}{path}", headers=preflight, timeout=60)]
        if not path.startswith("/dashboard"):
            answers.append(httpx.get(f"{url}{path}", headers={"origin": PAGE}, timeout=60))
            assert answers[-1].status_code == 200
        for answer in answers:
            assert not [name for name in answer.headers if name.startswith("access-control")], path
    for answer in (
        httpx.options(f"{url}/v1/models", headers=preflight, timeout=60),
        httpx.get(f"{url}/v1/models", headers={"origin": PAGE, "cookie": "a=b"}, timeout=60),
    ):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origin", [f"{PAGE}.evil", "http://page.example", f"{PAGE}:444", "null", "*"])
def test_cors_compares_whole_origins(stack, shared_engine, origin):
    url = stack.start_gateway(cors_origins=(PAGE,))
    for answer in (
        httpx.get(f"{url}/v1/models", headers={"origin": origin}, timeout=60),
        httpx.options(
            f"{url}/v1/models", headers={"origin": origin, "access-control-request-method": "POST"}, timeout=60
        ),
    ):
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["*", "null"])
def test_an_origin_of_any_page_needs_keys(stack, shared_engine, origin):
    for settings in ({}, {"allow_anonymous": True}):
        with pytest.raises(ConfigError, match="--require-keys") as caught:
            stack.start_gateway(cors_origins=(origin,), **settings)
        assert caught.value.param == "cors_origins"
    url = stack.start_gateway(cors_origins=(origin,), require_keys=True)
    assert (
        httpx.get(f"{url}/v1/models", headers={"origin": "null"}, timeout=60).headers["access-control-allow-origin"]
        == origin
    )


def test_a_gateway_with_keys_may_allow_any_page_and_requires_a_key_from_its_start() -> None:
    async def key_of(redis_url: str) -> str:
        async with connect(redis_url) as redis:
            return (await KeyStore(redis).add("acme", ["infer"], UNLIMITED))[0]

    any_page = {"PENSTOCK_GATEWAY_CORS_ORIGINS": '["*"]'}
    with EmbeddedRedis() as server:
        with pytest.raises(AssertionError, match="penstock keys add"), gateway_process(server.url, **any_page):
            pass
        asyncio.run(key_of(server.url))
        anonymous = {"PENSTOCK_GATEWAY_ALLOW_ANONYMOUS": "true"}
        for more in (anonymous, {**anonymous, "PENSTOCK_GATEWAY_REQUIRE_KEYS": "true"}):
            with (
                pytest.raises(AssertionError, match="needs no API key"),
                gateway_process(server.url, **any_page, **more),
            ):
                pass
        with gateway_process(server.url, **any_page) as (_, url):
            with sync_redis.Redis.from_url(server.url) as queue:
                queue.delete(keys.API_KEYS)
            answer = httpx.get(f"{url}/v1/models", headers={"origin": PAGE}, timeout=60)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "*")
        key = asyncio.run(key_of(server.url))
        with gateway_process(server.url, **any_page) as (_, url):
            for headers, status in (({}, 401), ({"authorization": f"Bearer {key}"}, 200)):
                answer = httpx.get(f"{url}/v1/models", headers={"origin": PAGE, **headers}, timeout=60)
                assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, "*")


@pytest.mark.parametrize("origin", ["https://page.example/", "page.example", "https://*.example", "https://a b", ""])
def test_what_is_no_origin_is_refused_at_the_start(stack, shared_engine, origin):
    with pytest.raises(ConfigError, match="is not an origin"):
        stack.start_gateway(cors_origins=(origin,))


def test_reads_are_refused_within_seconds_while_redis_is_away() -> None:
    with (
        EmbeddedRedis() as server,
        gateway_process(server.url) as (_, url),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        job_id = "echo.00000000-0000-7000-8000-000000000000"
        assert http.get("/v1/models").status_code == 200
        server.stop()
        wait_until(lambda: http.get("/v1/models", timeout=60).status_code != 200)  # from the cached copy
        paths = ("/v1/models", "/v1/models/nope", "/v1/jobs", f"/v1/jobs/{job_id}", "/v1/usage", "/health/nodes")
        with ThreadPoolExecutor(len(paths)) as pool:
            for path, answer in zip(paths, pool.map(partial(http.get, timeout=60), paths), strict=True):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_away"), path
                assert answer.elapsed.total_seconds() < READ_TIMEOUT_S + 10, path  # other calls wait for 30 s


def test_a_read_is_not_refused_because_the_gateway_itself_did_not_run(tmp_path: Path) -> None:
    """The answer of Redis came meanwhile. A machine with too much work looks the same, in shorter pauses."""
    server = RedisProcess(tmp_path).start()
    job_id = "echo.00000000-0000-7000-8000-000000000000"
    paths = ("/v1/jobs", f"/v1/jobs/{job_id}", "/v1/usage", "/v1/schedules", "/v1/batches", "/v1/batches/batch_0")
    try:
        with (
            gateway_process(server.url) as (gateway, url),
            httpx.Client(base_url=url, timeout=60) as http,
            ThreadPoolExecutor(len(paths)) as pool,
        ):
            wanted = {path: http.get(path).status_code for path in paths}
            assert set(wanted.values()) == {200, 404}
            server.pause()
            asked = {path: pool.submit(http.get, path) for path in paths}
            time.sleep(READ_TIMEOUT_S / 4)  # The requests reach Redis. Were they later, no limit would be at stake.
            gateway.send_signal(signal.SIGSTOP)
            server.resume()
            time.sleep(READ_TIMEOUT_S + 1)
            gateway.send_signal(signal.SIGCONT)
            assert {path: answer.result().status_code for path, answer in asked.items()} == wanted
    finally:
        server.kill()


def test_connections_beyond_the_limit_are_answered_503_and_closed(redis_url: str) -> None:
    with gateway_process(redis_url, PENSTOCK_GATEWAY_MAX_CONNECTIONS="3") as (_, url), ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        first = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(3)]
        for connection in first:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        with socket.create_connection(address, timeout=60) as refused:
            answer = b"".join(iter(lambda: refused.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in answer
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "too_many_connections" and "max_connections" in error["message"]
        first[0].close()
        wait_until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 200, but=httpx.TransportError)


SOON_FREE = """
from functools import partial
from penstock.cli.main import app as command
from penstock.gateway import app

app.DescriptorWatch = partial(app.DescriptorWatch, look_s=0.2, recovered_after_s=1.0)
command(["gateway"])
"""


def test_a_gateway_without_free_file_descriptors_says_so_once_and_recovers(redis_url: str) -> None:
    short, free = '"too few file descriptors are free"', '"file descriptors are free again"'
    lasting = httpx.Limits(keepalive_expiry=None)
    with (
        gateway_process(redis_url, program=SOON_FREE) as (process, url),
        httpx.Client(base_url=url, timeout=60, limits=lasting) as kept,
    ):
        address, log = ("127.0.0.1", int(url.rpartition(":")[2])), []
        assert kept.get("/v1/models").status_code == 200
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        num_open = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open + 20, limits[1]))

        def wait_for(said: str) -> dict[str, str]:
            while said not in (line := process.stderr.readline()):
                assert line, "the gateway has ended"
            log.append(said)
            record: dict[str, str] = json.loads(line)
            return record

        for _ in range(2):
            with ExitStack() as stack:
                for _ in range(100):
                    stack.enter_context(socket.create_connection(address, timeout=60))
                reason = wait_for(short)["reason"]
                assert f"may have {num_open + 20} open files" in reason and "LimitNOFILE=" in reason
                assert kept.get("/health").status_code == 200
            wait_for(free)
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200

        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        with sync_redis.Redis.from_url(redis_url) as redis:
            redis.client_kill_filter(_type="normal", skipme=True)
        refused = kept.get("/v1/jobs").json()["error"]
        assert refused["code"] == "redis_away"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: kept.get("/v1/jobs").status_code == 200)
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert log == 2 * [short, free] and rest.count(short) <= 1


STANDING = """
import signal, time

def standing(*_):
    time.sleep(600)

signal.signal(signal.SIGUSR1, standing)
from penstock.cli.main import app
app(["gateway"])
"""
STALL_S = 0.5


@contextmanager
def guarded_gateway(redis_url: str) -> Iterator[tuple[PythonProcess, str]]:
    """A gateway that may stand still for STALL_S. SIGUSR1 makes its loop do so."""
    settings = {"PENSTOCK_GATEWAY_PORT": "0", "PENSTOCK_GATEWAY_PROGRESS": "json", "PENSTOCK_REDIS_URL": redis_url}
    settings["PENSTOCK_GATEWAY_LOOP_STALL_S"] = str(STALL_S)
    process = PythonProcess("-c", STANDING, env={**os.environ, **settings}, new_group=True)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)["url"]
    finally:
        process.kill()
        process.communicate()


def watcher_of(process: PythonProcess) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (found,) = [pid for pid in children if b"stall_guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(found)


def test_a_gateway_whose_loop_stands_still_ends_with_a_stack_dump(redis_url: str) -> None:
    with guarded_gateway(redis_url) as (process, url):
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        process.send_signal(signal.SIGUSR1)
        _, log = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGABRT
    assert f"the event loop stands still for {STALL_S} s" in log and "in standing" in log


@pytest.mark.parametrize("stops_watcher", [False, True])
def test_a_gateway_that_is_stopped_and_continued_is_not_ended(redis_url: str, *, stops_watcher: bool) -> None:
    with guarded_gateway(redis_url) as (process, url):
        watcher = watcher_of(process)
        for _ in range(3):
            os.killpg(process.pid, signal.SIGSTOP)
            if stops_watcher:
                os.kill(watcher, signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3 * STALL_S)
            if stops_watcher:
                os.kill(watcher, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGCONT)
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert watcher_of(process) == watcher
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0 and "stands still" not in log
