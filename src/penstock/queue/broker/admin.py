"""Operator access to a pool's queue: list pools, forget a pool, and read its keys for an audit."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from penstock.queue.broker.pool_scan import EXPIRY_MEMBER, JobSighting, KeyEntry, PoolScan, job_id_of
from penstock.queue.broker.pools import PoolList, keep_listed, name_of, pool_names, remove_junk, write_entry
from penstock.queue.record_fields import is_text, is_wrong_type, unless_wrong_type, whole
from penstock.queue.wire import WireError

MAX_ROWS = 32
"""Jobs, tenants or keys that one call checks, as in audit.lua. A call takes about 3 ms and blocks nodes meanwhile."""
MAX_STORED = 100_000
"""Stored keys of ended jobs that one read of about 40 ms adds up. With more keys, an audit does not check their sum."""
MAX_NAME_CHARS = 200
"""Characters of a name that a pool may serve."""
_SCAN_COUNT = 1000
_FOUND_BY_SCAN = ("tagged", "tag_counts", "bulk")
"""Kinds of keys that no other key lists. The script that forgets a pool gets their names."""
_MAX_FORGOTTEN = 100
"""Such keys that one call deletes."""
_NUMBER_OF_CONFIG = re.compile(rb"_ms$|^max_|^version$|^progress_chunks$|^incarnation$")
_SUM = re.compile(rb"-?\d{1,16}")
_REPAIR_RETRY_MS = 10_000
Sum = tuple[str, str]
"""(hash without the pool's prefix, field): a field that holds a sum over jobs."""


@dataclass(frozen=True, slots=True)
class Excess:
    """By how much a sum exceeds the sum over its jobs' records."""

    by: int
    fingerprint: int
    """Of the jobs that were read, and of what each adds to the sum."""
    is_lost: bool = False
    """Whether the stored sum is no number. Then `by` is what the sum over the records is, below 0."""


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
            for kind in _FOUND_BY_SCAN:
                names = list[str]()
                async for key in self._redis.scan_iter(f"{keys.prefix(pool)}:{kind}:*", count=_SCAN_COUNT):
                    names.append(key.decode().removeprefix(f"{keys.prefix(pool)}:"))
                    if len(names) == _MAX_FORGOTTEN:
                        await self._delete_unused(pool, *names)
                        names.clear()
                if names:
                    await self._delete_unused(pool, *names)
            await self._delete_unused(pool)
            await self._unannounce(pool)

    async def _delete_unused(self, pool: str, *names: str) -> None:
        """Delete these keys of an unused pool; without names, all that the script can name. Raises ConflictError."""
        answer = await scripts.call(self._redis, "forget", pool, *names)
        if answer[0] != b"OK":
            what = "live nodes" if answer[0] == b"NODES" else "open jobs"
            raise ConflictError(f"pool {pool} has {what}: {int(answer[1])}", code="pool_in_use", param="pool")

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
        return await PoolScan(self._redis, pool).run()

    async def check(
        self,
        pool: str,
        jobs: Sequence[tuple[str, Sequence[KeyEntry]]] = (),
        virtual_times: Sequence[tuple[str, str]] = (),
        idems: Sequence[str] = (),
        feeds: Sequence[str] = (),
        sums: Sequence[tuple[str, str, int, bool]] | None = None,
        *,
        repairer: str = "",
    ) -> list[tuple[str, str, str, str]]:
        """Compare jobs, virtual times, idempotency keys and lists of completions with the jobs' records.

        Returns disagreements as (name, key, id, detail). A call takes at most MAX_ROWS entries of each kind. With the
        id of a `repairer`, they are also corrected. `sums` are corrections (hash, field, by, whether the sum is lost).
        Raises NotFoundError for an unknown pool, BusyError while another audit repairs the pool.
        """
        asked = {"jobs": jobs, "virtual_times": virtual_times, "idems": idems, "feeds": feeds}
        return await self._check(pool, repairer, asked if sums is None else {**asked, "sums": sums})

    async def check_keys(self, pool: str, seen: JobSighting, *, repairer: str = "") -> list[tuple[str, str, str, str]]:
        """Report keys of another type, and members that name nothing, as `check` does; a repair deletes them."""
        rows = []
        for at in range(0, max(len(seen.wrong_types), len(seen.strays)), MAX_ROWS):
            part = slice(at, at + MAX_ROWS)
            asked = {"wrong_types": seen.wrong_types[part], "strays": seen.strays[part]}
            rows += await self._check(pool, repairer, {"jobs": (), "virtual_times": (), "idems": (), **asked})
        return rows

    async def _check(self, pool: str, repairer: str, asked: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
        answer = await scripts.call(self._redis, "audit", pool, repairer, scripts.packed(asked))
        if answer[0] == b"UNKNOWN_POOL":
            raise NotFoundError(f"no pool {pool}", code="model_not_found", param="pool")
        if answer[0] == b"BUSY":
            raise BusyError(f"another audit repairs pool {pool}", retry_after_ms=_REPAIR_RETRY_MS)
        scripts.log_ends(answer[2])
        return [tuple(_shown(part) for part in row) for row in answer[1]]  # type: ignore[misc]

    async def release(self, pool: str, repairer: str) -> None:
        """End the lock of a repairer."""
        await scripts.call(self._redis, "audit", pool, repairer, "release")

    async def damaged_config(self, pool: str) -> list[tuple[str, str]]:
        """Return names and values of the pool's settings that should be numbers and are none."""
        with translated():
            found = await unless_wrong_type(dict[bytes, bytes](), self._redis.hgetall, keys.config(pool))
        return [
            (_shown(name), _shown(value))
            for name, value in sorted(found.items())
            if _NUMBER_OF_CONFIG.search(name)
            and not _SUM.fullmatch(value)
            and not (value == b"" and name.startswith(b"max_wait_ms_"))  # not set
        ]

    async def excess_of_sums(self, pool: str) -> dict[Sum, Excess]:
        """Return by how much each stored sum exceeds the sum over the jobs' records; jobs may move meanwhile."""
        excess, lost, waiting, open_ids, running, stored = await self._sums(pool)
        fingerprints = dict.fromkeys(excess, 0)

        def subtract(name: str, of: str, subject: str, amount: int) -> None:
            where = (name, of)
            excess[where] -= amount
            fingerprints[where] = fingerprints.get(where, 0) ^ hash((subject, amount))

        for part in _pages(waiting):
            records = await self._records(part, "tenant", "level", "cost", "n", "may_use")
            for job_id, (tenant, level, cost, num_seqs, may_use) in zip(part, records, strict=True):
                subtract("backlog", level, job_id, _number(cost))
                queued = "queued_background" if is_background(_number(level)) else "queued"
                subtract(queued, tenant, job_id, _number(cost))
                subtract("tenant_tasks", tenant, job_id, num_seqs == "0")
                subtract("may_use", tenant, job_id, _number(may_use))
        for part in _pages(open_ids):
            for job_id, (tenant, held) in zip(part, await self._records(part, "tenant", "held"), strict=True):
                subtract("stored", tenant, job_id, _number(held))
        for part in _pages(running):
            records = await self._records(part, "tenant", "reserved", "may_use")
            for job_id, (tenant, reserved, may_use) in zip(part, records, strict=True):
                subtract("reserved", tenant, job_id, _number(reserved))
                subtract("may_use", tenant, job_id, _number(may_use))
        # More are not readable in one transaction, so not checked: in a busy pool, several reads would not agree.
        is_checked = len(stored) <= MAX_STORED
        for member in stored if is_checked else ():
            num_bytes, tenant, _ = member.split(" ", 2)
            subtract("stored", tenant, member, _number(num_bytes))
        return {
            where: Excess(by, fingerprints[where], where in lost)
            for where, by in excess.items()
            if is_checked or where[0] != "stored"
        }

    async def _sums(self, pool: str) -> tuple[Counter[Sum], set[Sum], list[str], list[str], list[str], list[str]]:
        """Read in one transaction: sums, which of them are no numbers, ids of queued, open and running jobs, and
        members of P:expiry. A key of another type counts as empty.
        """
        with translated():
            known = await unless_wrong_type(list[bytes](), self._redis.zrange, keys.nodes(pool), 0, -1)
            nodes = [node for node in known if is_text(node)]
            async with self._redis.pipeline(transaction=True) as pipe:
                for name in _SUMS:
                    pipe.hgetall(f"{keys.prefix(pool)}:{name}")
                pipe.zrange(keys.expiry(pool), 0, MAX_STORED)
                pipe.smembers(keys.open_jobs(pool))
                for level in range(NUM_LEVELS):
                    pipe.zrange(keys.waiting(pool, level), 0, -1)
                for node in nodes:
                    pipe.smembers(f"{keys.prefix(pool)}:running:{node.decode()}")
                answers = await pipe.execute(raise_on_error=False)
        found = [[] if is_wrong_type(one) else one for one in answers]
        if failed := next((one for one in found if isinstance(one, Exception)), None):
            raise failed
        hashes, (stored, open_ids, *waiting) = found[: len(_SUMS)], found[len(_SUMS) : len(found) - len(nodes)]
        kept = zip(_SUMS, hashes, strict=True)
        listed = {
            (name, f.decode()): value for name, fields in kept for f, value in dict(fields or {}).items() if is_text(f)
        }
        lost = {where for where, value in listed.items() if _SUM.fullmatch(value) is None}
        sums = Counter({where: 0 if where in lost else int(value) for where, value in listed.items()})
        members = [member.decode() for member in stored if EXPIRY_MEMBER.fullmatch(member)]
        return (
            *(sums, lost, _ids_in(waiting), _ids_in([open_ids])),
            *(_ids_in(found[len(found) - len(nodes) :]), members),
        )

    async def _records(self, job_ids: Sequence[str], *names: str) -> list[list[str]]:
        """Return the named fields of these jobs' records, '' for an absent field."""
        with translated():
            no_record = [b""] * len(names)
            reads = (unless_wrong_type(no_record, self._redis.hmget, keys.job(i), names) for i in job_ids)
            found = await asyncio.gather(*reads)
        return [[(value or b"").decode(errors="replace") for value in values] for values in found]

    async def histories(self, job_ids: Sequence[str]) -> list[JobHistory]:
        """Return the histories of these jobs."""
        with translated():
            return list(await asyncio.gather(*map(self._history, job_ids)))

    async def _history(self, job_id: str) -> JobHistory:
        redis = cast(Any, self._redis)
        ((state, code, message, param),), log, result = await asyncio.gather(
            self._records([job_id], "state", "code", "message", "param"),
            unless_wrong_type(list[bytes](), redis.lrange, keys.log(job_id), 0, -1),
            unless_wrong_type(cast(bytes | None, None), redis.get, keys.result(job_id)),
        )
        outcome = Outcome(cast(Any, state), code, message, param) if state in TERMINAL_STATES else None
        return JobHistory(job_id, outcome, tuple(log), result)

    async def pressure(self, pool: str) -> list[NodePressure]:
        """Return the last pressure records of the pool's nodes."""
        with translated():
            records = await unless_wrong_type(list[bytes](), self._redis.hvals, keys.pressure(pool))
        readable = []
        for record in records:
            # Its node writes an unreadable record again with its next heartbeat.
            with suppress(WireError):
                readable.append(wire.decode_pressure(record))
        return readable


def _pages(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (job_ids[at : at + MAX_ROWS] for at in range(0, len(job_ids), MAX_ROWS))


def _ids_in(lists: Sequence[Sequence[bytes]]) -> list[str]:
    found = (job_id_of(member) for members in lists for member in members)
    return [job_id for job_id in found if job_id is not None]


def _number(text: str) -> int:
    return whole(text)


def _shown(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
