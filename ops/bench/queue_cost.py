"""What the queue and the gateway cost: `PYTHONPATH=ops python -m bench.queue_cost [idle|load|http|share]`.

The engine is a clock: every sequence gains one token a step, and a step takes as long as it is told. `idle`: the way of
one job through an idle system. `load`, `http`: CPU per token of each process at 64 streams, read from Redis and over
HTTP. `share`: an engine whose steps keep two cores busy, bare and behind the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from penstock import AsyncClient
from penstock.contract.embedded import EmbeddedRedis
from penstock.contract.job import Priority, SamplingParams, Usage
from penstock.gpu_node.engine.records import EngineStats, ResumedChoice, StepOutput

POOL = "clock"
STAMP = 1
"""A prompt that starts with this token is answered with times (time.monotonic_ns) as text."""
SPOKEN = 2
WORD = " word"


class ClockTokenizer:
    """Enough of a tokenizer for prompts of token ids."""

    max_token_bytes = 8

    def encode(self, text: str) -> list[int]:
        return [SPOKEN] * max(1, len(text) // 4)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode(messages[-1]["content"])


@dataclass(slots=True)
class _Live:
    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    added_ns: int
    num_said: int = 0


class ClockEngine:
    """Steps of `step_s`: slept, or worked on `num_busy` threads that hold no interpreter lock."""

    def __init__(self, step_s: float, num_busy: int = 0) -> None:
        self.tokenizer = ClockTokenizer()
        self.max_model_len = 1 << 16
        self.num_kv_tokens = 1 << 24
        self.revision = "clock"
        self._step_s = step_s
        self._num_busy = num_busy
        self._rounds = _rounds_of(step_s) if num_busy else 0
        self._helpers = ThreadPoolExecutor(max(1, num_busy - 1))
        self._live: dict[str, _Live] = {}
        self._num_steps = self._num_tokens = 0

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        resume: Sequence[ResumedChoice] = (),
        priority: int = Priority.STANDARD,
        tenant: str = "default",
    ) -> None:
        added_ns = time.monotonic_ns()
        self._live[request_id] = _Live(request_id, prompt_token_ids, params.max_tokens or 16, added_ns)

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def wait(self) -> None:
        pass

    def step(self) -> list[StepOutput]:
        if self._num_busy:
            others = [self._helpers.submit(_work, self._rounds) for _ in range(self._num_busy - 1)]
            _work(self._rounds)
            for other in others:
                other.result()
        elif self._step_s:
            time.sleep(self._step_s)
        self._num_steps += 1
        now_ns = time.monotonic_ns()
        return [self._advance(live, now_ns) for live in list(self._live.values())]

    def _advance(self, live: _Live, now_ns: int) -> StepOutput:
        position, reason, usage = live.num_said, None, None
        live.num_said += 1
        self._num_tokens += 1
        if live.num_said == live.max_tokens:
            reason, usage = "length", Usage(len(live.prompt), live.num_said)
            del self._live[live.request_id]
        text = f"{live.added_ns} {now_ns} " if live.prompt[0] == STAMP else WORD
        return StepOutput(live.request_id, 0, position, (1000 + position,), text, reason, usage)  # type: ignore[arg-type]

    def stats(self) -> EngineStats:
        total, ms = self.num_kv_tokens // 16, self._step_s * 1e3
        figures = {"kv_blocks_total": total, "kv_blocks_free": total, "block_size": 16, "num_running": len(self._live)}
        figures |= {"steps": self._num_steps, "decode_tokens": self._num_tokens, "step_ms_p50": ms, "step_ms_p99": ms}
        return EngineStats(**{name: figures.get(name, 0) for name in EngineStats.__slots__})  # type: ignore[arg-type]


def _work(rounds: int) -> None:
    hashlib.pbkdf2_hmac("sha256", b"penstock", b"salt", rounds)


def _rounds_of(seconds: float) -> int:
    """How much work takes so long on an idle core."""
    started_s = time.perf_counter()
    _work(20_000)
    return max(1, int(20_000 * seconds / (time.perf_counter() - started_s)))


# Processes --------------------------------------------------------------------------------------


async def serve_node(redis_url: str, step_s: float, num_busy: int) -> None:
    """A node around the clock engine, until SIGTERM."""
    from penstock.gpu_node.process import serve_engine
    from penstock.gpu_node.settings import NodeSettings

    settings = NodeSettings.load(redis_url=redis_url, model=POOL, pool=POOL, max_num_seqs=512, drain_s=0)
    await serve_engine(settings, ClockEngine(step_s, num_busy))


@contextmanager
def child(*argv: str, **env: str) -> Iterator[tuple[int, dict[str, str]]]:
    """A child that says when it is ready: its pid, and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", *argv], env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        for line in process.stdout or ():
            if (said := json.loads(line))["event"] == "ready":
                yield process.pid, said
                return
        raise RuntimeError(f"{argv} ended before it was ready")
    finally:
        process.terminate()
        process.wait(30)


def node(redis_url: str, step_ms: float, num_busy: int = 0):  # type: ignore[no-untyped-def]
    return child(
        *("bench.queue_cost", "node", redis_url, str(step_ms / 1e3), str(num_busy)), PENSTOCK_NODE_PROGRESS="json"
    )


def gateway(redis_url: str):  # type: ignore[no-untyped-def]
    return child(
        "penstock.gateway",
        PENSTOCK_GATEWAY_REDIS_URL=redis_url,
        PENSTOCK_GATEWAY_PORT="0",
        PENSTOCK_GATEWAY_PROGRESS="json",
    )


def redis_pid(server: EmbeddedRedis) -> int:
    """The server runs under a guard, which knows no other child."""
    guard = server._guard
    assert guard is not None
    return int(Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()[0])


def cpu_us(pid: int, *, main_only: bool = False) -> float:
    """CPU time of a process, or of its first thread, which runs its event loop."""
    tasks = [str(pid)] if main_only else os.listdir(f"/proc/{pid}/task")
    return sum(int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) for tid in tasks) / 1e3


class CpuMeter:
    """CPU microseconds per token of several processes, over the life of a `with`."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.spent_us: dict[str, float] = {}

    def _read(self) -> dict[str, float]:
        spent = {name: cpu_us(pid) for name, pid in self._pids.items()}
        if (pid := self._pids.get("node")) is not None:
            loop_us = cpu_us(pid, main_only=True)
            spent |= {"node loop": loop_us, "node engine": spent.pop("node") - loop_us}
        return spent

    def __enter__(self) -> CpuMeter:
        self._before, self._before_s = self._read(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._before_s
        self.spent_us = {name: us - self._before[name] for name, us in self._read().items()}

    def report(self, num_tokens: int) -> str:
        parts = [f"{name} {us / num_tokens:.1f}" for name, us in self.spent_us.items()]
        total = sum(us for name, us in self.spent_us.items() if name != "node engine")
        rate = f"{num_tokens / self.wall_s:,.0f} tokens/s"
        return f"{rate}; CPU us/token: {', '.join(parts)}; all but the engine {total / num_tokens:.1f}"


# Measurements -----------------------------------------------------------------------------------


def p50(values: Sequence[float]) -> float:
    return statistics.median(values)


async def measure_idle(redis_url: str, num_jobs: int, pause_s: float = 0.0) -> None:
    """From submit to add, step and client of one job at a time; behind a pause all copies of pool state are stale."""
    async with AsyncClient(redis_url) as client:
        rows: list[tuple[float, ...]] = []
        for _ in range(num_jobs):
            await asyncio.sleep(pause_s)
            asked_ns = time.monotonic_ns()
            job = await client.submit([STAMP, *[SPOKEN] * 31], max_tokens=1)
            queued_ns = time.monotonic_ns()
            said_ns, text = 0, ""
            async for chunk in job.stream():
                said_ns, text = said_ns or time.monotonic_ns(), text + chunk.text
            done_ns = time.monotonic_ns()
            added_ns, stepped_ns = map(int, text.split())
            marks = (asked_ns, queued_ns, added_ns, stepped_ns, said_ns, done_ns)
            rows.append(tuple((b - a) / 1e6 for a, b in [*pairwise(marks), (asked_ns, added_ns)]))
    names = ("submit call", "answered → add", "step", "step → client", "client → end", "submit → engine.add")
    for name, column in zip(names, zip(*rows[num_jobs // 10 :], strict=True), strict=True):
        print(f"  {name}: p50 {p50(column):.3f} ms, p90 {sorted(column)[int(0.9 * len(column))]:.3f} ms")


async def read_streams(client: AsyncClient, num_streams: int, num_tokens: int) -> tuple[int, list[float]]:
    """Runs streams to their end: tokens, and what lay between a step and its arrival here."""
    lags_ms: list[float] = []
    num_read = 0

    async def read(first_token: int) -> None:
        nonlocal num_read
        job = await client.submit([first_token, *[SPOKEN] * 31], max_tokens=num_tokens)
        async for batch in job.batches():
            now_ns = time.monotonic_ns()
            for chunk in batch:
                num_read += len(chunk.token_ids)
                if first_token == STAMP and chunk.text:
                    lags_ms.append((now_ns - int(chunk.text.split()[-1])) / 1e6)

    await asyncio.gather(*(read(STAMP if i == num_streams // 2 else SPOKEN) for i in range(num_streams)))
    return num_read, lags_ms


async def measure_load(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> None:
    with node(server.url, step_ms) as (node_pid, _):
        async with AsyncClient(server.url) as client:
            await read_streams(client, num_streams, 8)
            with CpuMeter({"node": node_pid, "redis": redis_pid(server), "client": os.getpid()}) as meter:
                num_read, lags_ms = await read_streams(client, num_streams, num_tokens)
    print(f"  step {step_ms:g} ms: {meter.report(num_read)}; step → client p50 {p50(lags_ms):.2f} ms")


async def read_http(url: str, num_streams: int, num_tokens: int) -> tuple[int, list[float]]:
    """The same over HTTP, by a reader that does no more than count events."""
    host, port = url.removeprefix("http://").split(":")
    lags_ms: list[float] = []

    async def read(first_token: int) -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(
            {"model": POOL, "prompt": [first_token, *[SPOKEN] * 31], "max_tokens": num_tokens, "stream": True}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        num_events, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                raise RuntimeError(f"the gateway hung up: {tail!r}")
            num_events += data.count(b"data: {")
            tail = data
            if first_token == STAMP and (at := data.rfind(b'"text":"')) >= 0:
                stamps = data[at + 8 :].split(b'"')[0].split()
                if stamps:
                    lags_ms.append((time.monotonic_ns() - int(stamps[-1])) / 1e6)
        writer.close()
        return num_events

    counts = await asyncio.gather(*(read(STAMP if i == num_streams // 2 else SPOKEN) for i in range(num_streams)))
    return sum(counts), lags_ms


async def measure_http(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> None:
    with node(server.url, step_ms) as (node_pid, _), gateway(server.url) as (gateway_pid, said):
        await read_http(said["url"], num_streams, 8)
        pids = {"node": node_pid, "redis": redis_pid(server), "gateway": gateway_pid, "reader": os.getpid()}
        with CpuMeter(pids) as meter:
            num_events, lags_ms = await read_http(said["url"], num_streams, num_tokens)
    print(f"  step {step_ms:g} ms: {meter.report(num_streams * num_tokens)}; step → reader p50 {p50(lags_ms):.2f} ms")
    event_us = meter.spent_us["gateway"] / num_events
    print(f"  gateway: {event_us:.1f} us/event = {1e6 / event_us:,.0f} events/s of one process's CPU")


def bare(step_ms: float, num_streams: int, num_tokens: int, num_busy: int) -> tuple[float, float]:
    """(tokens/s, seconds to the first token) of the engine alone."""
    engine = ClockEngine(step_ms / 1e3, num_busy)
    started_s = time.perf_counter()
    for i in range(num_streams):
        engine.add(str(i), [SPOKEN] * 32, SamplingParams(max_tokens=num_tokens), seed=i)
    engine.step()
    first_s, num_made = time.perf_counter() - started_s, num_streams
    while engine.has_work():
        num_made += len(engine.step())
    return num_made / (time.perf_counter() - started_s), first_s


async def measure_share(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> None:
    """An engine that wants both cores, bare and behind the queue, in turns."""
    ratios, num_busy = [], 2
    for _ in range(3):
        alone, _first_s = bare(step_ms, num_streams, num_tokens, num_busy)
        with node(server.url, step_ms, num_busy):
            async with AsyncClient(server.url) as client:
                await read_streams(client, num_streams, 4)
                started_s = time.perf_counter()
                num_read, _lags = await read_streams(client, num_streams, num_tokens)
                queued = num_read / (time.perf_counter() - started_s)
        ratios.append(queued / alone)
        print(f"  busy step {step_ms:g} ms: bare {alone:,.0f}, queued {queued:,.0f} tokens/s: {queued / alone:.1%}")
    print(f"  median {p50(ratios):.1%}")


@asynccontextmanager
async def _redis() -> AsyncIterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


async def measure(what: Sequence[str], num_streams: int, num_tokens: int, steps_ms: Sequence[float]) -> None:
    async with _redis() as server:
        if "idle" in what:
            with node(server.url, 0.0):
                print("idle, one job behind the other")
                await measure_idle(server.url, 300)
                print("idle, a job every 1.2 s")
                await measure_idle(server.url, 12, pause_s=1.2)
        kinds: dict[str, Callable[..., object]] = {"load": measure_load, "http": measure_http, "share": measure_share}
        for kind in (kind for kind in kinds if kind in what):
            print(f"{kind}, {num_streams} streams of {num_tokens} tokens")
            for step_ms in steps_ms:
                await kinds[kind](server, step_ms, num_streams, num_tokens)  # type: ignore[misc]


def main() -> None:
    """Runs the measurements that are named, all by default."""
    if sys.argv[1:2] == ["node"]:
        redis_url, step_s, num_busy = sys.argv[2:]
        asyncio.run(serve_node(redis_url, float(step_s), int(num_busy)))
        return
    parser = argparse.ArgumentParser(prog="bench.queue_cost", description=__doc__)
    parser.add_argument("what", nargs="*", default=["idle", "load", "http", "share"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--step-ms", type=float, nargs="*", default=[10.0, 0.0])
    options = parser.parse_args()
    asyncio.run(measure(options.what, options.streams, options.tokens, options.step_ms))


if __name__ == "__main__":
    main()
