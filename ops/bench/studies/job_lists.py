"""Pages of job lists, and bulk actions, over many open and ended jobs: times of calls, and how long they block Redis.

    python -m bench.studies.job_lists --open 200000 --ended 800000

Open jobs are submitted; ended ones are copies of a few real ones, written directly. No node runs. The CPU time is that
of Redis's main thread for a whole page or count, however many calls it takes; other work on the machine changes it
little. Times of calls are of Redis's slow log, which also counts time for which Redis waited for a core: on a shared
machine, that decides how long the longest one takes. So each page is read several times, and a call counts with the
shortest of its times: what it takes undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import islice
from statistics import quantiles
from typing import Any, Self, TypeVar, cast

from redis.asyncio import Redis
from uuid_utils import uuid7

from bench.queue_cost.processes import cpu_us, redis_pid
from penstock.contract.job import JobDef, Priority, SamplingParams
from penstock.contract.job_actions import JobFilter
from penstock.contract.job_counts import CountsOfPools
from penstock.contract.output import Outcome
from penstock.contract.pool import PoolRecord
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.broker.job_lists import JobLists
from penstock.queue.broker.node import Capacity, Emission, NodeBroker
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.runtime.embedded_redis import EmbeddedRedis

POOL = "lists"
TENANTS = 20
RUNS = 40
"""Tags of the form `run:<number>`, by turns; each job has one of them, and every hundredth the tag `rare`."""
STATES = ("succeeded",) * 90 + ("failed",) * 5 + ("cancelled",) * 4 + ("expired",)
IN_FLIGHT = 64
PER_PIPELINE = 2000
NUM_PLACES, NUM_TIMES = 60, 5
"""Pages that are read, and how often each of them is."""
LATER_MS = 6 * 24 * 3_600_000
CALLS = "script calls: p50, p99, longest, ms"
TIMES = f"p50 ms | p99 ms | {CALLS} | longest undisturbed, ms | Redis's CPU, p50 ms | p99 ms"
SLOW_US = 200
"""Calls from which on Redis notes their time. If it noted all, giving back the notes would take the longest."""


T = TypeVar("T")


def tags_of(number: int) -> tuple[str, ...]:
    """Return the tags of a job."""
    return (f"run:{number % RUNS}", "rare") if number % 100 == 0 else (f"run:{number % RUNS}",)


class Population:
    """A pool on a Redis, and the jobs that are put there."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._producer = ProducerBroker(redis)
        self._node = NodeBroker(redis, POOL, "node", "r1")

    async def join(self) -> None:
        """Create the pool."""
        config = NodeSettings(model="acme/lists", redis_url="redis://").pool_config | {"max_open_jobs": 10**6}
        await self._node.join(config, PoolRecord(POOL, "acme/lists", max_model_len=4096))

    async def add_open(self, count: int) -> None:
        """Submit jobs: three quarters wait in the queue, and the others for their time."""

        async def submit_some(numbers: Iterator[int]) -> None:
            for number in numbers:
                await self._producer.submit(Submission(self._job(number, is_later=number // TENANTS % 4 == 0), 100))

        numbers = iter(range(count))
        await asyncio.gather(*(submit_some(numbers) for _ in range(IN_FLIGHT)))

    def _job(self, number: int, *, is_later: bool) -> JobDef:
        return JobDef(
            id=f"{POOL}.{uuid7()}",
            prompt="hello",
            params=SamplingParams(max_tokens=16),
            tenant=f"t{number % TENANTS}",
            priority=Priority(number // TENANTS % 3),
            not_before_ms=LATER_MS if is_later else None,
            tags=tags_of(number),
            custom_id=f"row {number}" if number % 10 == 3 else None,
            metadata={"user": f"u{number % 7}"} if number % 10 == 3 else None,
        )

    async def add_ended(self, count: int) -> None:
        """Write records of ended jobs, as the scripts would."""
        fields = await self._ended_record()
        numbers = iter(range(count))
        for _ in range(0, count, PER_PIPELINE):
            async with self.redis.pipeline(transaction=False) as pipe:
                for number in islice(numbers, PER_PIPELINE):
                    self._write_ended(pipe, number, fields)
                await pipe.execute()

    async def _ended_record(self) -> dict[str, Any]:
        job = self._job(0, is_later=False)
        await self._producer.submit(Submission(job, 100))
        whole = Capacity((10**6,) * 6, (8,) * 6, 10**6, 8)
        (taken,) = (await self._node.take(1, "nonce", whole, hold_ms=1.0)).jobs
        await self._node.finish(Emission(taken.job_id, taken.lease, 0, ()), Outcome("succeeded"), b"result")
        found = await cast(Any, self.redis).hgetall(keys.job(job.id))
        return {name.decode(): value for name, value in found.items()}

    def _write_ended(self, pipe: Any, number: int, fields: dict[str, Any]) -> None:
        job_id, tenant, state = f"{POOL}.{uuid7()}", f"t{number % TENANTS}", STATES[number * 37 % len(STATES)]
        tags = tags_of(number)
        of_tags = {f"tag{at}": tag for at, tag in enumerate(tags, 1)}
        level = number // TENANTS % 6
        mapping = {**fields, "tag2": "", "tenant": tenant, "state": state, "level": level, **of_tags}
        pipe.hset(keys.job(job_id), mapping=mapping)
        pipe.pexpire(keys.job(job_id), LATER_MS)
        prefix = keys.prefix(POOL)
        pipe.zadd(f"{prefix}:jobs:{state}:{tenant}", {job_id: 0})
        for tag in tags:
            pipe.zadd(f"{prefix}:tagged:{tenant}:{tag}", {job_id: 0})
            for field in (f"{level}", f"{state}:{level}"):
                pipe.hincrby(f"{prefix}:tag_counts:{tenant}:{tag}", field, 1)
        member = f"1500 {tenant} job:{job_id} {state} {' '.join(tags)}"
        pipe.zadd(keys.expiry(POOL), {member: time.time() * 1000 + LATER_MS})
        pipe.hincrby(keys.stored(POOL), tenant, 1500)


FILTERS: dict[str, tuple[JobFilter, int]] = {
    "a tenant's jobs": (JobFilter("t3"), 50),
    "all tenants' jobs": (JobFilter(), 50),
    "queued": (JobFilter("t3", states=("queued",)), 50),
    "scheduled": (JobFilter("t3", states=("scheduled",)), 50),
    "failed": (JobFilter("t3", states=("failed",)), 50),
    "failed, all tenants": (JobFilter(states=("failed",)), 50),
    "running (none)": (JobFilter("t3", states=("running",)), 50),
    "a tag": (JobFilter("t3", tag="run:3"), 50),
    "a rare tag, all tenants": (JobFilter(tag="rare"), 50),
    "a tag and a state": (JobFilter("t3", tag="run:3", states=("expired",)), 50),
    "a class": (JobFilter("t3", priority=Priority.BATCH), 50),
    "a class, background, failed": (JobFilter(priority=Priority.BATCH, background=True, states=("failed",)), 50),
    "a class that no queued job has": (JobFilter("t3", background=True, states=("queued", "scheduled")), 50),
    "a custom_id": (JobFilter("t3", custom_id="row 4003"), 50),
    "a tag and metadata": (JobFilter("t3", tag="run:3", metadata={"user": "u3"}), 50),
    "100 jobs of a page": (JobFilter(), 100),
    "1,000 jobs of a page": (JobFilter("t3"), 1000),
}
COUNTED: dict[str, str | None] = {"a tenant": None, "a tag of 25,000 jobs": "run:3", "a rare tag": "rare"}


class Watch:
    """Times of calls, and Redis's CPU time for them."""

    def __init__(self, redis: Redis, pid: int) -> None:
        self._redis = redis
        self._pid = pid
        self._times_ms: list[float] = []
        self._cpu_ms: list[float] = []
        self._longest_ms = 0.0
        self._num_calls = 0
        self._noted_ms: list[float] = []

    async def __aenter__(self) -> Self:
        await reset(self._redis)
        return self

    async def __aexit__(self, *_: object) -> None:
        calls = shown_calls(self._noted_ms, self._num_calls)
        self.columns = " | ".join(
            (*self._shown(self._times_ms), calls, f"{self._longest_ms:.1f}", *self._shown(self._cpu_ms))
        )

    def _shown(self, times_ms: list[float]) -> tuple[str, str]:
        cuts = quantiles(times_ms, n=100)
        return f"{cuts[49]:.1f}", f"{cuts[98]:.1f}"

    async def undisturbed(self, call: Callable[[], Awaitable[T]]) -> T:
        """Do the same call several times, and note its times. The longest script call is that of the fastest time."""
        answer, longest_ms = await self._noted(call())
        for _ in range(NUM_TIMES - 1):
            answer, again_ms = await self._noted(call())
            longest_ms = min(longest_ms, again_ms)
        self._longest_ms = max(self._longest_ms, longest_ms)
        return answer

    async def _noted(self, call: Awaitable[T]) -> tuple[T, float]:
        """Return the answer of a call, and how long its longest script call took."""
        await reset(self._redis)
        answer = await self._time(call)
        noted_ms, num_calls = await script_calls(self._redis)
        self._noted_ms += noted_ms
        self._num_calls += num_calls
        return answer, max(noted_ms, default=0.0)

    async def _time(self, call: Awaitable[T]) -> T:
        """Return the answer of a call, and note its times."""
        begun_s, before_us = time.perf_counter(), cpu_us(self._pid, main_only=True)
        answer = await call
        self._cpu_ms.append((cpu_us(self._pid, main_only=True) - before_us) / 1e3)
        self._times_ms.append(1000 * (time.perf_counter() - begun_s))
        return answer


async def measure_pages(redis: Redis, pid: int, name: str, wanted: JobFilter, limit: int) -> None:
    """Read pages from random places on, and print a row."""
    lists, rng, num_jobs = JobLists(redis), random.Random(1), 0
    after: str | None = None
    async with Watch(redis, pid) as watch:
        for _ in range(NUM_PLACES):
            page = await watch.undisturbed(partial(lists.page, wanted, after=after, limit=limit))
            num_jobs += len(page.jobs)
            after = page.next_after if rng.random() < 0.9 else None
    print(f"| {name} | {num_jobs / NUM_PLACES:.0f} | {watch.columns} |", flush=True)


async def measure_counts(redis: Redis, pid: int, name: str, tag: str | None) -> None:
    """Count a set again and again, and print a row."""
    lists = JobLists(redis)
    async with Watch(redis, pid) as watch:
        for _ in range(NUM_PLACES):
            sums = CountsOfPools()
            sums.add(await watch.undisturbed(partial(lists.counted, POOL, "t3", tag)), has_tag=tag is not None)
    counts = sums.counts("t3", tag)
    states = ", ".join(f"{count} {state}" for state, count in counts.states.items())
    print(f"| {name} | {states} | {watch.columns} |", flush=True)


async def reset(redis: Redis) -> None:
    """Let Redis begin its statistics of calls anew."""
    await redis.slowlog_reset()
    await redis.config_resetstat()


async def script_calls(redis: Redis) -> tuple[list[float], int]:
    """Return the times of script calls that Redis noted since the reset, in ms, and how many calls there were."""
    noted = await cast(Any, redis).slowlog_get(10_000)
    num_calls = sum(
        of_command["calls"]
        for name, of_command in cast(Any, await redis.info("commandstats")).items()
        if name in ("cmdstat_evalsha", "cmdstat_eval")
    )
    return [one["duration"] / 1000 for one in noted if one["command"].startswith(b"EVAL")], num_calls


def shown_calls(noted_ms: list[float], num_calls: int) -> str:
    """Return the median of all script calls, what 99 of 100 keep to, and the longest, in ms."""
    longest_first = sorted(noted_ms, reverse=True)
    ranks = (num_calls // 2, num_calls // 100, 0)
    return ", ".join(f"{longest_first[at]:.1f}" if at < len(longest_first) else f"< {SLOW_US / 1000}" for at in ranks)


async def measure_bulk(url: str, redis: Redis, name: str, act: Callable[[AsyncClient], Awaitable[Any]]) -> None:
    """Do a bulk action, and print a row."""
    await reset(redis)
    async with AsyncClient(url, tenant="t3") as client:
        begun_s = time.perf_counter()
        report = await act(client)
        took_s = time.perf_counter() - begun_s
    counts = f"{report.num_changed} | {report.num_already_over} | {report.num_failed}"
    print(f"| {name} | {counts} | {took_s:.1f} | {shown_calls(*await script_calls(redis))} |", flush=True)


async def study(num_open: int, num_ended: int) -> None:
    """Build the population, and print the tables."""
    with EmbeddedRedis(maxmemory_mib=4096) as server:
        redis, pid = connect(server.url), redis_pid(server)
        population = Population(redis)
        await population.join()
        begun_s = time.monotonic()
        await population.add_ended(num_ended)
        await population.add_open(num_open)
        await redis.config_set("slowlog-log-slower-than", SLOW_US)
        await redis.config_set("slowlog-max-len", 10_000)
        used = cast(Any, await redis.info("memory"))["used_memory"]
        print(
            f"{num_open} open and {num_ended} ended jobs, {used >> 20} MiB, built in {time.monotonic() - begun_s:.0f} s"
        )
        print(f"| filter | jobs a page | {TIMES} |\n|---|---|---|---|---|---|---|---|")
        for name, (wanted, limit) in FILTERS.items():
            await measure_pages(redis, pid, name, wanted, limit)
        print(f"| counts of | found | {TIMES} |\n|---|---|---|---|---|---|---|---|")
        for name, tag in COUNTED.items():
            await measure_counts(redis, pid, name, tag)
        print(f"| bulk action | changed | already over | failed | s | {CALLS} |\n|---|---|---|---|---|---|")
        reclassed: dict[str, Any] = {"to_priority": "batch", "tag": "run:3"}
        await measure_bulk(
            server.url, redis, "change class, by tag", lambda c: c.control.bulk("change_class", **reclassed)
        )
        await measure_bulk(server.url, redis, "cancel, dry run", lambda c: c.control.bulk("cancel", dry_run=True))
        await measure_bulk(server.url, redis, "cancel", lambda c: c.control.bulk("cancel", all_jobs=True))
        await measure_bulk(
            server.url,
            redis,
            "retry of what was canceled, by tag",
            lambda c: c.control.bulk("retry", state="cancelled", tag="run:3"),
        )
        await redis.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--open", type=int, default=200_000)
    parser.add_argument("--ended", type=int, default=800_000)
    given = parser.parse_args()
    asyncio.run(study(given.open, given.ended))
