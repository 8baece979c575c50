"""What an operator asks of a pool's queue: what stands where, and whether the jobs' records agree."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.errors import BusyError, ConflictError, NotFoundError
from penstock.contract.job import TERMINAL_STATES, Outcome
from penstock.contract.priority import NUM_PRIORITIES
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import translated
from penstock.queue.wire import NodePressure

MAX_ROWS = 32
"""Of audit.lua: jobs, tenants and keys that one call looks at, in about 3 ms; nodes wait for it meanwhile."""
MAX_STORED = 100_000
"""Keys of ended jobs whose bytes are added up, in one read of about 40 ms; of more, an audit does not judge the sum."""
_SCAN_COUNT = 1000
_PER_JOB = frozenset(("job", "in", "log", "out"))
_REPAIR_AGAIN_MS = 10_000

Place = tuple[str, str]
"""A key without its pool's prefix, and the stream entry there, '' where it is no stream."""
Sum = tuple[str, str]
"""A hash without its pool's prefix, and a field of it that holds a sum over queued jobs."""


@dataclass(frozen=True, slots=True)
class JobSighting:
    """Everything of a pool that names a job, and every tenant with a queue or a turn."""

    jobs: dict[str, list[Place]] = field(default_factory=dict)
    turns: set[tuple[str, str]] = field(default_factory=set)
    """(class, tenant)"""
    idems: list[str] = field(default_factory=list)
    """Idempotency keys, without the pool's prefix."""


@dataclass(frozen=True, slots=True)
class JobHistory:
    """What a job has said: its log and its packed result, as far as they still live."""

    job_id: str
    outcome: Outcome | None
    log: tuple[bytes, ...]
    result: bytes | None


class AdminBroker:
    """The operator's side of the queue. Raises UnavailableError when Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def pools(self) -> list[str]:
        """Names of all pools that were ever announced."""
        with translated():
            return sorted(name.decode() for name in await cast(Any, self._redis.hkeys(keys.POOLS)))

    async def forget(self, pool: str) -> None:
        """Removes a pool that has neither live nodes nor open jobs: nobody hears of it or of its dead letters any more;
        results live out their time. A node that joins it begins it anew.

        Raises NotFoundError for an unknown pool, ConflictError where somebody still needs it.
        """
        with translated():
            if not await cast(Any, self._redis.hexists(keys.POOLS, pool)):
                raise NotFoundError(f"no pool {pool}", code="model_not_found", param="pool")
            answer = await scripts.call(self._redis, "forget", pool)
            if answer[0] != b"OK":
                what = "live nodes" if answer[0] == b"NODES" else "open jobs"
                raise ConflictError(f"pool {pool} has {what}: {int(answer[1])}", code="pool_in_use", param="pool")
            await self._unannounce(pool)

    async def _unannounce(self, pool: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(keys.POOLS, pool)
            pipe.hdel(keys.POOLS, pool)
            told, _ = await pipe.execute()
        # A node may have joined since the pool was empty.
        if told is not None and await self._redis.exists(keys.schema(pool)):
            await cast(Any, self._redis.hsetnx(keys.POOLS, pool, told))

    async def look(self, pool: str) -> JobSighting:
        """Walks over all keys of a pool, without holding anybody up; what moves meanwhile is seen or not."""
        seen = JobSighting()
        prefix = f"{keys.prefix(pool)}:"
        with translated():
            async for key in cast(AsyncIterator[bytes], self._redis.scan_iter(f"{prefix}*", count=_SCAN_COUNT)):
                await self._look_at(key.decode().removeprefix(prefix), key, seen)
        return seen

    async def _look_at(self, name: str, key: bytes, seen: JobSighting) -> None:
        redis = cast(Any, self._redis)
        kind, _, rest = name.partition(":")
        if kind in _PER_JOB:
            seen.jobs.setdefault(rest, [])
        elif kind == "idem":
            seen.idems.append(name)
        elif kind == "turn":
            seen.turns.update((rest, tenant.decode()) for tenant in await redis.zrange(key, 0, -1))
        elif kind == "q":
            seen.turns.add(_class_and_tenant(rest))
            for entry, fields in await redis.xrange(key):
                seen.jobs.setdefault(fields[b"id"].decode(), []).append((name, entry.decode()))
        elif kind in ("back", "wait", "due", "later", "dead"):
            if kind == "back":
                seen.turns.add(_class_and_tenant(rest))
            _note(seen, name, await redis.zrange(key, 0, -1))
        elif kind == "expiry":
            await self._look_at_stored(name, key, seen)
        elif kind in ("open", "tenant", "run"):
            _note(seen, name, await redis.smembers(key))

    async def _look_at_stored(self, name: str, key: bytes, seen: JobSighting) -> None:
        async for member, _ in cast(Any, self._redis).zscan_iter(key, count=_SCAN_COUNT):
            _, _, stored = member.decode().split(" ", 2)
            seen.jobs.setdefault(stored.partition(":")[2], []).append((name, member.decode()))

    async def check(
        self,
        pool: str,
        jobs: Sequence[tuple[str, Sequence[Place]]] = (),
        turns: Sequence[tuple[str, str]] = (),
        idems: Sequence[str] = (),
        sums: Sequence[tuple[str, str, int]] | None = None,
        *,
        repairer: str = "",
    ) -> list[tuple[str, str, str, str]]:
        """Disagreements as (name, key, id, detail), at most MAX_ROWS of each kind a call; with a `repairer`'s
        name they are mended; its last call brings the corrections of `sums` (hash, field, by).

        Raises NotFoundError for an unknown pool, BusyError while another repairer is at work.
        """
        asked = scripts.packed(
            {"jobs": jobs, "turns": turns, "idems": idems} | ({} if sums is None else {"sums": sums})
        )
        answer = await scripts.call(self._redis, "audit", pool, repairer, asked)
        if answer[0] == b"UNKNOWN_POOL":
            raise NotFoundError(f"no pool {pool}", code="model_not_found", param="pool")
        if answer[0] == b"BUSY":
            raise BusyError(f"another audit repairs pool {pool}", retry_after_ms=_REPAIR_AGAIN_MS)
        return [tuple(str(cast(bytes, part).decode()) for part in row) for row in answer[1]]  # type: ignore[misc]

    async def excess_of_sums(self, pool: str) -> dict[Sum, int]:
        """By how much each sum over jobs exceeds what their records add up to; jobs may move meanwhile."""
        excess, waiting, open_ids, stored = await self._sums(pool)
        for part in _pages(waiting):
            for tenant, priority, cost in await self._records(part, "tenant", "p", "cost"):
                excess["backlog", priority] -= int(cost or 0)
                excess["queued", tenant] -= int(cost or 0)
        for part in _pages(open_ids):
            for priority, num_bytes, tenant, owned in await self._records(part, "p", "bytes", "tenant", "owned"):
                excess["bytes", priority] -= int(num_bytes or 0)
                excess["kept", tenant] -= int(num_bytes or 0) if owned else 0
        if len(stored) > MAX_STORED:
            # What a call cannot read at one moment is not judged: the reads of a busy pool would not agree.
            return {where: by for where, by in excess.items() if where[0] != "kept"}
        for member in stored:
            num_bytes, tenant, _ = member.split(" ", 2)
            excess["kept", tenant] -= int(num_bytes)
        return dict(excess)

    async def _sums(self, pool: str) -> tuple[Counter[Sum], list[str], list[str], list[str]]:
        """The sums as they are kept, the queued jobs, the open ones and what is stored of ended ones, of one moment."""
        with translated():
            async with self._redis.pipeline(transaction=True) as pipe:
                for key in (keys.backlog(pool), keys.queued(pool), keys.promised_bytes(pool), keys.kept_bytes(pool)):
                    pipe.hgetall(key)
                pipe.zrange(keys.expiry(pool), 0, MAX_STORED)
                pipe.smembers(keys.open_jobs(pool))
                for priority in range(NUM_PRIORITIES):
                    pipe.zrange(keys.waiting(pool, priority), 0, -1)
                backlog, queued, num_bytes, kept_bytes, stored, open_ids, *waiting = await pipe.execute()
        kept = {"backlog": backlog, "queued": queued, "bytes": num_bytes, "kept": kept_bytes}
        sums = Counter({(name, f.decode()): int(value) for name, fields in kept.items() for f, value in fields.items()})
        waiting_ids = [i.decode() for ids in waiting for i in ids]
        return sums, waiting_ids, [i.decode() for i in open_ids], [member.decode() for member in stored]

    async def _records(self, job_ids: Sequence[str], *names: str) -> list[list[str]]:
        """Fields of these jobs' records, '' where there is none."""
        with translated():
            found = await asyncio.gather(*(cast(Any, self._redis.hmget(keys.job(i), names)) for i in job_ids))
        return [[(value or b"").decode() for value in values] for values in found]

    async def stories(self, job_ids: Sequence[str]) -> list[JobHistory]:
        """What these jobs have said."""
        with translated():
            return list(await asyncio.gather(*map(self._story, job_ids)))

    async def _story(self, job_id: str) -> JobHistory:
        redis = cast(Any, self._redis)
        ((state, code, message, param),), log, result = await asyncio.gather(
            self._records([job_id], "state", "code", "message", "param"),
            redis.lrange(keys.log(job_id), 0, -1),
            redis.get(keys.result(job_id)),
        )
        outcome = Outcome(cast(Any, state), code, message, param) if state in TERMINAL_STATES else None
        return JobHistory(job_id, outcome, tuple(log), result)

    async def pressure(self, pool: str) -> list[NodePressure]:
        """What the pool's nodes last said of themselves."""
        with translated():
            records = await cast(Any, self._redis.hvals(keys.pressure(pool)))
        return [wire.decode_pressure(record) for record in records]


def _class_and_tenant(rest: str) -> tuple[str, str]:
    priority, _, tenant = rest.partition(":")
    return priority, tenant


def _pages(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (job_ids[at : at + MAX_ROWS] for at in range(0, len(job_ids), MAX_ROWS))


def _note(seen: JobSighting, name: str, members: Sequence[bytes]) -> None:
    for member in members:
        seen.jobs.setdefault(member.decode(), []).append((name, ""))
