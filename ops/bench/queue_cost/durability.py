"""What a submission costs that is answered only once Redis's disk, or a replica, has the job."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles

from redis import Redis as SyncRedis
from redis import RedisError
from redis.asyncio import Redis

from bench.child import free_port
from bench.queue_cost.processes import node
from penstock import AsyncClient
from penstock.contract.durability import FSYNC, MEMORY, REPLICATED, Durability
from penstock.contract.errors import UnsupportedDurabilityError
from penstock.runtime.embedded_redis import EmbeddedRedis, ServerVersion, find_redis_server

CONCURRENCY = (1, 16, 128)
SECONDS = 8.0
MAX_JOBS = 20_000
START_TIMEOUT_S = 30.0
LATER_S = 3600.0
"""No node takes the jobs, so nothing but submissions runs."""


async def measure_durability() -> None:
    """Print a row for each setting of the append-only file, durability and number of callers, and with a replica."""
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
                _print_row(appendfsync, durability, num_callers, took_s, times_s)
    with_replica: tuple[Durability, ...] = (MEMORY, REPLICATED)
    for durability in with_replica:
        for num_callers in CONCURRENCY:
            with redis_pair() as url, node(url, 0.0):
                took_s, times_s = await _submissions(url, durability, num_callers)
            _print_row("everysec, a replica", durability, num_callers, took_s, times_s)


def _print_row(setting: str, durability: Durability, num_callers: int, took_s: float, times_s: list[float]) -> None:
    cuts = [1000 * one for one in quantiles(times_s, n=100)]
    row = f"{num_callers} | {len(times_s) / took_s:.0f} | {cuts[49]:.1f} | {cuts[98]:.1f} |"
    print(f"| {setting} | {durability} | {row}", flush=True)


async def _measure(appendfsync: str, durability: Durability, num_callers: int) -> tuple[float, list[float]]:
    """Return the seconds of the whole measurement and of each submission, on a server of its own."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(data_dir=Path(folder)) as server:
        async with Redis.from_url(server.url) as redis:
            await redis.config_set("appendfsync", appendfsync)
        with node(server.url, 0.0):
            return await _submissions(server.url, durability, num_callers)


async def _submissions(url: str, durability: Durability, num_callers: int) -> tuple[float, list[float]]:
    async with AsyncClient(url) as client:
        await _submit(client, durability)  # opens connections, loads the script
        return await _repeated(client, durability, num_callers)


@contextmanager
def redis_pair() -> Iterator[str]:
    """Yield the URL of a server with `appendfsync everysec` that has a replica on the same machine."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        ports = [free_port() for _ in range(2)]
        shared = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--repl-diskless-sync-delay", "0")
        for folder, port, own in zip(folders, ports, ((), ("--replicaof", "127.0.0.1", str(ports[0]))), strict=True):
            place = ("--port", str(port), "--dir", str(folder), "--logfile", str(folder / "log"))
            process = subprocess.Popen([str(find_redis_server()), *place, *shared, *own])
            stack.callback(process.wait)
            stack.callback(process.kill)
        client = stack.enter_context(SyncRedis(port=ports[0]))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _has_replica(client):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the replica does not connect")
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{ports[0]}"


def _has_replica(client: SyncRedis) -> bool:
    try:
        return bool(client.wait(1, 100))
    except RedisError:
        return False


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
