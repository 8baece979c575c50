"""`python -m faults.gateway_kills`: gateways are killed at random moments while unmodified clients read their answers.

A keeper (`penstock gateway --keep-connections`) starts each gateway again. The answers are streams and whole ones of
all APIs, read by plain sockets, fast and byte by byte, by `curl`, and by the clients of OpenAI and Anthropic for Python
and for Node (where `node` and `npm` are installed). Each must
be complete and valid to the byte, and equal to that of an undisturbed gateway but for ids and times. Each request must
have made one job, and no descriptor may be left. The campaign prints what it measured and what was violated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from clients.catalog import Client
from clients.environments import install
from faults.tools.redis_process import RedisProcess

from tests.gateway.conftest import MODEL, EchoEngine, Stack

TEXT = "A keeper holds the connection while its gateway is away; the answer goes on where it was. " * 2
STEP_S = 0.02
PATIENCE_S = 120.0
KILLS = Client("kills", "openai and @anthropic-ai/sdk (Node)", "kills.mjs", "answers while gateways are killed")
NOTHING = 52
"""curl's status for a connection that was closed without a byte."""
_ID = re.compile(rb"(echo\.)?[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIME = re.compile(rb'"(created|created_at|completed_at)":\d+')
_WAITING = re.compile(rb": waiting[^\n]*\n\n?|event: ping\ndata: [^\n]*\n\n")


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request."""

    name: str
    path: str
    body: Mapping[str, Any]
    accept: str = ""
    num_jobs: int = 1


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], **fields}


CASES = (
    Case("chat", "/v1/chat/completions", _chat(stream=True, stream_options={"include_usage": True})),
    Case("chat as NDJSON", "/v1/chat/completions", _chat(stream=True), accept="application/x-ndjson"),
    Case("whole chat", "/v1/chat/completions", _chat()),
    Case(
        "completion",
        "/v1/completions",
        {"model": MODEL, "prompt": TEXT, "max_tokens": 150, "stream": True, "logprobs": 1},
    ),
    Case(
        "completions",
        "/v1/completions",
        {"model": MODEL, "prompt": [TEXT, TEXT[9:]], "max_tokens": 150, "stream": True},
        num_jobs=2,
    ),
    Case(
        "whole completions",
        "/v1/completions",
        {"model": MODEL, "prompt": [TEXT, TEXT[9:]], "max_tokens": 150, "n": 2},
        num_jobs=2,
    ),
    Case("message", "/v1/messages", _chat(stream=True, max_tokens=250)),
    Case("whole message", "/v1/messages", _chat(max_tokens=250)),
    Case("response", "/v1/responses", {"model": MODEL, "input": TEXT, "stream": True}),
    Case("whole response", "/v1/responses", {"model": MODEL, "input": TEXT, "store": False}),
)


def raw_request(case: Case, port: int, *, closes: bool) -> bytes:
    """Return the bytes of a request."""
    body = json.dumps(case.body).encode()
    lines = [f"POST {case.path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *([f"Accept: {case.accept}"] if case.accept else [])]
    lines += ["Connection: close"] if closes else []
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(slots=True)
class Answer:
    """What a client got."""

    head: bytes = b""
    body: bytes = b""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Silences of half a second and more: when they ended, and how long they were."""


class BrokenAnswerError(Exception):
    """An answer is not what HTTP allows."""


class Reader:
    """Reads one answer after another from one connection, and checks each byte of the framing."""

    def __init__(self, port: int, *, at_once: int, pause_s: float = 0.0) -> None:
        self._port, self._at_once, self._pause_s = port, at_once, pause_s
        self._connection = socket.socket()
        if at_once == 1:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self._connection.settimeout(PATIENCE_S)
        self._connection.connect(("127.0.0.1", port))
        self._buffer = b""
        self.answer = Answer()
        self._last_s = time.monotonic()

    @property
    def has_bytes(self) -> bool:
        """Whether a part of an answer has arrived."""
        return bool(self._buffer)

    def close(self) -> None:
        self._connection.close()

    def ask(self, case: Case, *, closes: bool) -> Answer:
        self.answer, self._last_s = Answer(), time.monotonic()
        self._connection.sendall(raw_request(case, self._port, closes=closes))
        self.answer.head = self._until(b"\r\n\r\n")
        head = self.answer.head.lower()
        if b"transfer-encoding: chunked" in head:
            while size := int(self._until(b"\r\n"), 16):
                self.answer.body += self._take(size)
                self._expect(b"\r\n")
            self._expect(b"\r\n")
        else:
            found = re.search(rb"content-length: (\d+)", head)
            if found is None:
                raise BrokenAnswerError(f"no length: {head!r}")
            self.answer.body = self._take(int(found[1]))
        if closes and (self._buffer or self._receive()):
            raise BrokenAnswerError(f"bytes behind the answer: {self._buffer[:100]!r}")
        return self.answer

    def _receive(self) -> bytes:
        part = self._connection.recv(self._at_once)
        now_s = time.monotonic()
        if now_s - self._last_s > 0.5:
            self.answer.gaps.append((now_s, now_s - self._last_s))
        self._last_s = now_s
        if self._pause_s:
            time.sleep(self._pause_s)
            self._last_s = time.monotonic()
        return part

    def _more(self) -> None:
        part = self._receive()
        if not part:
            raise BrokenAnswerError(
                f"ended after {len(self.answer.body)} bytes: {self.answer.body[-100:]!r} {self._buffer!r}"
            )
        self._buffer += part

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def _expect(self, mark: bytes) -> None:
        if (found := self._take(len(mark))) != mark:
            raise BrokenAnswerError(f"{found!r} instead of {mark!r}")


def comparable(body: bytes) -> Any:
    """Return an answer without what differs between two runs: ids, times, and where tokens were put into events."""
    for pattern, new in ((_ID, b"ID"), (_TIME, b'"\\1":0'), (_WAITING, b"")):
        body = pattern.sub(new, body)
    events = [*_events_of(body)]
    if not events:
        return json.loads(body)
    texts: dict[Any, str] = {}
    others: list[Any] = []
    numbers = [event.pop("sequence_number") for event in events if "sequence_number" in event]
    if numbers != [*range(len(numbers))]:
        raise BrokenAnswerError(f"sequence numbers {numbers}")
    for event in events:
        _split(event, texts, others)
    return texts, sorted(map(json.dumps, others))


def _events_of(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of server-sent events or lines. Every line must be one that a client can read."""
    if body.startswith(b'{"id"') and body.count(b"\n") < 2:
        return
    is_sse = b"data: " in body
    for line in body.splitlines():
        if line.startswith(b"data: [DONE]"):
            yield {"done": True}
        elif not is_sse or line.startswith(b"data: "):
            if line.strip():
                yield json.loads(line.removeprefix(b"data: "))
        elif line and not line.startswith((b"event: ", b"id: ")):
            raise BrokenAnswerError(f"a line that is no event: {line!r}")


def _split(event: dict[str, Any], texts: dict[Any, str], others: list[Any]) -> None:
    """Add the text of an event to those of its choice, and what else it has to the others."""
    rest = []
    for choice in event.get("choices", ()):
        text = choice.get("text", "") + choice.get("delta", {}).get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        for at, token in enumerate((choice.get("logprobs") or {}).get("tokens", ())):
            key = choice["index"], "tokens"
            texts[key] = texts.get(key, "") + f"{token} {choice['logprobs']['token_logprobs'][at]} "
        rest.append((choice["index"], choice["finish_reason"], "role" in choice.get("delta", {})))
    if "choices" in event:
        others += [part for part in rest if part[1:] != (None, False)]
        others += [event["usage"]] if event.get("usage") else []
    elif isinstance(event.get("delta"), str):
        texts["delta"] = texts.get("delta", "") + event["delta"]
    elif "text" in event.get("delta", {}):
        texts["delta"] = texts.get("delta", "") + event["delta"]["text"]
    else:
        others.append(event)


def same(case: Case, one: bytes, other: bytes) -> bool:
    """Return whether two answers are equal but for ids and times."""
    return bool(comparable(one) == comparable(other))


def started(*words: str, **how: Any) -> subprocess.Popen[str]:
    """Start an interpreter."""
    return subprocess.Popen([sys.executable, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


class KeptGateway:
    """`penstock gateway --keep-connections` as a process, and its gateway, which is killed."""

    def __init__(self, redis_url: str, *, start: Callable[..., Any] = started, **variables: str) -> None:
        """`start` starts a process by words of a command."""
        own = {"PORT": "0", "PROGRESS": "json", "KEEP_CONNECTIONS": "true", **variables}
        env = {f"PENSTOCK_GATEWAY_{name}": value for name, value in own.items()} | {"PENSTOCK_REDIS_URL": redis_url}
        # Without a terminal, SIGHUP restarts the gateway.
        self.process = start("-m", "penstock", "gateway", env={**os.environ, **env}, stdin=subprocess.DEVNULL)
        self.log: list[str] = []
        self._serves_again = threading.Semaphore(0)
        assert self.process.stdout is not None
        self._listener = threading.Thread(target=self._read_log, daemon=True)
        self._listener.start()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("\n".join(self.log))
        self.url = json.loads(line)["url"]
        self.port = int(self.url.rpartition(":")[2])

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if "serves again" in line:
                self._serves_again.release()

    def pids(self) -> tuple[int, int]:
        """Return the process ids of the guard and of the gateway."""
        children: dict[int, list[int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
        (guard,) = children[self.process.pid]
        (gateway,) = children[guard]
        return guard, gateway

    def kill(self, *, guard: bool = False) -> float:
        """Kill the gateway, or its guard, and return when that was."""
        killed_s = time.monotonic()
        os.kill(self.pids()[0 if guard else 1], signal.SIGKILL)
        return killed_s

    def reload(self) -> float:
        """Restart the gateway by SIGHUP, and return when that was."""
        asked_s = time.monotonic()
        self.process.send_signal(signal.SIGHUP)
        return asked_s

    def wait_until_it_serves_again(self) -> None:
        if not self._serves_again.acquire(timeout=PATIENCE_S):
            raise RuntimeError("\n".join(self.log[-20:]))

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)
        self._listener.join()
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()


class Campaign:
    """Callers who ask without end, and what became of their answers."""

    def __init__(self, gateway: KeptGateway, expected: Mapping[str, bytes]) -> None:
        self.gateway = gateway
        self._expected = expected
        self.stops = threading.Event()
        self.counts = Counter[str]()
        self.num_jobs = self.num_closed = 0
        self.violations: list[str] = []
        self.gaps: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def _note(self, case: Case, reader: str, body: bytes, gaps: list[tuple[float, float]]) -> None:
        with self._lock:
            self.counts[f"{case.name} / {reader}"] += 1
            self.num_jobs += case.num_jobs
            self.gaps += gaps
            try:
                is_same = same(case, body, self._expected[case.name])
            except (BrokenAnswerError, ValueError) as error:
                self.violations.append(f"{case.name} / {reader}: {error!r}")
                return
            if not is_same:
                expected = comparable(self._expected[case.name])
                self.violations.append(f"{case.name} / {reader}: {comparable(body)} instead of {expected}")

    def _fail(self, case: Case, reader: str, error: Exception, *, got_nothing: bool = False) -> None:
        """Note a failure. With `got_nothing`, the gateway died before the request had a record, and so a job."""
        with self._lock:
            if got_nothing:
                self.num_closed += 1
                return
            self.num_jobs += case.num_jobs
            self.violations.append(f"{case.name} / {reader}: {error!r}")

    def read_raw(self, kind: str, **how: Any) -> None:
        """Ask by plain sockets, each for several answers in turn."""
        while not self.stops.is_set():
            reader = Reader(self.gateway.port, **how)
            for number in range(3):
                case, closes = random.choice(CASES), number == 2
                try:
                    answer = reader.ask(case, closes=closes)
                    if not answer.head.startswith(b"HTTP/1.1 200"):
                        raise BrokenAnswerError(f"{answer.head!r} {answer.body[:300]!r}")
                    self._note(case, kind, answer.body, answer.gaps)
                except (BrokenAnswerError, OSError, ValueError) as error:
                    self._fail(case, kind, error, got_nothing=not reader.answer.head and not reader.has_bytes)
                    break
                if self.stops.is_set():
                    break
            reader.close()

    def read_by_curl(self) -> None:
        """Ask by curl."""
        while not self.stops.is_set():
            case = random.choice(CASES)
            url = f"{self.gateway.url}{case.path}"
            words = ["curl", "-sSN", "--fail", "-H", "Content-Type: application/json", "-d", json.dumps(case.body), url]
            ran = subprocess.run(
                [*words, *(["-H", f"Accept: {case.accept}"] if case.accept else [])], capture_output=True
            )
            if ran.returncode:
                error = BrokenAnswerError(ran.stderr.decode())
                self._fail(case, "curl", error, got_nothing=ran.returncode == NOTHING)
            else:
                self._note(case, "curl", ran.stdout, [])

    def read_by_openai(self) -> None:
        """Ask by OpenAI's client, which knows nothing of event ids, and must see no reason to ask again."""
        with openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", timeout=PATIENCE_S) as api:
            while not self.stops.is_set():
                case = CASES[random.choice((0, 2))]
                try:
                    if case.body.get("stream"):
                        chunks = [*api.chat.completions.create(**case.body)]
                        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                    else:
                        text = api.chat.completions.create(**case.body).choices[0].message.content or ""
                    self._note(case, "openai", self._expected[case.name] if text == TEXT else text.encode(), [])
                except Exception as error:
                    self._fail(case, "openai", error)

    def read_by_anthropic(self) -> None:
        """Ask by Anthropic's client."""
        with anthropic.Anthropic(base_url=self.gateway.url, api_key="none", timeout=PATIENCE_S) as api:
            while not self.stops.is_set():
                case = CASES[random.choice((6, 7))]
                try:
                    fields = {name: value for name, value in case.body.items() if name != "stream"}
                    if case.body.get("stream"):
                        with api.messages.stream(**fields) as stream:
                            text = "".join(stream.text_stream)
                    else:
                        text = api.messages.create(**fields).content[0].text  # type: ignore[union-attr]
                    self._note(case, "anthropic", self._expected[case.name] if text == TEXT else text.encode(), [])
                except Exception as error:
                    self._fail(case, "anthropic", error)

    def read_by_node(self, command: list[str], *, readers: int) -> None:
        """Ask by the clients of OpenAI and Anthropic for Node, in one process."""
        env = {
            **os.environ,
            "PENSTOCK_URL": self.gateway.url,
            "PENSTOCK_MODEL": MODEL,
            "PENSTOCK_TEXT": TEXT,
            "PENSTOCK_READERS": str(readers),
        }
        cases = {case.name: case for case in CASES}
        with subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            threading.Thread(target=lambda: (self.stops.wait(), process.stdin.close()), daemon=True).start()
            for line in process.stdout:
                told = json.loads(line)
                case = cases[told["case"]]
                if "error" in told:
                    self._fail(case, "Node", RuntimeError(told["error"]))
                else:
                    body = self._expected[case.name] if told["text"] == TEXT else told["text"].encode()
                    self._note(case, "Node", body, [(at_s, length_s) for at_s, length_s in told["gaps"]])

    def readers(self, *, each: int) -> Iterator[Callable[[], None]]:
        """Yield what runs in a thread each."""
        for _ in range(each):
            yield lambda: self.read_raw("fast", at_once=1 << 16)
            yield lambda: self.read_raw("by bytes", at_once=1)
            yield lambda: self.read_raw("slow", at_once=512, pause_s=0.02)
            yield self.read_by_openai
            yield self.read_by_anthropic
            if shutil.which("curl"):
                yield self.read_by_curl
        if shutil.which("npm"):
            yield partial(self.read_by_node, install(KILLS), readers=2 * each)


def undisturbed(gateway: KeptGateway) -> dict[str, bytes]:
    """Return the answer to each case."""
    found = {}
    for case in CASES:
        reader = Reader(gateway.port, at_once=1 << 16)
        answer = reader.ask(case, closes=True)
        if not answer.head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{case.name}: {answer.head!r} {answer.body!r}")
        found[case.name] = answer.body
        reader.close()
    return found


def num_jobs_of(url: str) -> int:
    """Return how many jobs the queue has, with their ends."""
    found, after = set[str](), ""
    while True:
        page = httpx.get(f"{url}/v1/jobs?limit=100{after}", timeout=60).json()
        found |= {job["id"] for job in page["data"]}
        if not page["has_more"]:
            return len(found)
        after = f"&after={page['next']}"


def run(kills: int, each: int, seed: int, *, fast: bool = False, reloads: bool = False) -> dict[str, Any]:
    """Run the campaign, and return what was measured and violated. `each`: readers of each kind.

    `reloads`: restart the gateways by SIGHUP instead of killing them. Otherwise each tenth end is such a restart.
    """
    random.seed(seed)
    folder = Path(tempfile.mkdtemp(prefix="penstock-kills-"))
    with RedisProcess(folder) as server:
        stack, engine = Stack(server.url), EchoEngine()
        stack.start_node(engine, model=MODEL, pool="echo")
        gateway = KeptGateway(server.url)
        try:
            campaign = Campaign(gateway, undisturbed(gateway))
            jobs_before = num_jobs_of(gateway.url)
            engine.step_s = STEP_S
            threads = [threading.Thread(target=one) for one in campaign.readers(each=each)]
            for thread in threads:
                thread.start()
            killed_s: list[float] = []
            for number in range(kills):
                time.sleep(random.uniform(0.5, 1.5 if fast else 4.0))
                is_planned = reloads or (kills > 5 and number % 10 == 9)
                killed_s.append(gateway.reload() if is_planned else gateway.kill(guard=number % 5 == 4))
                gateway.wait_until_it_serves_again()
            campaign.stops.set()
            for thread in threads:
                thread.join()
            time.sleep(1)
            jobs = num_jobs_of(gateway.url) - jobs_before
            metrics = httpx.get(f"{gateway.url}/metrics", timeout=60).text
            time.sleep(1)
            descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (gateway.process.pid, gateway.pids()[1])]
        finally:
            gateway.close()
            stack.close()
    shutil.rmtree(folder, ignore_errors=True)
    pauses = sorted(length for at_s, length in campaign.gaps if any(0 <= at_s - one < 30 for one in killed_s))
    unkept = re.findall(r'penstock_http_unkept_answers_total\{reason="(\w+)"\} (\S+)', metrics)
    return {
        "kills": kills,
        "answers": sum(campaign.counts.values()),
        "counts": dict(sorted(campaign.counts.items())),
        "jobs": jobs,
        "requests_jobs": campaign.num_jobs,
        "closed_without_a_byte_and_a_job": campaign.num_closed,
        "violations": campaign.violations,
        "pauses": len(pauses),
        "pause_p50_s": round(statistics.median(pauses), 2) if pauses else None,
        "pause_p99_s": round(pauses[int(0.99 * (len(pauses) - 1))], 2) if pauses else None,
        "descriptors_of_keeper_and_gateway": descriptors,
        "unkept": unkept,
        "log": gateway.log,
    }


def main() -> None:
    """Run the campaign as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--readers", type=int, default=4, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast", action="store_true", help="kill soon after each start")
    parser.add_argument("--reloads", action="store_true", help="restart by SIGHUP instead of killing")
    parser.add_argument("--log", type=Path, help="file for the gateways' log")
    given = parser.parse_args()
    found = run(given.kills, given.readers, given.seed, fast=given.fast, reloads=given.reloads)
    log = found.pop("log")
    if given.log:
        given.log.write_text("\n".join(log))
    print(json.dumps(found, indent=2))
    if found["violations"] or found["jobs"] != found["requests_jobs"]:
        sys.exit("violated")


if __name__ == "__main__":
    main()
