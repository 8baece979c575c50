"""Answers of a gateway that has a keeper go on when it is killed or restarted, for clients that know nothing of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from fakes.waiting import wait_until
from faults.gateway_kills import KeptGateway, num_jobs_of, run, undisturbed
from faults.tools.answers import CASES, Answer, Case, Reader, same

from tests.gateway.conftest import MODEL, EchoEngine, Stack

HELD_AFTER = 30
"""Tokens after which the answers wait for the end of their gateway."""


class Held:
    """A node whose answers wait, and a gateway with a keeper."""

    def __init__(self, redis_url: str) -> None:
        self.engine, self._stack = EchoEngine(), Stack(redis_url)
        self._stack.start_node(self.engine, model=MODEL, pool="echo")
        # A busy machine may restart a gateway later than a body may take by default. It would refuse the body first.
        self.gateway = KeptGateway(redis_url, BODY_TIMEOUT_S="300")
        self.expected = undisturbed(self.gateway)
        self.engine.waits_after = HELD_AFTER

    def close(self) -> None:
        self.gateway.close()
        self._stack.close()


@pytest.fixture(scope="module")
def held(redis_url_of_file: str) -> Iterator[Held]:
    with closing(Held(redis_url_of_file)) as made:
        yield made


def asking(reader: Reader, case: Case, found: dict[str, Answer | Exception]) -> threading.Thread:
    """Start to read an answer."""

    def ask() -> None:
        try:
            found[case.name] = reader.ask(case, closes=False)
        except Exception as error:
            found[case.name] = error

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.parametrize("ends_by", ["kill", "reload"])
def test_open_answers_go_on_at_the_next_gateway_byte_for_byte(held: Held, ends_by: str) -> None:
    gateway, engine = held.gateway, held.engine
    engine.may_go_on.clear()
    before = num_jobs_of(gateway.url)
    readers = [Reader(gateway.port, at_once=1 if number % 3 else 1 << 16) for number in range(len(CASES))]
    found: dict[str, Answer | Exception] = {}
    threads = [asking(reader, case, found) for reader, case in zip(readers, CASES, strict=True)]
    streams = [reader for reader, case in zip(readers, CASES, strict=True) if case.body.get("stream")]
    wait_until(
        lambda: all(len(reader.answer.body) > 200 for reader in streams) and num_jobs_of(gateway.url) >= before + 12,
        what=lambda: [(reader.answer, found) for reader in readers],
    )
    with socket.create_connection(("127.0.0.1", gateway.port)) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        # Connections are accepted in order, so the gateway has accepted this one when it answers the next.
        num_jobs_of(gateway.url)
        if ends_by == "kill":
            gateway.kill()
        else:
            gateway.reload()
        half.settimeout(200)
        # One that is killed cannot answer what has not arrived; one that is restarted can.
        assert half.recv(12) == (b"" if ends_by == "kill" else b"HTTP/1.1 503")
    gateway.wait_until_it_serves_again()
    engine.may_go_on.set()
    for thread in threads:
        thread.join(60)
    for case in CASES:
        answer = found[case.name]
        assert isinstance(answer, Answer), (case.name, answer)
        assert same(case, answer.body, held.expected[case.name]), case.name
    # The connections serve further requests.
    assert same(CASES[0], readers[1].ask(CASES[0], closes=True).body, held.expected[CASES[0].name])
    assert num_jobs_of(gateway.url) - before == sum(case.num_jobs for case in CASES) + 1
    for reader in readers:
        reader.close()
    text = httpx.get(f"{gateway.url}/metrics", timeout=60).text
    taken = dict(re.findall(r'penstock_http_takeovers_total\{outcome="(\w+)"\} (\S+)', text))
    assert taken == {"continued": str(float(len(CASES)))}
    assert "penstock_http_kept_connections" in text
    ids = [
        re.search(rb"(?i)x-request-id: (\S+)", answer.head) for answer in found.values() if isinstance(answer, Answer)
    ]
    log = "\n".join(gateway.log)
    assert [log.count(found_id[1].decode()) for found_id in ids if found_id] == [1] * len(CASES)
    assert "Traceback" not in log and '"level": "ERROR"' not in log


def test_a_gateway_whose_holder_is_killed_serves_on_and_says_so(held: Held) -> None:
    gateway = held.gateway
    held.engine.may_go_on.set()
    _, process = gateway.pids()
    children = [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    (holder,) = (pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "gateway-holder\n")
    os.kill(holder, signal.SIGKILL)
    wait_until(lambda: gateway.log, lambda log: any("the holder of the connections has ended" in line for line in log))
    assert not Path(f"/proc/{holder}").exists()
    with closing(Reader(gateway.port, at_once=1 << 16)) as reader:
        assert same(CASES[0], reader.ask(CASES[0], closes=False).body, held.expected[CASES[0].name])
    text = httpx.get(f"{gateway.url}/metrics", timeout=60).text
    assert 'penstock_http_unkept_answers_total{reason="no_holder"} 1.0' in text
    # The next gateway has a holder of its own.
    gateway.kill()
    gateway.wait_until_it_serves_again()
    with closing(Reader(gateway.port, at_once=1 << 16)) as reader:
        assert same(CASES[0], reader.ask(CASES[0], closes=False).body, held.expected[CASES[0].name])
    assert "no_holder" not in httpx.get(f"{gateway.url}/metrics", timeout=60).text


@pytest.mark.slow
def test_random_kills_cut_no_answer(tmp_path: Path) -> None:
    found = run(kills=10, each=2, seed=7)
    assert not found["violations"] and found["jobs"] == found["requests_jobs"] and found["answers"] > 20


@pytest.mark.slow
def test_upgrades_there_and_back_cut_no_answer() -> None:
    found = run(kills=4, each=1, seed=3, upgrades=True)
    assert not found["violations"] and found["jobs"] == found["requests_jobs"]
    assert found["switched_to"] == found["served_again"] and len(set(found["switched_to"])) == 2
