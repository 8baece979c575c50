"""Gateways with a keeper are killed at each point of an answer and of its takeover."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from fakes.waiting import wait_until
from faults.gateway_kills import STEP_S, KeptGateway, num_jobs_of, started
from faults.tools.answers import CASES, TEXT, Answer, BrokenAnswerError, Case, Reader, same

from penstock.gateway.kept.answer import MAX_TAKEOVERS
from tests.gateway.conftest import MODEL, EchoEngine, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SITE = Path(__file__).parents[1] / "fakes/processes/armed_site"
CHAT, WHOLE, MESSAGE, RESPONSE = CASES[0], CASES[2], CASES[6], CASES[8]
AT_EACH_POINT = (
    "before|count of a small part|3",
    "before|first byte of a takeover|1",
    "after|put|1",
    "within|count of a small part|2",
    "after|count of a small part|2",
    "after|event|2",
    "between|ring and commit|1",
)
LONG = Case(
    "long completion",
    "/v1/completions",
    {"model": MODEL, "prompt": TEXT, "max_tokens": 150, "n": 16, "logprobs": 1, "stream": True},
)


@contextmanager
def gateway_with(redis_url: str, tmp_path: Path, faults: str = "") -> Iterator[tuple[KeptGateway, EchoEngine]]:
    """A gateway whose processes have these faults, and its engine."""
    engine, stack = EchoEngine(), Stack(redis_url)
    stack.start_node(engine, model=MODEL, pool="echo")
    env = {"FAULTS_OF_GATEWAYS": faults, "FAULTS_COUNTED": str(tmp_path / "counted"), "PYTHONPATH": str(SITE)}

    def start(*words: str, **how: dict[str, str]) -> object:
        return started(*words, **how | {"env": how["env"] | (env if faults else {})})

    gateway = KeptGateway(redis_url, start=start)
    try:
        yield gateway, engine
    finally:
        gateway.close()
        stack.close()


def asked(gateway: KeptGateway, case: Case) -> bytes:
    """Return an answer, whatever becomes of the gateways."""
    reader = Reader(gateway.port, at_once=1 << 16)
    with closing(reader):
        return reader.ask(case, closes=True).body


def hold_back(engine: EchoEngine, counted: Path, ended: threading.Event, url: str) -> None:
    """Let the engine go on by a few tokens for each further gateway, so that none sees the end but the last one."""
    num_gateways = num_more = 0
    while not ended.wait(0.05):
        if counted.stat().st_size > num_gateways:
            num_gateways, num_more = counted.stat().st_size, 0
        engine.waits_after = 20 * num_gateways + num_more
        # Tokens that were made while no gateway ran come as one part. Those after its first answer come one by one.
        with suppress(httpx.HTTPError):
            httpx.get(f"{url}/health")
            num_more = min(num_more + 1, 10)
        if num_gateways > len(AT_EACH_POINT):
            engine.may_go_on.set()


def until_closed(reader: Reader) -> None:
    """Read an answer whose connection this process closes."""
    with suppress(OSError, BrokenAnswerError):
        reader.ask(CHAT, closes=True)


@pytest.mark.parametrize("case", [CHAT, WHOLE, MESSAGE, RESPONSE], ids=lambda case: case.name)
def test_an_answer_is_whole_though_its_gateways_are_killed_at_each_point(
    redis_url: str, tmp_path: Path, case: Case
) -> None:
    with gateway_with(redis_url, tmp_path) as (gateway, _):
        expected = asked(gateway, case)
    # A whole answer has one write, so fewer points.
    faults = AT_EACH_POINT if case.body.get("stream") else ("between|ring and commit|1", "after|put|1")
    counted = tmp_path / "counted"
    with gateway_with(redis_url, tmp_path, ";".join(faults)) as (gateway, engine):
        before = num_jobs_of(gateway.url)
        if case.body.get("stream"):
            engine.step_s = STEP_S  # Faster, a chunk has many tokens, and the answer fewer parts than there are points.
            engine.may_go_on.clear()
        ended = threading.Event()
        held = threading.Thread(target=hold_back, args=(engine, counted, ended, gateway.url))
        held.start()
        body = asked(gateway, case)
        ended.set()
        held.join()
        assert same(case, body, expected)
        assert counted.stat().st_size == len(faults) + 1
        assert num_jobs_of(gateway.url) == before + 1


def test_an_answer_that_kills_each_gateway_ends_with_an_error_event(redis_url: str, tmp_path: Path) -> None:
    with gateway_with(redis_url, tmp_path, "repeat;before|first byte of a takeover|1") as (gateway, engine):
        engine.waits_after = 30
        engine.may_go_on.clear()
        reader = Reader(gateway.port, at_once=1 << 16)
        found: list[Answer] = []
        thread = threading.Thread(target=lambda: found.append(reader.ask(CHAT, closes=True)))
        thread.start()
        wait_until(lambda: len(reader.answer.body) >= 200, within_s=120)
        gateway.kill()
        thread.join(300)
        assert b'"code":"gateway_stopped"' in found[0].body and found[0].body.endswith(b"\n\n")
        assert sum("it starts again" in line for line in gateway.log) == 1 + MAX_TAKEOVERS
        engine.may_go_on.set()
        engine.waits_after = 1 << 20
        assert b"[DONE]" in asked(gateway, CHAT)
        reader.close()


def test_an_answer_behind_a_full_socket_goes_on_when_its_client_reads(redis_url: str, tmp_path: Path) -> None:
    with gateway_with(redis_url, tmp_path) as (gateway, engine):
        engine.step_s = 0.01  # Faster, tokens come in large chunks, and so in few bytes.
        expected = asked(gateway, LONG)
        assert len(expected) > 250_000
        body = json.dumps(LONG.body).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", gateway.port))
            head = f"POST {LONG.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            for _ in range(2):
                time.sleep(2)  # The node writes thousands of tokens meanwhile, and nothing of them is read.
                gateway.kill()
                gateway.wait_until_it_serves_again()
            answer = b"".join(iter(partial(client.recv, 1 << 16), b""))
        answer = answer.partition(b"\r\n\r\n")[2]
        parts = b""
        while not answer.startswith(b"0\r\n"):
            size, _, answer = answer.partition(b"\r\n")
            parts, answer = parts + answer[: int(size, 16)], answer[int(size, 16) + 2 :]
        assert same(LONG, parts, expected)


def test_a_client_that_closes_while_no_gateway_runs_ends_its_job(redis_url: str, tmp_path: Path) -> None:
    with gateway_with(redis_url, tmp_path) as (gateway, engine):
        engine.waits_after = 30
        engine.may_go_on.clear()
        descriptors = len(os.listdir(f"/proc/{gateway.process.pid}/fd"))
        reader = Reader(gateway.port, at_once=1 << 16)
        threading.Thread(target=until_closed, args=(reader,), daemon=True).start()
        wait_until(lambda: len(reader.answer.body) >= 200, within_s=120)
        gateway.kill()
        reader._connection.shutdown(socket.SHUT_RDWR)
        reader.close()
        gateway.wait_until_it_serves_again()
        wait_until(lambda: httpx.get(f"{gateway.url}/v1/jobs", timeout=60).text, lambda jobs: "cancelled" in jobs)
        wait_until(lambda: len(os.listdir(f"/proc/{gateway.process.pid}/fd")) <= descriptors)
        engine.may_go_on.set()


def test_a_stream_goes_on_of_a_job_whose_output_is_refused_and_tried_again(redis_url: str, tmp_path: Path) -> None:
    with (
        gateway_with(redis_url, tmp_path) as (gateway, engine),
        httpx.Client(base_url=gateway.url, timeout=300) as http,
    ):
        engine.waits_after = 30
        engine.may_go_on.clear()
        tries = {"max_attempts": 2, "retry_backoff_s": 0, "check_output": {"regex": "[0-9]+"}}
        job_id = http.post("/v1/jobs", json={"prompt": TEXT, "params": {"max_tokens": 100}, **tries}).json()["id"]
        with http.stream("GET", f"/v1/jobs/{job_id}/stream") as answer:
            parts = answer.iter_bytes()
            body = b""
            while len(body) < 200:
                body += next(parts)
            gateway.kill()
            gateway.wait_until_it_serves_again()
            engine.may_go_on.set()
            body += b"".join(parts)
        chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
        assert [chunk["index"] for chunk in chunks] == [*range(len(chunks))]
        assert "".join(chunk.get("text", "") for chunk in chunks) == TEXT[:100]
        assert chunks[-1]["outcome"]["code"] == "output_rejected"
        status = http.get(f"/v1/jobs/{job_id}").json()
        assert (status["state"], status["retried_as"] != job_id) == ("failed", True)
        # The stream of the job that took its place is one of its own.
        again = http.get(f"/v1/jobs/{status['retried_as']}/stream").content
        assert b"output_rejected" in again
