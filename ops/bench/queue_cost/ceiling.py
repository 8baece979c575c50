"""The host's ceiling: tokens per second that everything around a GPU can handle, by the CPU time of each part."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.queue_cost.processes import POOL, STOP_TIMEOUT_S, CpuMeter, gateway, redis_pid
from bench.queue_cost.streams import open_stream
from penstock import AsyncClient
from penstock.runtime.embedded_redis import EmbeddedRedis

PROMPT_TOKENS = 32
RULES: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
FIRST_STEP = 150
"""By then all streams decode."""
LAST_STEPS = 20
POLL_S = 0.05
COUNTS = ("steps", "tokens", "waited", "idle_us")
ROWS = {
    "engine's thread": ("node engine", ("schedule", "plan", "submit", "commit", "output", "deliver", "commands")),
    "node's event loop": ("node loop", ("accept", "pack", "send", "answers")),
    "Redis": ("redis", ()),
    "Python client": ("client", ()),
    "gateway": ("gateway", ()),
}
"""Threads and processes: what the meter calls them, and their parts that are timed."""


class GpuNode:
    """A node process around the waiting GPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process

    def counts(self) -> dict[str, float]:
        """Return its steps, tokens and waits, and the CPU microseconds of each part, since it started."""
        self._process.send_signal(signal.SIGUSR1)
        assert self._process.stdout is not None
        said: dict[str, float] = json.loads(self._process.stdout.readline())
        return said | {"core_wait_us": self._core_wait_us()}

    def _core_wait_us(self) -> float:
        """Return how long its threads were ready to run and had no core."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[1]) for task in tasks) / 1e3


@contextmanager
def gpu_node(redis_url: str, step_ms: float, max_num_seqs: int) -> Iterator[GpuNode]:
    """Start such a node."""
    argv = [sys.executable, "-m", "bench.queue_cost", "gpu-node", redis_url, str(step_ms / 1e3), str(max_num_seqs)]
    env = os.environ | {"PENSTOCK_NODE_PROGRESS": "json"}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while json.loads(process.stdout.readline())["event"] != "ready":
                pass
            yield GpuNode(process)
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


@dataclass(frozen=True)
class Measured:
    """What a stretch of steady decoding took."""

    tokens_per_s: float
    rows: float
    """Sequences per step."""
    idle: float
    """Share of the time in which the GPU had no step."""
    waited: float
    """Share of the steps for which the GPU waited."""
    us: dict[str, float]
    """CPU microseconds per step: of processes, of the node's loop and its other threads, and of their parts."""


async def _counts_at(node: GpuNode, step: int) -> dict[str, float]:
    """Return the node's counts once it has come to a step."""
    while True:
        counts = node.counts()
        if counts["steps"] >= step:
            return counts
        await asyncio.sleep(POLL_S)


async def _window(node: GpuNode, pids: dict[str, int], num_tokens: int) -> Measured:
    """Measure between two steps."""
    before = await _counts_at(node, FIRST_STEP)
    began_s = time.perf_counter()
    with CpuMeter(pids) as meter:
        after = await _counts_at(node, num_tokens - LAST_STEPS)
        took_s = time.perf_counter() - began_s
    spent = {name: after[name] - before.get(name, 0) for name in after}
    steps, tokens, waited, idle_us = (spent.pop(name) for name in COUNTS)
    us = {name: value / steps for name, value in (meter.spent_us | spent).items()}
    return Measured(tokens / took_s, tokens / steps, idle_us / 1e6 / took_s, waited / steps, us)


async def _measure(
    node: GpuNode, pids: dict[str, int], read: Callable[[int], Coroutine[Any, Any, None]], size: tuple[int, int]
) -> Measured:
    num_streams, num_tokens = size
    await asyncio.gather(*(read(-1 - seed) for seed in range(8)))  # Warms up, with a few steps.
    async with asyncio.TaskGroup() as group:
        window = group.create_task(_window(node, pids, num_tokens))
        for seed in range(num_streams):
            group.create_task(read(seed))
    return window.result()


def _fields(seed: int, num_tokens: int) -> dict[str, Any]:
    """Return a request; a warm-up has a negative seed and few tokens."""
    prompt = [(37 * i + 11 * seed) % 4000 + 5 for i in range(PROMPT_TOKENS)]
    return RULES | {"prompt": prompt, "max_tokens": num_tokens if seed >= 0 else 4, "seed": abs(seed)}


async def by_client(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> Measured:
    """Measure with streams that one Python client reads from Redis."""
    with gpu_node(server.url, step_ms, num_streams) as node:
        async with AsyncClient(server.url) as client:

            async def read(seed: int) -> None:
                job = await client.submit(**_fields(seed, num_tokens))
                async for _ in job.batches():
                    pass

            pids = {"node": node.pid, "redis": redis_pid(server), "client": os.getpid()}
            return await _measure(node, pids, read, (num_streams, num_tokens))


async def by_gateway(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> Measured:
    """Measure with streams over HTTP, through one gateway, to a reader that parses nothing."""
    with gpu_node(server.url, step_ms, num_streams) as node, gateway(server.url) as (gateway_pid, said):

        async def read(seed: int) -> None:
            reader, writer = await open_stream(said["url"], {"model": POOL} | _fields(seed, num_tokens))
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                if not (data := await reader.read(1 << 16)):
                    raise RuntimeError(f"the gateway hung up: {tail!r}")
                tail = data
            writer.close()

        pids = {"node": node.pid, "redis": redis_pid(server), "gateway": gateway_pid}
        return await _measure(node, pids, read, (num_streams, num_tokens))


def table_of(got: Measured) -> str:
    """Return the CPU time per step as Markdown, and the ceiling of each thread and process alone."""
    lines = ["| part | µs per step | tokens/s if it were alone |", "|---|---|---|"]
    for name, (key, parts) in ROWS.items():
        if key in got.us:
            lines.append(f"| {name} | {got.us[key]:.0f} | {got.rows / got.us[key] * 1e6:,.0f} |")
            others = got.us[key] - sum(got.us.get(part, 0.0) for part in parts)
            cells = [(part, got.us.get(part, 0.0)) for part in parts] + ([("others", others)] if parts else [])
            lines += [f"| … {part} | {us:.0f} | |" for part, us in cells]
    both = got.us["node engine"] + got.us["node loop"]
    lines.append(f"| both threads of the node, which share the GIL | {both:.0f} | {got.rows / both * 1e6:,.0f} |")
    return "\n".join(lines)


async def measure_ceiling(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> None:
    """Print what CPU time each part takes per step, with a client and with a gateway."""
    for name, measure in {"client": by_client, "gateway": by_gateway}.items():
        got = await measure(server, step_ms, num_streams, num_tokens)
        idle = f"GPU idle {got.idle:.1%}, waited for in {got.waited:.1%} of the steps"
        core = f"threads waited {got.us['core_wait_us']:.0f} µs per step for a core"
        print(f"  {name}, step {step_ms:g} ms: {got.tokens_per_s:,.0f} tokens/s, {got.rows:.0f} rows; {idle}; {core}")
        print(table_of(got), flush=True)
