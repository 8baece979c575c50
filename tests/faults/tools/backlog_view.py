"""A pool as Redis sees it, without the help of clients: what was accepted, how each job ended, what blocked Redis.

A script that ends a job counts it (`P:counts`, `P:usage:<day>`) and writes the job's one record. So a lost job lacks a
record or its end, a doubled one has two records, and one that ended twice is counted twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from redis.asyncio import Redis

from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.script_text import source

_PAGE = 1000
_SETTLE_ATTEMPTS = 120
_SETTLE_PAUSE_S = 0.5
_SHOWN = 5
SLOW_US = 10_000
"""Microseconds from which a command of Redis is noted."""
_MAX_SLOW = 2048
_SCRIPTS = ("submit", "take", "emit", "finish", "heartbeat", "sweep", "give_back", "ack", "attach", "detach", "cancel")


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool's counters and the states of all its jobs at one moment."""

    counts: Counter[str]
    states: dict[str, str]
    """The state of each job, with its error's code."""
    num_used: int
    """Ended jobs in the report of usage."""


async def view_of(redis: Redis, pool: str) -> PoolView:
    """Read a pool."""
    prefix, states = keys.prefix(pool), dict[str, str]()
    async for page in _pages(redis.scan_iter(f"{prefix}:job:*", count=_PAGE)):
        pipe = redis.pipeline(transaction=False)
        for key in page:
            pipe.hmget(key, "state", "code")
        for key, (state, code) in zip(page, await pipe.execute(), strict=True):
            job_id = key.decode().removeprefix(f"{prefix}:job:")
            states[job_id] = f"{(state or b'gone').decode()} {(code or b'').decode()}".strip()
    counts = {name.decode(): int(count) for name, count in (await _hash(redis, f"{prefix}:counts")).items()}
    num_used = 0
    async for key in redis.scan_iter(f"{prefix}:usage:*"):
        num_used += sum(int(count) for name, count in (await _hash(redis, key)).items() if name.endswith(b":jobs"))
    return PoolView(Counter(counts), states, num_used)


async def _hash(redis: Redis, key: str | bytes) -> dict[bytes, bytes]:
    return dict(await cast(Any, redis.hgetall(key)))


async def _pages(found: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    page: list[bytes] = []
    async for key in found:
        page.append(key)
        if len(page) == _PAGE:
            yield page
            page = []
    if page:
        yield page


def problems_of(
    before: PoolView,
    after: PoolView,
    num_jobs: int,
    *,
    job_ids: Collection[str] | None = None,
    refusals: Collection[str] = (),
) -> list[str]:
    """Return what contradicts that `num_jobs` jobs were accepted between two views and each was done exactly once.

    `job_ids`: the ids of these jobs, where their submitters know them. `refusals`: counters of refusals that may grow.
    """
    counts = after.counts - before.counts
    fresh = {job_id: state for job_id, state in after.states.items() if job_id not in before.states}
    problems = [f"{name}: {count}" for name, count in counts.items() if name[:7] == "refused" and name not in refusals]
    num_ended = sum(count for name, count in counts.items() if name.startswith("ended_"))
    numbers = {
        "accepted jobs": counts["submitted"],
        "records of jobs": len(fresh),
        "ends of jobs": num_ended,
        "ended jobs in the report of usage": after.num_used - before.num_used,
    }
    problems += [f"{name}: {number} instead of {num_jobs}" for name, number in numbers.items() if number != num_jobs]
    others = {job_id: state for job_id, state in fresh.items() if state != "succeeded"}
    if others:
        problems.append(f"{len(others)} jobs are not done: {dict(islice(others.items(), _SHOWN))}")
    if gone := before.states.keys() - after.states.keys():
        problems.append(f"{len(gone)} earlier records are gone")
    if job_ids is not None:
        if lost := set(job_ids) - fresh.keys():
            problems.append(f"{len(lost)} lost: {sorted(lost)[:_SHOWN]}")
        if strange := fresh.keys() - set(job_ids):
            problems.append(f"{len(strange)} doubled: {sorted(strange)[:_SHOWN]}")
    return problems


async def audited(redis: Redis, pool: str, *, num_attempts: int = _SETTLE_ATTEMPTS) -> list[str]:
    """Return the findings of an audit that are still there after the next heartbeats."""
    found: list[str] = []
    for _ in range(num_attempts):
        if not (found := [f"audit: {finding}" for finding in await audit(AdminBroker(redis), pool)]):
            break
        await asyncio.sleep(_SETTLE_PAUSE_S)
    return found[:_SHOWN]


class SlowCommands:
    """What blocked Redis for longer than SLOW_US since `start`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._names = {hashlib.sha1(source(name).encode()).hexdigest(): name for name in _SCRIPTS}

    async def start(self) -> None:
        """Forget what was noted."""
        settings = {"slowlog-log-slower-than": SLOW_US, "slowlog-max-len": _MAX_SLOW}
        for name, value in settings.items():
            await self._redis.config_set(name, value)
        await self._redis.slowlog_reset()
        await self._redis.config_resetstat()

    async def read(self) -> dict[str, tuple[int, float]]:
        """Return how often each script or command was slow, and the milliseconds of its longest run."""
        longest: dict[str, tuple[int, float]] = {}
        for entry in await self._redis.slowlog_get(_MAX_SLOW):
            words = entry["command"].split()
            name = self._names.get(words[1].decode(), "another script") if words[0].lower() == b"evalsha" else ""
            name = name or words[0].decode().lower()
            count, most = longest.get(name, (0, 0.0))
            longest[name] = count + 1, max(most, entry["duration"] / 1000)
        return longest


def shown(slow: dict[str, tuple[int, float]]) -> str:
    """Return the three slowest commands as a text."""
    slowest = sorted(slow.items(), key=lambda item: -item[1][1])[:3]
    return ", ".join(f"{name} {most:.0f} ms ({count}x)" for name, (count, most) in slowest) or "none"
