"""Operator access to a pool's queue: list pools, forget a pool, and read its keys for an audit."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.contract.errors import BusyError, ConflictError, NotFoundError, RequestError
from penstock.contract.output import TERMINAL_STATES, Outcome
from penstock.contract.pool import NodePressure, PoolEntry, PoolRecord
from penstock.contract.priority import NUM_LEVELS, is_background
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import translated
from penstock.queue.broker.pools import PoolList, keep_listed, name_of, pool_names, remove_junk, write_entry
from penstock.queue.wire import WireError

MAX_ROWS = 32
"""Jobs, tenants or keys that one call checks, as in audit.lua. A call takes about 3 ms and blocks nodes meanwhile."""
MAX_STORED = 100_000
"""Stored keys of ended jobs that one read of about 40 ms adds up. With more keys, an audit does not check their sum."""
MAX_NAME_CHARS = 200
"""Characters of a name that a pool may serve."""
_SCAN_COUNT = 1000
_OF_TENANT = frozenset(("awaiting", "may_use", "delayed"))
"""Their keys without a tenant list tenants."""
_ZSETS_OF_JOBS = _OF_TENANT | {"waiting", "tasks", "deadlines", "dead_letters"}
_PER_JOB = frozenset(("job", "request", "log", "result", "response", "metadata"))
_REPAIR_RETRY_MS = 10_000
KeyEntry = tuple[str, str]
"""(key without the pool's prefix, entry): the stream entry or the expiry member that names a job, '' in other keys."""
Sum = tuple[str, str]
"""(hash without the pool's prefix, field): a field that holds a sum over jobs."""


@dataclass(frozen=True, slots=True)
class Excess:
    """By how much a sum exceeds the sum over its jobs' records."""

    by: int
    fingerprint: int
    """Of the jobs that were read, and of what each adds to the sum."""


@dataclass(frozen=True, slots=True)
class JobSighting:
    """All places in a pool that name a job, and all tenants with a queue or a virtual time."""

    # Of one request.
    jobs: dict[str, list[KeyEntry]] = field(default_factory=dict)
    virtual_times: set[tuple[str, str]] = field(default_factory=set)
    """(level, tenant)"""
    idems: list[str] = field(default_factory=list)
    """Idempotency keys, without the pool's prefix."""
    feeds: set[str] = field(default_factory=set)
    """Tenants with completions."""


@dataclass(frozen=True, slots=True)
class JobHistory:
    """A job's outcome, log and packed result, as far as they are still stored."""

    job_id: str
    outcome: Outcome | None
    log: tuple[bytes, ...]
    result: bytes | None


_SUMS = ("backlog", "queued", "queued_background", "tenant_tasks", "stored", "reserved", "may_use")
"""The hashes of sums over jobs, by their names without the pool's prefix."""


class AdminBroker:
    """The operator's side of the queue. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def pools(self) -> list[str]:
        """Return the names of all listed pools."""
        with translated():
            return await pool_names(self._redis)

    async def allow(self, pool: str, names: Sequence[str] | None) -> None:
        """List a pool, which may then serve these names beside its own; None: all names that its nodes announce.

        Raises RequestError for a wrong name.
        """
        for name in (pool, *(names or ())):
            if not 0 < len(name) <= MAX_NAME_CHARS:
                raise RequestError(f"a name has 1 to {MAX_NAME_CHARS} characters", param="name")
        if name_of(pool.encode()) is None:
            raise RequestError(f"{pool!r} is not a pool's name", param="pool")
        with translated():
            await write_entry(self._redis, PoolEntry(pool, None if names is None else tuple(names)))

    async def declare(self, record: PoolRecord, config: Mapping[str, int | str]) -> bool:
        """Make a pool that no node has joined, with its record and its settings, and list it.

        Return False for a pool that existed: it stays as it is. Raises RequestError for a wrong name.
        """
        if name_of(record.pool.encode()) is None:
            raise RequestError(f"{record.pool!r} is not a pool's name", param="pool")
        pairs = [item for name, value in config.items() for item in (name, value)]
        answer = await scripts.call(self._redis, "declare", record.pool, wire.encode_record(record), *pairs)
        with translated():
            await keep_listed(self._redis, record.pool)
        return bool(answer[0] == b"OK")

    async def repair(self) -> list[str]:
        """Mend the list of pools and the pools' records. Return what was done, one sentence each.

        Fields that are no pool's name are removed. A damaged entry of a pool with keys allows its own name alone from
        then on. A damaged record is deleted: a living node writes it again within seconds.
        """
        with translated():
            done = list[str]()
            for name, listed in (await PoolList(self._redis).read()).items():
                has_record = await self._has_record(name)
                if listed.is_damaged and (has_record or await self._redis.exists(keys.config(name))):
                    await write_entry(self._redis, listed.entry)
                    done.append(
                        f"{name}: its entry was damaged; it may serve its own name alone (`penstock pools allow`)"
                    )
                if has_record is None:
                    await self._redis.delete(keys.record(name))
                    done.append(f"{name}: its record was damaged and is deleted; its nodes write it again")
            if num_removed := await remove_junk(self._redis, math.inf):
                done.append(f"{num_removed} fields that are not pools were removed from the list")
            return done

    async def _has_record(self, pool: str) -> bool | None:
        """Return whether a pool has a record, None for a damaged one."""
        try:
            data = await self._redis.get(keys.record(pool))
            return (data is not None and wire.decode_pool(cast(bytes, data)).pool == pool) or (None if data else False)
        except (WireError, ResponseError):
            return None

    async def forget(self, pool: str) -> None:
        """Remove a pool without live nodes and open jobs, and its list of dead letters.

        Results stay until they expire. A node that joins the pool later creates it anew. Raises NotFoundError for an
        unknown pool, ConflictError if the pool has live nodes or open jobs.
        """
        with translated():
            if not await cast(Any, self._redis.hexists(keys.POOLS, pool)):
                raise NotFoundError(f"no pool {pool}", code="model_not_found", param="pool")
            answer = await scripts.call(self._redis, "forget", pool)
            if answer[0] != b"OK":
                what = "live nodes" if answer[0] == b"NODES" else "open jobs"
                raise ConflictError(f"pool {pool} has {what}: {int(answer[1])}", code="pool_in_use", param="pool")
            for kind in ("tagged", "bulk"):
                async for key in self._redis.scan_iter(f"{keys.prefix(pool)}:{kind}:*", count=_SCAN_COUNT):
                    await self._redis.delete(key)
            await self._unannounce(pool)

    async def _unannounce(self, pool: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(keys.POOLS, pool)
            pipe.hdel(keys.POOLS, pool)
            record, _ = await pipe.execute()
        # A node may have joined after the script found the pool empty.
        if record is not None and await self._redis.exists(keys.config(pool)):
            await cast(Any, self._redis.hsetnx(keys.POOLS, pool, record))

    async def scan_jobs(self, pool: str) -> JobSighting:
        """Scan all keys of a pool without blocking Redis. Jobs that move meanwhile may be missed."""
        seen = JobSighting()
        prefix = f"{keys.prefix(pool)}:"
        with translated():
            async for key in cast(AsyncIterator[bytes], self._redis.scan_iter(f"{prefix}*", count=_SCAN_COUNT)):
                await self._scan_key(key.decode().removeprefix(prefix), key, seen)
        return seen

    async def _scan_key(self, name: str, key: bytes, seen: JobSighting) -> None:
        redis = cast(Any, self._redis)
        kind, _, rest = name.partition(":")
        if kind in _PER_JOB:
            seen.jobs.setdefault(rest, [])
        elif kind == "idem":
            seen.idems.append(name)
        elif kind == "virtual_time":
            seen.virtual_times.update((rest, tenant.decode()) for tenant in await redis.zrange(key, 0, -1))
        elif kind == "queue":
            seen.virtual_times.add(_level_and_tenant(rest))
            for entry, fields in await redis.xrange(key):
                seen.jobs.setdefault(fields[b"id"].decode(), []).append((name, entry.decode()))
        elif kind == "requeued":
            seen.virtual_times.add(_level_and_tenant(rest))
            _note(seen, name, await redis.zrange(key, 0, -1))
        elif kind in _ZSETS_OF_JOBS and (rest or kind not in _OF_TENANT):
            _note(seen, name, await redis.zrange(key, 0, -1))
        elif kind in ("jobs", "tagged", "expiry", "ended"):
            await self._scan_ended(name, key, seen)
        elif kind in ("open", "tenant", "running"):
            _note(seen, name, await redis.smembers(key))

    async def _scan_ended(self, name: str, key: bytes, seen: JobSighting) -> None:
        """Scan a zset that lists ended jobs too, by their ids or as members of P:expiry; or a tenant's completions."""
        if name.startswith("ended"):
            tenant = name.removeprefix("ended").removeprefix(":")
            listed = [] if tenant else await cast(Any, self._redis).zrange(key, 0, -1)
            seen.feeds.update([tenant] if tenant else [member.decode() for member in listed])
            return
        async for member, _ in cast(Any, self._redis).zscan_iter(key, count=_SCAN_COUNT):
            if name != "expiry":
                _note(seen, name, [member])
                continue
            _, _, stored = member.decode().split(" ", 2)
            seen.jobs.setdefault(stored.split(" ", 1)[0].partition(":")[2], []).append((name, member.decode()))

    async def check(
        self,
        pool: str,
        jobs: Sequence[tuple[str, Sequence[KeyEntry]]] = (),
        virtual_times: Sequence[tuple[str, str]] = (),
        idems: Sequence[str] = (),
        feeds: Sequence[str] = (),
        sums: Sequence[tuple[str, str, int]] | None = None,
        *,
        repairer: str = "",
    ) -> list[tuple[str, str, str, str]]:
        """Compare jobs, virtual times, idempotency keys and lists of completions with the jobs' records.

        Returns disagreements as (name, key, id, detail). A call takes at most MAX_ROWS entries of each kind. With the
        id of a `repairer`, they are also corrected; its last call passes the corrections of `sums` (hash, field, by).
        Raises NotFoundError for an unknown pool, BusyError while another audit repairs the pool.
        """
        asked = scripts.packed(
            {"jobs": jobs, "virtual_times": virtual_times, "idems": idems, "feeds": feeds}
            | ({} if sums is None else {"sums": sums})
        )
        answer = await scripts.call(self._redis, "audit", pool, repairer, asked)
        if answer[0] == b"UNKNOWN_POOL":
            raise NotFoundError(f"no pool {pool}", code="model_not_found", param="pool")
        if answer[0] == b"BUSY":
            raise BusyError(f"another audit repairs pool {pool}", retry_after_ms=_REPAIR_RETRY_MS)
        return [tuple(str(cast(bytes, part).decode()) for part in row) for row in answer[1]]  # type: ignore[misc]

    async def excess_of_sums(self, pool: str) -> dict[Sum, Excess]:
        """Return by how much each stored sum exceeds the sum over the jobs' records; jobs may move meanwhile."""
        excess, waiting, open_ids, running, stored = await self._sums(pool)
        fingerprints = dict.fromkeys(excess, 0)

        def subtract(name: str, of: str, subject: str, amount: int) -> None:
            where = (name, of)
            excess[where] -= amount
            fingerprints[where] = fingerprints.get(where, 0) ^ hash((subject, amount))

        for part in _pages(waiting):
            records = await self._records(part, "tenant", "level", "cost", "n", "may_use")
            for job_id, (tenant, level, cost, num_seqs, may_use) in zip(part, records, strict=True):
                subtract("backlog", level, job_id, int(cost or 0))
                queued = "queued_background" if is_background(int(level or 0)) else "queued"
                subtract(queued, tenant, job_id, int(cost or 0))
                subtract("tenant_tasks", tenant, job_id, num_seqs == "0")
                subtract("may_use", tenant, job_id, int(may_use or 0))
        for part in _pages(open_ids):
            for job_id, (tenant, held) in zip(part, await self._records(part, "tenant", "held"), strict=True):
                subtract("stored", tenant, job_id, int(held or 0))
        for part in _pages(running):
            records = await self._records(part, "tenant", "reserved", "may_use")
            for job_id, (tenant, reserved, may_use) in zip(part, records, strict=True):
                subtract("reserved", tenant, job_id, int(reserved or 0))
                subtract("may_use", tenant, job_id, int(may_use or 0))
        if len(stored) > MAX_STORED:
            # Not readable in one transaction, so not checked: in a busy pool, several reads would not agree.
            return {where: Excess(by, fingerprints[where]) for where, by in excess.items() if where[0] != "stored"}
        for member in stored:
            num_bytes, tenant, _ = member.split(" ", 2)
            subtract("stored", tenant, member, int(num_bytes))
        return {where: Excess(by, fingerprints[where]) for where, by in excess.items()}

    async def _sums(self, pool: str) -> tuple[Counter[Sum], list[str], list[str], list[str], list[str]]:
        """Read in one transaction: sums, ids of queued, open and running jobs, and members of P:expiry."""
        with translated():
            nodes = await self._redis.zrange(keys.nodes(pool), 0, -1)
            async with self._redis.pipeline(transaction=True) as pipe:
                for name in _SUMS:
                    pipe.hgetall(f"{keys.prefix(pool)}:{name}")
                pipe.zrange(keys.expiry(pool), 0, MAX_STORED)
                pipe.smembers(keys.open_jobs(pool))
                for level in range(NUM_LEVELS):
                    pipe.zrange(keys.waiting(pool, level), 0, -1)
                for node in nodes:
                    pipe.smembers(f"{keys.prefix(pool)}:running:{cast(bytes, node).decode()}")
                found = await pipe.execute()
        hashes, (stored, open_ids, *waiting) = found[: len(_SUMS)], found[len(_SUMS) : len(found) - len(nodes)]
        kept = zip(_SUMS, hashes, strict=True)
        running_ids = [i.decode() for ids in found[len(found) - len(nodes) :] for i in ids]
        sums = Counter({(name, f.decode()): int(value) for name, fields in kept for f, value in fields.items()})
        waiting_ids = [i.decode() for ids in waiting for i in ids]
        return sums, waiting_ids, [i.decode() for i in open_ids], running_ids, [member.decode() for member in stored]

    async def _records(self, job_ids: Sequence[str], *names: str) -> list[list[str]]:
        """Return the named fields of these jobs' records, '' for an absent field."""
        with translated():
            found = await asyncio.gather(*(cast(Any, self._redis.hmget(keys.job(i), names)) for i in job_ids))
        return [[(value or b"").decode() for value in values] for values in found]

    async def histories(self, job_ids: Sequence[str]) -> list[JobHistory]:
        """Return the histories of these jobs."""
        with translated():
            return list(await asyncio.gather(*map(self._history, job_ids)))

    async def _history(self, job_id: str) -> JobHistory:
        redis = cast(Any, self._redis)
        ((state, code, message, param),), log, result = await asyncio.gather(
            self._records([job_id], "state", "code", "message", "param"),
            redis.lrange(keys.log(job_id), 0, -1),
            redis.get(keys.result(job_id)),
        )
        outcome = Outcome(cast(Any, state), code, message, param) if state in TERMINAL_STATES else None
        return JobHistory(job_id, outcome, tuple(log), result)

    async def pressure(self, pool: str) -> list[NodePressure]:
        """Return the last pressure records of the pool's nodes."""
        with translated():
            records = await cast(Any, self._redis.hvals(keys.pressure(pool)))
        readable = []
        for record in records:
            # Its node writes an unreadable record again with its next heartbeat.
            with suppress(WireError):
                readable.append(wire.decode_pressure(record))
        return readable


def _level_and_tenant(rest: str) -> tuple[str, str]:
    level, _, tenant = rest.partition(":")
    return level, tenant


def _pages(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (job_ids[at : at + MAX_ROWS] for at in range(0, len(job_ids), MAX_ROWS))


def _note(seen: JobSighting, name: str, members: Sequence[bytes]) -> None:
    for member in members:
        seen.jobs.setdefault(member.decode(), []).append((name, ""))
