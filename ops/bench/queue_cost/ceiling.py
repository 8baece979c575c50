"""The host's ceiling: tokens per second that everything around a GPU can handle, by the CPU time of each part."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.queue_cost.processes import POOL, STOP_TIMEOUT_S, CpuMeter, gateway, redis_pid
from bench.queue_cost.streams import open_stream
from penstock import AsyncClient
from penstock.runtime.embedded_redis import EmbeddedRedis

PROMPT_TOKENS = 32
RULES = {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
MARGIN = 60
"""Tokens of each stream before and after those that are measured: by then all streams decode, and none has ended."""


class Progress:
    """How many tokens, or events, all streams have read."""

    def __init__(self) -> None:
        self._num_read = 0
        self._reached = asyncio.Event()
        self._wanted = 0

    def add(self, count: int) -> None:
        """Count what arrived."""
        self._num_read += count
        if self._num_read >= self._wanted:
            self._reached.set()

    async def reaches(self, count: int) -> None:
        """Wait until so many have arrived."""
        self._wanted = count
        self._reached.clear()
        if self._num_read < count:
            await self._reached.wait()


class GpuNode:
    """A node process around the waiting GPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process

    def counts(self) -> dict[str, float]:
        """Return its steps and waits, and the CPU microseconds of each part, since it started."""
        self._process.send_signal(signal.SIGUSR1)
        assert self._process.stdout is not None
        said: dict[str, float] = json.loads(self._process.stdout.readline())
        return said


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
    """A second of steady decoding and more, per step."""

    tokens_per_s: float
    idle: float
    """Share of the time in which the GPU had no step."""
    waited: float
    """Share of the steps for which the GPU waited."""
    us: dict[str, float]
    """CPU microseconds per step: of processes, of the node's loop and the other threads, and of their parts."""


async def _window(
    node: GpuNode, pids: dict[str, int], progress: Progress, counts: tuple[int, int], num_streams: int
) -> Measured:
    """Measure between two numbers of read tokens."""
    await progress.reaches(counts[0])
    before, began_s = node.counts(), time.perf_counter()
    with CpuMeter(pids) as meter:
        await progress.reaches(counts[1])
        took_s, after = time.perf_counter() - began_s, node.counts()
    spent = {name: after[name] - before.get(name, 0) for name in after}
    steps, waited, idle_us = (spent.pop(name) for name in ("steps", "waited", "idle_us"))
    us = {name: value / steps for name, value in (meter.spent_us | spent).items()}
    return Measured(steps * num_streams / took_s, idle_us / 1e6 / took_s, waited / steps, us)


def _prompt(seed: int) -> list[int]:
    return [(37 * i + 11 * seed) % 4000 + 5 for i in range(PROMPT_TOKENS)]


async def _measure(
    node: GpuNode, pids: dict[str, int], read: Callable[[int, Progress], Awaitable[None]], size: tuple[int, int]
) -> Measured:
    num_streams, num_tokens = size
    progress = Progress()
    window = asyncio.create_task(
        _window(node, pids, progress, (num_streams * MARGIN, num_streams * (num_tokens - MARGIN)), num_streams)
    )
    await asyncio.gather(*(read(seed, progress) for seed in range(num_streams)))
    return await window


async def by_client(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> Measured:
    """Measure with streams that one Python client reads from Redis."""
    with gpu_node(server.url, step_ms, num_streams) as node:
        async with AsyncClient(server.url) as client:

            async def read(seed: int, progress: Progress) -> None:
                job = await client.submit(_prompt(seed), max_tokens=num_tokens, seed=seed, **RULES)
                async for batch in job.batches():
                    progress.add(sum(len(chunk.token_ids) for chunk in batch))

            pids = {"node": node.pid, "redis": redis_pid(server), "client": os.getpid()}
            return await _measure(node, pids, read, (num_streams, num_tokens))


async def by_gateway(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> Measured:
    """Measure with streams over HTTP, through one gateway, to a reader that parses no more than lengths."""
    with gpu_node(server.url, step_ms, num_streams) as node, gateway(server.url) as (gateway_pid, said):

        async def read(seed: int, progress: Progress) -> None:
            fields = RULES | {"model": POOL, "prompt": _prompt(seed), "max_tokens": num_tokens, "seed": seed}
            reader, writer = await open_stream(said["url"], fields | {"return_token_ids": True})
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                if not (data := await reader.read(1 << 16)):
                    raise RuntimeError(f"the gateway hung up: {tail!r}")
                tail = data
            writer.close()

        raise NotImplementedError


async def measure_ceiling(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> None:
    """Print what CPU time each part takes per step."""
    got = await by_client(server, step_ms, num_streams, num_tokens)
    print(f"  step {step_ms:g} ms: {got.tokens_per_s:,.0f} tokens/s; GPU idle {got.idle:.1%}, waited for {got.waited:.1%}")
    print("  " + ", ".join(f"{name} {us:.0f}" for name, us in got.us.items()), flush=True)
