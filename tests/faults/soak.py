"""`python -m faults.soak`: a mixed load, first with a kill every few seconds, then without kills.

At the end, every job must have ended, every stream and log must equal the reference, and no process's memory may have
grown in the part without kills.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import random
import secrets
import tempfile
from collections import Counter
from pathlib import Path

from faults.tools.redis_process import RedisProcess
from faults.tools.report import record
from faults.tools.soak_kills import Fleet, kill_now_and_then
from faults.tools.soak_load import PATIENCE_S, Load
from faults.tools.work import check_settled

from penstock.producer.client import AsyncClient, ClientSettings
from penstock.queue.broker.connection import connect

POOL = "soak"
SAMPLE_S = 5.0
READERS = "readers"
"""This process."""
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_M_MMAP_THRESHOLD, _MAX_HEAP_BLOCK = -3, 1 << 16


class Memory:
    """Each process's RSS over time, in KiB; for Redis, the memory that it reports as used."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.samples: dict[str, list[tuple[float, float]]] = {}

    async def watch(self) -> None:
        """Take samples until canceled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(SAMPLE_S)
            for name, pid in (self._fleet.pids() | {READERS: os.getpid()}).items():
                self.samples.setdefault(name, []).append((clock(), _resident_kib(pid)))
            with self._fleet.redis.client() as client:
                used = client.info("memory")["used_memory"] / 1024
            self.samples.setdefault("redis", []).append((clock(), used))

    def slopes(self) -> dict[str, float]:
        """Return KiB per minute, by least squares over the second half."""
        return {name: 60 * _slope(samples[len(samples) // 2 :]) for name, samples in self.samples.items()}


def _resident_kib(pid: int) -> float:
    return float(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KIB


def _slope(points: list[tuple[float, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def soak(fleet: Fleet, args: argparse.Namespace) -> tuple[Counter[str], Counter[str], Memory]:
    """Run the load. Return the jobs' outcomes, the faults, and the memory in the part without kills."""
    rng, clock, memory = random.Random(args.seed), asyncio.get_running_loop().time, Memory(fleet)
    redis = connect(fleet.redis.url)
    await fleet.start()
    async with AsyncClient(fleet.redis.url, settings=ClientSettings(outage_s=PATIENCE_S)) as client:
        load = Load(redis, client, POOL, fleet.gateways, rng=rng, pace_s=args.pace)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(num_clients=args.clients, num_http=args.http))
            until_s = clock() + 60 * args.minutes
            killed = await kill_now_and_then(fleet, rng, every_s=args.kill_every, until_s=until_s)
            print(dict(load.counts), dict(killed), flush=True)
            watching = group.create_task(memory.watch())
            await asyncio.sleep(60 * args.quiet_minutes)
            watching.cancel()
            load.stop()
    await check_settled(redis, POOL)
    await redis.aclose()
    return load.counts, killed, memory


def report(counts: Counter[str], killed: Counter[str], memory: Memory, args: argparse.Namespace) -> None:
    """Record the measurements. Raise if jobs are missing or memory grows."""
    print(dict(counts), dict(killed), flush=True)
    slopes = memory.slopes()
    for name, slope in slopes.items():
        print(f"{name}: {memory.samples[name][-1][1]:.0f} KiB, {slope:+.1f} KiB/min", flush=True)
    ended = sum(counts[end] for end in ("succeeded", "failed node_lost"))
    assert ended == counts["accepted"], "accepted jobs have all ended"
    row = f"{args.minutes:g} min, a fault every {args.kill_every:g} s, then {args.quiet_minutes:g} min in peace"
    names = ("accepted", "succeeded", "failed node_lost", "taken over", "tokens")
    measurements = {name: counts[name] for name in names}
    measurements |= {"faults": sum(killed.values()), "steepest KiB/min": max(slopes.values())}
    assert max(slopes.values()) < args.max_slope, "memory is flat"
    record("Soak", row, measurements)


def keep_heap_whole() -> None:
    """Make glibc map large blocks. asyncio receives into 256 KiB blocks and then cuts each to the bytes that came.
    glibc soon takes such blocks from its heap, between small ones that stay. RSS then grows by 0.2 MiB a minute,
    with no byte more in use. Mapped blocks leave no gap.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_BLOCK)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--quiet-minutes", type=float, default=10.0)
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--clients", type=int, default=16, help="jobs at once by the client")
    parser.add_argument("--http", type=int, default=8, help="jobs at once over HTTP")
    parser.add_argument("--pace", type=float, default=3.0, help="seconds from a reader's job to its next, at least")
    parser.add_argument("--max-slope", type=float, default=200.0, help="KiB a minute that a process may grow in peace")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    keep_heap_whole()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, RedisProcess(Path(folder) / "redis") as redis:
        fleet = Fleet(redis, POOL, num_nodes=3, num_gateways=2)
        try:
            counts, killed, memory = asyncio.run(soak(fleet, args))
        finally:
            fleet.close()
    report(counts, killed, memory, args)


if __name__ == "__main__":
    main()
