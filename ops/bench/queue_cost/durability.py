"""What a submission costs that is answered only once Redis's disk has the job."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import quantiles

from redis.asyncio import Redis

from bench.queue_cost.processes import node
from penstock import AsyncClient
from penstock.contract.errors import UnsupportedDurabilityError
from penstock.contract.job import FSYNC, MEMORY, Durability
from penstock.runtime.embedded_redis import EmbeddedRedis, ServerVersion, find_redis_server

CONCURRENCY = (1, 16, 128)
SECONDS = 8.0
MAX_JOBS = 20_000
LATER_S = 3600.0
"""No node takes the jobs, so nothing but submissions runs."""


async def measure_durability() -> None:
    """Print a row for each setting of the append-only file, durability and number of callers."""
    server = ServerVersion.of(find_redis_server())
    print(f"{server}, {SECONDS:.0f} s or {MAX_JOBS} submissions for each row")
    print("| appendfsync | durability | callers | submissions/s | p50 ms | p99 ms |\n|---|---|---|---|---|---|")
    for appendfsync in ("everysec", "always"):
        for durability in (MEMORY, FSYNC):
            for num_callers in CONCURRENCY:
                try:
                    took_s, times_s = await _measure(appendfsync, durability, num_callers)
                except UnsupportedDurabilityError:
                    print(f"| {appendfsync} | {durability} | {num_callers} | refused | | |")
                    continue
                cuts = [1000 * one for one in quantiles(times_s, n=100)]
                rate = len(times_s) / took_s
                row = f"{num_callers} | {rate:.0f} | {cuts[49]:.1f} | {cuts[98]:.1f} |"
                print(f"| {appendfsync} | {durability} | {row}", flush=True)


async def _measure(appendfsync: str, durability: Durability, num_callers: int) -> tuple[float, list[float]]:
    """Return the seconds of the whole measurement and of each submission, on a server of its own."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(data_dir=Path(folder)) as server:
        async with Redis.from_url(server.url) as redis:
            await redis.config_set("appendfsync", appendfsync)
        with node(server.url, 0.0):
            async with AsyncClient(server.url) as client:
                await _submit(client, durability)  # opens connections, loads the script
                return await _repeated(client, durability, num_callers)


async def _repeated(client: AsyncClient, durability: Durability, num_callers: int) -> tuple[float, list[float]]:
    times_s: list[float] = []
    begun_s = time.monotonic()

    async def submit_often() -> None:
        while time.monotonic() < begun_s + SECONDS and len(times_s) < MAX_JOBS:
            asked_s = time.monotonic()
            await _submit(client, durability)
            times_s.append(time.monotonic() - asked_s)

    await asyncio.gather(*(submit_often() for _ in range(num_callers)))
    return time.monotonic() - begun_s, times_s


async def _submit(client: AsyncClient, durability: Durability) -> None:
    await client.submit_unread("hello", max_tokens=16, not_before_s=LATER_S, durability=durability)
