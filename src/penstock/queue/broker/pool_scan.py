"""A scan of all keys of a pool: where its jobs are named, and which keys and members are damaged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.job import is_job_id
from penstock.queue import keys
from penstock.queue.broker.connection import translated
from penstock.queue.record_fields import is_text

TYPES = {
    name: kind
    for kind, names in {
        "hash": "adapters backlog background_turns bulk config counts ended_before head_served hour_usage job lengths "
        "paces paused pressure queued queued_background rate recent_use refused reservations reserved schema "
        "seats stored tag_counts tenant_tasks untold_sizes usage used",
        "list": "log paced profile",
        "set": "keyed keys open running tenant",
        "stream": "queue untold",
        "string": "audit idem last_take left metadata record request response result virtual_clock",
        "zset": "awaiting bulks dead_letters deadlines debt delayed events expiry free jobs node_events nodes readers "
        "requeued revisions tagged tasks virtual_time waiting",
    }.items()
    for name in names.split()
}
"""The types of a pool's keys, by the part of their name behind the pool's prefix."""
TYPES_BY_TENANT = {"ended": ("zset", "stream"), "may_use": ("hash", "zset")}
"""Those of names that are two keys: the first without a tenant, the second with one."""
EXPIRY_MEMBER = re.compile(rb"\d{1,16} [\w-]+ [a-z]+:[\w.-]+( \S+)*")
"""A member of P:expiry."""
_SCAN_COUNT = 1000
_OF_TENANT = frozenset(("awaiting", "may_use", "delayed"))
"""Their keys without a tenant list tenants."""
_ZSETS_OF_JOBS = _OF_TENANT | {"requeued", "waiting", "tasks", "deadlines", "dead_letters", "jobs", "tagged"}
_PER_JOB = frozenset(("job", "request", "log", "result", "response", "metadata"))
KeyEntry = tuple[str, str]
"""(key without the pool's prefix, entry): the stream entry or the expiry member that names a job, '' in other keys."""


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
    wrong_types: list[tuple[str, str]] = field(default_factory=list)
    """Keys of another type, with the one that they should have."""
    strays: list[tuple[str, bytes]] = field(default_factory=list)
    """(key, member): members that name no job and no tenant."""
    foreign: list[str] = field(default_factory=list)
    """Keys whose name is no text."""

    @property
    def unreadable(self) -> set[str]:
        """The jobs whose record is no hash."""
        return {name.removeprefix("job:") for name, _ in self.wrong_types if name.startswith("job:")}


class PoolScan:
    """Scans the keys of a pool without blocking Redis. Jobs that move meanwhile may be missed."""

    def __init__(self, redis: Redis, pool: str) -> None:
        self._redis = cast(Any, redis)
        self._prefix = f"{keys.prefix(pool)}:"
        self._seen = JobSighting()

    async def run(self) -> JobSighting:
        """Return what was seen. Raises UnavailableError."""
        cursor = -1
        with translated():
            while cursor:
                cursor, page = await self._redis.scan(max(0, cursor), match=f"{self._prefix}*", count=_SCAN_COUNT)
                async with self._redis.pipeline(transaction=False) as pipe:
                    for key in page:
                        pipe.type(key)
                    types = await pipe.execute()
                for key, kind in zip(page, types, strict=True):
                    if not is_text(key):
                        self._seen.foreign.append(repr(key)[2:-1])
                    elif kind != b"none":
                        await self._scan(key.decode().removeprefix(self._prefix), kind.decode(), key)
        return self._seen

    async def _scan(self, name: str, kind: str, key: bytes) -> None:
        head, _, rest = name.partition(":")
        wanted = TYPES_BY_TENANT[head][bool(rest)] if head in TYPES_BY_TENANT else TYPES.get(head, kind)
        if kind != wanted:
            self._seen.wrong_types.append((name, wanted))
        if head in _PER_JOB:
            self._seen.jobs.setdefault(rest, [])
        elif kind != wanted:
            return
        elif head == "idem":
            self._seen.idems.append(name)
        elif head in ("virtual_time", "ended"):
            await self._scan_tenants(name, key)
        elif head == "queue":
            await self._scan_stream(name, key)
        elif head == "expiry":
            await self._scan_expiry(name, key)
        elif head in ("open", "tenant", "running", "keyed"):
            self._note(name, await self._redis.smembers(key))
        elif head in _ZSETS_OF_JOBS and (rest or head not in _OF_TENANT):
            await self._scan_ids(name, key)

    async def _scan_tenants(self, name: str, key: bytes) -> None:
        """Scan the tenants with a virtual time of a level, those with completions, or a tenant's completions."""
        kind, _, rest = name.partition(":")
        listed = [rest.encode()] if kind == "ended" and rest else await self._redis.zrange(key, 0, -1)
        for tenant in listed:
            if not is_text(tenant):
                self._seen.strays.append((name, tenant))
            elif kind == "ended":
                self._seen.feeds.add(tenant.decode())
            else:
                self._seen.virtual_times.add((rest, tenant.decode()))

    async def _scan_stream(self, name: str, key: bytes) -> None:
        self._seen.virtual_times.add(_level_and_tenant(name))
        for entry, fields in await self._redis.xrange(key):
            if (job_id := job_id_of(fields.get(b"id", b""))) is None:
                self._seen.strays.append((name, entry))
            else:
                self._seen.jobs.setdefault(job_id, []).append((name, entry.decode()))

    async def _scan_ids(self, name: str, key: bytes) -> None:
        if name.startswith("requeued:"):
            self._seen.virtual_times.add(_level_and_tenant(name))
        async for member, _ in self._redis.zscan_iter(key, count=_SCAN_COUNT):
            self._note(name, [member])

    async def _scan_expiry(self, name: str, key: bytes) -> None:
        async for member, _ in self._redis.zscan_iter(key, count=_SCAN_COUNT):
            if EXPIRY_MEMBER.fullmatch(member) is None:
                self._seen.strays.append((name, member))
                continue
            _, _, stored = member.decode().split(" ", 2)
            job_id = stored.split(" ", 1)[0].partition(":")[2]
            self._seen.jobs.setdefault(job_id, []).append((name, member.decode()))

    def _note(self, name: str, members: Sequence[bytes]) -> None:
        for member in members:
            if (job_id := job_id_of(member)) is None:
                self._seen.strays.append((name, member))
            else:
                self._seen.jobs.setdefault(job_id, []).append((name, ""))


def _level_and_tenant(name: str) -> tuple[str, str]:
    _, level, tenant = name.split(":", 2)
    return level, tenant


def job_id_of(member: bytes) -> str | None:
    """Return the id of a job, None if this is none."""
    text = member.decode(errors="replace")
    return text if is_job_id(text) else None
