"""The processes of a measurement: Redis, the node without an engine, one gateway, and the reader of its streams."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.open_streams.node import MODEL
from bench.peers import BUILD
from bench.queue_cost.processes import redis_pid
from penstock.runtime.embedded_redis import EmbeddedRedis

SOURCE = Path(__file__).parent / "reader.cpp"
COMPILERS = ("g++", "clang++", "c++")
STOP_TIMEOUT_S = 30
REDIS_MIB = 16_384
"""A limit, above what the tokens of all streams may take by the prediction: one tenant gets half of it."""
MAX_TOKENS = 4000
"""Of a stream. The node says more if a measurement needs more; the queue predicts a job's memory by this."""
OPENING_AT_ONCE = 64
MAX_SOCKETS = 100_000
SSE, WEBSOCKET = TRANSPORTS = "SSE", "WebSocket"
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": MAX_TOKENS}
Answer = dict[str, Any]


class Process:
    """A process that prints one line of JSON when it is ready, and one after each line that it gets."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def tell(self, line: str) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> Answer:
        """Wait for the next answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with status {self._process.wait()}")
        answer: Answer = json.loads(line)
        return answer


@contextmanager
def _process(argv: Sequence[str], cores: set[int], **options: Any) -> Iterator[Process]:
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509
        **options,
    ) as process:
        try:
            yield Process(process)
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def compiled_reader() -> Path:
    """Compile the reader if its source is newer than the program. Raises RuntimeError if there is no compiler."""
    program = BUILD / "bench" / "open_streams_reader"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        names = (os.environ["CXX"],) if "CXX" in os.environ else COMPILERS
        compiler = next(filter(None, map(shutil.which, names)), None)
        if compiler is None:
            raise RuntimeError(f"no C++ compiler: looked for {', '.join(names)}")
        program.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-std=c++20", "-O2", "-o", str(program), str(SOURCE)], check=True)
    return program


@dataclass(frozen=True, slots=True)
class Cores:
    """Where processes run: the gateway, and everything else."""

    gateway: set[int]
    others: set[int]

    @classmethod
    def of_this_machine(cls, *, pinned: bool) -> Cores:
        """Give the gateway the first core for itself, or all processes all cores."""
        cores = sorted(os.sched_getaffinity(0))
        return cls({cores[0]}, set(cores[1:])) if pinned and len(cores) > 1 else cls(set(cores), set(cores))


@dataclass(frozen=True, slots=True)
class Stand:
    """The running processes."""

    node: Process
    gateway: Process
    url: str
    pids: dict[str, int]

    @contextmanager
    def reader(self, num_streams: int, cores: Cores, transport: str = SSE) -> Iterator[Process]:
        """A reader that has opened its streams."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / str(number) for number in range(2)]
            parts = sse_parts(self.url) if transport == SSE else websocket_parts(self.url)
            for file, part in zip(files, parts, strict=False):
                file.write_bytes(part)
            address = urlsplit(self.url)
            request, *frame = map(str, files[: len(parts)])
            argv = [str(compiled_reader()), str(address.hostname), str(address.port), request]
            with _process([*argv, str(num_streams), str(OPENING_AT_ONCE), *frame], cores.others) as reader:
                reader.answer()
                yield reader


def sse_parts(url: str) -> list[bytes]:
    """Return the request that opens a stream of server-sent events."""
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return [head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body]


def websocket_parts(url: str) -> list[bytes]:
    """Return the handshake that opens a WebSocket, and the frame that then submits the chat of `sse_parts`."""
    message = {"type": "submit", "id": "s", "path": CHAT_PATH, "body": CHAT, "event_ids": False}
    handshake = (
        f"GET /v1/stream HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    return [handshake.encode(), text_frame(json.dumps(message).encode())]


def text_frame(payload: bytes) -> bytes:
    """Return a client's WebSocket frame (RFC 6455, 5.2) with a payload of 126 to 65,535 bytes and a mask of zeros."""
    return struct.pack(">BBH4x", 0x81, 0xFE, len(payload)) + payload


@contextmanager
def stand(python: str, num_chars: int, cores: Cores, *, keeps: bool = False) -> Iterator[Stand]:
    """Start Redis, the node, and the gateway that the interpreter `python` has installed. `keeps`: with a keeper."""
    with ExitStack() as stack:
        os.sched_setaffinity(0, cores.others)
        stack.callback(os.sched_setaffinity, 0, cores.gateway | cores.others)
        server = stack.enter_context(EmbeddedRedis(maxmemory_mib=REDIS_MIB))
        argv = [sys.executable, "-m", "bench.open_streams", "node", server.url, str(num_chars)]
        node = stack.enter_context(_process(argv, cores.others))
        node.answer()
        argv = [python, "-m", "penstock", "gateway", "--redis-url", server.url, "--port", "0"]
        env = os.environ | {"PENSTOCK_GATEWAY_PROGRESS": "json", "PENSTOCK_GATEWAY_MAX_SOCKETS": str(MAX_SOCKETS)}
        if keeps:
            env["PENSTOCK_GATEWAY_KEEP_CONNECTIONS"] = "true"
        gateway = stack.enter_context(_process(argv, cores.gateway, env=env, stderr=subprocess.DEVNULL))
        url = gateway.answer()["url"]
        if keeps:
            gateway.pid = only_child(only_child(gateway.pid))  # the keeper starts a guard, and that the gateway
        yield Stand(node, gateway, url, {"gateway": gateway.pid, "redis": redis_pid(server), "node": node.pid})


def only_child(pid: int) -> int:
    """Return the only child of a process."""
    stats = [file.read_text().rpartition(") ") for file in Path("/proc").glob("[0-9]*/stat")]
    (child,) = (int(head.split(" ")[0]) for head, _, rest in stats if int(rest.split()[1]) == pid)
    return child


def resident_kib(pid: int) -> int:
    """Return the RSS of one process."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])
