"""Pools: their names, their statistics and their latest events."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import islice
from typing import Any, cast

from redis import exceptions
from redis.asyncio import Redis

from penstock.contract.fields import NAME_PATTERN
from penstock.contract.pauses import Pause
from penstock.contract.pool import (
    EVENTS,
    LiveNode,
    PoolActivity,
    PoolEntry,
    PoolEvent,
    PoolRecord,
    PoolStats,
    RedisState,
)
from penstock.contract.priority import NUM_LEVELS
from penstock.queue import keys, wire
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.jobs import CLOCK_FIELDS, LEASE_MS, pool_ms
from penstock.queue.broker.queue_state import QueueReader, queue_state
from penstock.queue.record_fields import executed, is_wrong_type, sums_of, unless_wrong_type, whole
from penstock.queue.wire import WireError

# The list of pools in penstock:pools. It is a hint: a listed name is a pool only if it has a record.
#
# Only operators and nodes that may write every pool write the list. It also says which names a pool may serve beside
# its own, so a node whose rules confine it to one pool cannot claim the names of another. Readers look at a bounded
# number of fields in each read, and skip what they cannot read.

_LOG = logging.getLogger(__package__)
MAX_POOLS = 1000
"""Pools that a process reads; further names are ignored."""
MAX_SCANNED = 10_000
"""Fields of the list that one read looks at. The next read of the same process continues there."""
_SCAN_COUNT = 1000
_MAX_LOGGED = 100
_NAME = re.compile(NAME_PATTERN)
_LEVEL_NAMES = tuple(map(str, range(NUM_LEVELS)))
_WRITE = "redis.call('HDEL', KEYS[1], ''); return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"
"""HSET behind a free write. A full Redis refuses a plain HSET, but a full Redis needs new nodes most."""


class LoggedOnce:
    """Logs each damaged key once per process, and at most 100 of them."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._seen = log, set[object]()

    def warn(self, message: str, key: object, error: object) -> None:
        """Log `message` with the key and the error, unless the key was logged before."""
        if key not in self._seen and len(self._seen) < _MAX_LOGGED:
            self._seen.add(key)
            self._log.warning(message, extra={"key": repr(key), "error": str(error)})


@dataclass(frozen=True, slots=True)
class ListedPool:
    """A name of the list with its entry. A damaged entry allows the pool's own name alone."""

    entry: PoolEntry
    is_damaged: bool = False


@dataclass
class PoolList:
    """The list as one process reads it. `known` has the pools with a record, which no flood of names can hide."""

    redis: Redis
    # Keyed by id: pool.
    known: dict[str, ListedPool] = field(default_factory=dict)
    _cursor: int = 0
    _logged: LoggedOnce = field(default_factory=lambda: LoggedOnce(_LOG))

    async def read(self) -> dict[str, ListedPool]:
        """Return the listed pools, at most MAX_POOLS. Call it within `translated()`."""
        begun, found, num_scanned = self._cursor, dict[str, ListedPool](), 0
        while num_scanned < MAX_SCANNED:
            self._cursor, fields = await self._scan(self._cursor)
            num_scanned += len(fields)
            for name, data in fields.items():
                if (listed := self._listed(name, data)) is not None:
                    found[listed.entry.pool] = listed
            if self._cursor == 0:
                break
        if begun or self._cursor:
            found = {name: listed for name, listed in self.known.items() if name not in found} | found
        if (has_pool := getattr(self.redis, "has_pool", None)) is not None:
            found = {name: listed for name, listed in found.items() if has_pool(name)}
        ranked = sorted(found.items(), key=lambda item: (item[0] not in self.known, item[1].is_damaged))
        return dict(islice(ranked, MAX_POOLS))

    async def _scan(self, cursor: int) -> tuple[int, dict[bytes, bytes]]:
        try:
            return cast(
                "tuple[int, dict[bytes, bytes]]",
                await cast(Any, self.redis.hscan(keys.POOLS, cursor, count=_SCAN_COUNT)),
            )
        except exceptions.ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._logged.warn("unreadable pool list", keys.POOLS, error)
            return 0, {}

    def _listed(self, name: bytes, data: bytes) -> ListedPool | None:
        if (pool := name_of(name)) is None:
            self._logged.warn("unreadable pool entry", name[:64], "it is not a pool's name")
            return None
        try:
            return parsed(pool, data)
        except WireError as error:
            self._logged.warn("unreadable pool entry", name[:64], error)
            return ListedPool(PoolEntry(pool, ()), is_damaged=True)


def name_of(name: bytes) -> str | None:
    """Return a field's name if a pool may have it, else None."""
    text = name.decode(errors="replace")
    return text if _NAME.fullmatch(text) else None


def parsed(pool: str, data: bytes) -> ListedPool:
    """Return a field of the list. Raises WireError."""
    return ListedPool(wire.decode_entry(pool, data))


async def pool_names(redis: Redis) -> list[str]:
    """Return the names of the listed pools, sorted. Call it within `translated()`."""
    return sorted(await PoolList(redis).read())


async def write_entry(redis: Redis, entry: PoolEntry) -> None:
    """Write a pool's entry, also into a full Redis. Call it within `translated()`."""
    await cast(Any, redis).eval(_WRITE, 1, keys.POOLS, entry.pool, wire.encode_entry(entry))


async def keep_listed(redis: Redis, pool: str) -> None:
    """List a pool, unless it is listed, and mend what is damaged. Raises redis-py's errors.

    An operator's entry stays. While the list has more than MAX_POOLS fields, some that are not entries are removed.
    """
    client = cast(Any, redis)
    try:
        data, num_fields = await client.hget(keys.POOLS, pool), await client.hlen(keys.POOLS)
    except exceptions.ResponseError as error:
        if not is_wrong_type(error):
            raise
        await client.delete(keys.POOLS)
        data, num_fields = None, 0
    if not _is_entry(pool.encode(), data):
        await write_entry(redis, PoolEntry(pool))
    if num_fields > MAX_POOLS:
        await remove_junk(redis)


async def remove_junk(redis: Redis, num_fields: float = MAX_SCANNED) -> int:
    """Remove fields of the list that are not entries, among at least `num_fields` fields. Return how many."""
    client, cursor, num_scanned, num_removed = cast(Any, redis), 0, 0, 0
    while num_scanned < num_fields:
        cursor, fields = await client.hscan(keys.POOLS, cursor, count=_SCAN_COUNT)
        num_scanned += len(fields)
        if junk := [name for name, data in fields.items() if not _is_entry(name, data)]:
            num_removed += await client.hdel(keys.POOLS, *junk)
        if cursor == 0:
            break
    return num_removed


def _is_entry(name: bytes, data: bytes | None) -> bool:
    if data is None or (pool := name_of(name)) is None:
        return False
    try:
        return bool(parsed(pool, data))
    except WireError:
        return False


def with_allowed_names(record: PoolRecord, entry: PoolEntry) -> PoolRecord:
    """Return the record without the names that the pool may not serve."""
    if entry.names is None:
        return record
    allowed = {record.pool, *entry.names}
    return replace(
        record,
        model=record.model if record.model in allowed else record.pool,
        aliases=tuple(alias for alias in record.aliases if alias in allowed),
        adapters={name: digest for name, digest in record.adapters.items() if name in allowed},
    )


# Reader of pool statistics for operators.


class StatsBroker:
    """Reader of pool statistics. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)
        self._queue = QueueReader(redis)

    @retried
    async def all(self) -> list[PoolStats]:
        """Return the statistics of every announced pool."""
        with translated():
            pools = await pool_names(self._redis)
            return [stats for _, stats in await asyncio.gather(*map(self._of, pools))]

    @retried
    async def look(self, pool: str) -> tuple[int, PoolStats]:
        """Return the time of a pool's clock, in ms, and the pool's statistics."""
        with translated():
            return await self._of(pool)

    @retried
    async def redis_state(self) -> RedisState:
        """Return Redis's memory, and the state of its files and replicas."""
        with translated():
            return _redis_state(await self._redis.info())

    async def _of(self, pool: str) -> tuple[int, PoolStats]:
        redis = self._redis
        (
            time,
            (lease_ms, ahead_ms),
            num_open,
            counts,
            heartbeats,
            records,
            stored,
            reserved,
            pauses,
            (waiting, cost),
        ) = await asyncio.gather(
            redis.time(),
            unless_wrong_type((None, None), redis.hmget, keys.config(pool), CLOCK_FIELDS),
            unless_wrong_type(0, redis.scard, keys.open_jobs(pool)),
            unless_wrong_type({}, redis.hgetall, keys.counts(pool)),
            unless_wrong_type([], redis.zrange, keys.nodes(pool), 0, -1, withscores=True),
            unless_wrong_type({}, redis.hgetall, keys.pressure(pool)),
            unless_wrong_type({}, redis.hgetall, keys.stored(pool)),
            unless_wrong_type({}, redis.hgetall, keys.reserved(pool)),
            unless_wrong_type({}, redis.hgetall, keys.paused(pool)),
            self._queue.read(pool),
        )
        paused = tuple(pauses_of(pool, pauses))
        now_ms = pool_ms(time, ahead_ms)
        nodes, of_running = [], sums_of(reserved)
        for node, heartbeat_ms in heartbeats:
            if heartbeat_ms >= now_ms - whole(lease_ms, LEASE_MS if lease_ms else 0) and node in records:
                # A node of another protocol version has a record that this one cannot read.
                with suppress(WireError):
                    nodes.append(wire.decode_pressure(records[node]))
        return now_ms, PoolStats(
            pool,
            queue_state(waiting, cost, counts, nodes, paused),
            num_open,
            {event: whole(counts.get(event.encode())) for event in EVENTS},
            tuple(nodes),
            {tenant: size + of_running.get(tenant, 0) for tenant, size in sums_of(stored).items()},
            _paused_ms(paused, now_ms),
            paused,
        )


def pauses_of(pool: str, found: Mapping[bytes, bytes]) -> list[Pause]:
    """Return the pauses of a pool from P:paused. What pauses nothing is left out; a damaged time is shown as 0."""
    pauses = []
    for name, since_ms in sorted(found.items()):
        kind, _, what = name.decode(errors="replace").partition(":")
        if kind == "pool" and not what:
            pauses.append(Pause(pool, whole(since_ms), None, None))
        elif kind == "tenant" and _NAME.fullmatch(what):
            pauses.append(Pause(pool, whole(since_ms), what, None))
        elif kind == "level" and what in _LEVEL_NAMES:
            pauses.append(Pause(pool, whole(since_ms), None, int(what)))
    return pauses


def _paused_ms(pauses: Sequence[Pause], now_ms: int) -> dict[str, int]:
    oldest = dict[str, int]()
    for pause in pauses:
        if pause.since_ms:
            oldest[pause.kind] = max(oldest.get(pause.kind, 0), now_ms - pause.since_ms)
    return oldest


def _redis_state(info: Mapping[str, Any]) -> RedisState:
    replicas = [
        value
        for name, value in info.items()
        if re.fullmatch(r"slave\d+", name) and isinstance(value, dict) and value.get("state") == "online"
    ]
    offset = int(info.get("master_repl_offset", 0))
    return RedisState(
        used_bytes=int(info["used_memory"]),
        max_bytes=int(info["maxmemory"]),
        run_id=str(info.get("run_id", "")),
        is_aof_on=bool(info.get("aof_enabled")),
        is_aof_ok=info.get("aof_last_write_status", "ok") == "ok",
        is_snapshot_ok=info.get("rdb_last_bgsave_status", "ok") == "ok",
        delayed_fsyncs=int(info.get("aof_delayed_fsync", 0)),
        num_replicas=len(replicas),
        replica_lag_s=max((float(one["lag"]) for one in replicas), default=None),
        replica_lag_bytes=max((max(0, offset - int(one["offset"])) for one in replicas), default=None),
        is_loading=bool(info.get("loading")),
        is_replica=info.get("role", "master") != "master",
        num_good_replicas=int(info["min_slaves_good_slaves"]) if "min_slaves_good_slaves" in info else None,
        aof_bytes=int(info.get("aof_current_size", 0)),
        aof_base_bytes=int(info.get("aof_base_size", 0)),
    )


# Reader of what happens in pools, for the dashboard. One read of a pool takes at most two round trips, and two more for
# each 64 lanes of scheduled jobs.

MAX_TENANTS = 8
"""Tenants of a pool whose queued jobs are counted, those that wait for the most KV tokens first."""
MAX_TENANTS_READ = 1000
"""Waiting tenants of which these are chosen. Redis may return a few more."""
MAX_EVENTS, MAX_NODE_EVENTS = 50, 25
"""Newest events of a pool that are shown, and those of nodes for which events of jobs leave place."""
_ABSENT = "-"
_EVENT_NAMES = 5
_LEVELS = range(NUM_LEVELS)


class ActivityBroker:
    """Reader of pools' activity. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)
        self._queue = QueueReader(redis)

    @retried
    async def of(self, pools: Sequence[str]) -> list[PoolActivity]:
        """Return the activity of each pool."""
        with translated():
            return list(await asyncio.gather(*map(self._of, pools)))

    async def _of(self, pool: str) -> PoolActivity:
        (
            (waiting, cost),
            (time, (lease_ms, ahead_ms), counts, heartbeats, records, of_nodes, of_jobs, pauses, *by_kind),
        ) = await asyncio.gather(self._queue.read(pool), self._facts_of(pool))
        costs = Counter[str]()
        for _, of_kind in by_kind:
            costs.update(sums_of(of_kind))
        now_ms = pool_ms(time, ahead_ms)
        nodes = _live_nodes(heartbeats, records, now_ms, whole(lease_ms, LEASE_MS if lease_ms else 0))
        paused = tuple(pauses_of(pool, pauses))
        return PoolActivity(
            pool,
            queue=queue_state(waiting, cost, counts, [node.pressure for node in nodes], paused),
            queued_of_tenants=await self._queued_of_tenants(pool, costs),
            counts={event: whole(counts.get(event.encode())) for event in EVENTS},
            nodes=tuple(nodes),
            events=_events_of(of_nodes, of_jobs),
            now_ms=now_ms,
            pauses=paused,
        )

    async def _facts_of(self, pool: str) -> list[Any]:
        """Return time, CLOCK_FIELDS, counts, heartbeats, pressure, both kinds of events, P:paused, costs by tenant."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.hmget(keys.config(pool), CLOCK_FIELDS)
            pipe.hgetall(keys.counts(pool))
            pipe.zrange(keys.nodes(pool), 0, -1, withscores=True)
            pipe.hgetall(keys.pressure(pool))
            pipe.zrevrange(keys.events(pool, "node_"), 0, MAX_EVENTS - 1)
            pipe.zrevrange(keys.events(pool), 0, MAX_EVENTS - 1)
            pipe.hgetall(keys.paused(pool))
            pipe.hscan(keys.queued(pool), 0, count=MAX_TENANTS_READ)
            pipe.hscan(keys.queued_background(pool), 0, count=MAX_TENANTS_READ)
            found = await executed(pipe)
        empty: list[Any] = [None, (None, None), {}, [], {}, [], [], {}, (0, {}), (0, {})]
        return [of if one is None else one for one, of in zip(found, empty, strict=True)]

    async def _queued_of_tenants(self, pool: str, costs: Mapping[str, int]) -> dict[str, int]:
        """Count the queued jobs of the tenants with the highest queued cost."""
        largest = nlargest(MAX_TENANTS, costs, key=lambda tenant: costs[tenant])
        if not largest:
            return {}
        async with self._redis.pipeline(transaction=False) as pipe:
            for tenant in largest:
                for level in _LEVELS:
                    pipe.xlen(keys.queue(pool, level, tenant))
                    pipe.zcard(keys.requeued(pool, level, tenant))
            lengths = await executed(pipe, default=0)
        step = 2 * NUM_LEVELS
        return {tenant: sum(lengths[i * step : (i + 1) * step]) for i, tenant in enumerate(largest)}


def _live_nodes(
    heartbeats: Sequence[tuple[bytes, float]], records: Mapping[bytes, bytes], now_ms: int, lease_ms: int
) -> list[LiveNode]:
    nodes = []
    for node, heartbeat_ms in sorted(heartbeats):
        if heartbeat_ms >= now_ms - lease_ms and node in records:
            # A node of another protocol version has a record that this one cannot read.
            with suppress(WireError):
                silent_ms = max(0, now_ms - int(min(heartbeat_ms, now_ms)))
                nodes.append(LiveNode(wire.decode_pressure(records[node]), silent_ms))
    return nodes


def _events_of(of_nodes: Sequence[bytes], of_jobs: Sequence[bytes]) -> tuple[PoolEvent, ...]:
    """Return the newest events, oldest first, of members that are sorted the newest first."""
    jobs = of_jobs[: MAX_EVENTS - min(MAX_NODE_EVENTS, len(of_nodes))]
    members = (*reversed(of_nodes[: MAX_EVENTS - len(jobs)]), *reversed(jobs))
    found = [event for event in map(_event_of, members) if event is not None]
    return tuple(sorted(found, key=lambda event: event.at_ms))


def _event_of(member: bytes) -> PoolEvent | None:
    """Return an event, None for a damaged one."""
    at_ms, *names = member.decode(errors="replace").split(" ")
    if len(names) != _EVENT_NAMES or not (when_ms := whole(at_ms)):
        return None
    return PoolEvent(when_ms, *("" if name == _ABSENT else name for name in names))
