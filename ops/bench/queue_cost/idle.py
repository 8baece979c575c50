"""The way of one job through an idle system."""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import pairwise

from bench.queue_cost.clock import SPOKEN, STAMP
from bench.queue_cost.processes import node
from penstock import AsyncClient
from penstock.runtime.embedded_redis import EmbeddedRedis

NAMES = ("submit call", "answered → add", "step", "step → client", "client → end", "submit → engine.add")


async def measure_idle(server: EmbeddedRedis) -> None:
    """One job at a time; behind a pause, all copies of pool state are stale."""
    with node(server.url, 0.0):
        print("idle, one job behind the other")
        await _measure(server.url, 300)
        print("idle, a job every 1.2 s")
        await _measure(server.url, 12, pause_s=1.2)


async def _measure(redis_url: str, num_jobs: int, pause_s: float = 0.0) -> None:
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
    for name, column in zip(NAMES, zip(*rows[num_jobs // 10 :], strict=True), strict=True):
        p90 = sorted(column)[int(0.9 * len(column))]
        print(f"  {name}: p50 {statistics.median(column):.3f} ms, p90 {p90:.3f} ms")
