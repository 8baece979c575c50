"""A backlog whose results are not read until Redis has no memory for more, and what a job takes in each state."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import psutil
from fakes.processes.reference_engine import bulk_output
from faults.tools.backlog_entries import each
from redis.asyncio import Redis

from penstock.producer.client import AsyncClient
from penstock.queue import keys

MIB = 1 << 20
_AT_ONCE = 64
_SAMPLE_S = 0.5
_ACK_JOBS = 128


async def used_memory(redis: Redis) -> int:
    """Return the bytes that Redis uses."""
    return int((await redis.info("memory"))["used_memory"])


async def ended_jobs(redis: Redis, pool: str) -> int:
    """Return how many jobs the pool has ended well."""
    return int(await cast(Any, redis.hget(f"{keys.prefix(pool)}:counts", "ended_succeeded")) or 0)


async def until_ended(redis: Redis, pool: str) -> None:
    """Wait until no job of the pool is open."""
    while await cast(Any, redis.scard(f"{keys.prefix(pool)}:open")):
        await asyncio.sleep(0.2)


@dataclass(slots=True)
class LargeJobs:
    """Numbered jobs with prompts and answers of a known size."""

    pool: str
    number: int
    num_chars: int = 1000
    max_tokens: int = 500
    ids: list[str] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)

    def prompt(self, index: int) -> str:
        """Return the prompt of a job."""
        return f"{index:08d}".ljust(self.num_chars, "x")

    async def submit(self, url: str, **options: Any) -> None:
        """Submit all jobs and do not read them."""
        self.ids = [""] * self.number
        async with AsyncClient(url) as client:

            async def submit(index: int) -> None:
                given: dict[str, Any] = {"model": self.pool, "max_tokens": self.max_tokens, **options}
                self.ids[index] = (await client.submit_unread(self.prompt(index), **given)).job_id

            await each(self.number, submit, at_once=_AT_ONCE)

    async def read_and_free(self, url: str, note: Callable[[int], None] = lambda _: None) -> None:
        """Read every result in the order of the jobs, and acknowledge them in parts."""
        async with AsyncClient(url) as client:
            for start in range(0, self.number, _ACK_JOBS):
                part = range(start, min(start + _ACK_JOBS, self.number))
                results = await asyncio.gather(*(client.result(self.ids[index], check=False) for index in part))
                for index, result in zip(part, results, strict=True):
                    text = bulk_output(self.prompt(index).encode(), 0, self.max_tokens)[1]
                    if result.outcome.state != "succeeded" or result.text != text:
                        self.wrong[result.outcome.code or "another text"] += 1
                freed = await client.ack(*(self.ids[index] for index in part))
                if freed != len(part):
                    self.wrong["not freed by its acknowledgment"] += len(part) - freed
                note(part.stop)


@dataclass(slots=True)
class Peaks:
    """The most memory that Redis, the nodes and this process had, in MiB."""

    redis: Redis
    pids: dict[str, int]
    most: dict[str, float] = field(default_factory=dict)

    async def watch(self) -> None:
        """Look until canceled."""
        while True:
            info = await self.redis.info("memory")
            now = {"used": info["used_memory"], "Redis": info["used_memory_rss"]}
            now |= {name: psutil.Process(pid).memory_info().rss for name, pid in self.pids.items()}
            for name, size in now.items():
                self.most[name] = max(self.most.get(name, 0.0), size / MIB)
            await asyncio.sleep(_SAMPLE_S)


async def until_taking_stops(redis: Redis, pool: str, *, still_s: float) -> tuple[int, float]:
    """Wait until no job has ended for `still_s` seconds. Return how many have ended, and the used share of memory."""
    seen: deque[tuple[float, int]] = deque()
    while True:
        now_s, ended = time.monotonic(), await ended_jobs(redis, pool)
        seen.append((now_s, ended))
        while seen and seen[0][0] < now_s - still_s:
            seen.popleft()
        info = await redis.info("memory")
        share = info["used_memory"] / info["maxmemory"]
        is_still = seen[-1][0] - seen[0][0] > still_s - 2 * _SAMPLE_S and seen[0][1] == ended
        if is_still or not await cast(Any, redis.scard(f"{keys.prefix(pool)}:open")):
            return ended, share
        await asyncio.sleep(_SAMPLE_S)


async def rewrite(redis: Redis) -> dict[str, float]:
    """Rewrite the append-only file. Return what it took: its seconds, and in MiB what the fork has copied."""
    started_s = time.monotonic()
    rss = (await redis.info("memory"))["used_memory_rss"]
    await redis.bgrewriteaof()
    most = rss
    while True:
        info = await redis.info()
        most = max(most, info["used_memory_rss"])
        if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
            break
        await asyncio.sleep(0.1)
    assert info["aof_last_bgrewrite_status"] == "ok"
    return {
        "seconds": time.monotonic() - started_s,
        "copied": info["aof_last_cow_size"] / MIB,
        "fork ms": info["latest_fork_usec"] / 1000,
        "RSS before": rss / MIB,
        "most RSS": most / MIB,
    }
