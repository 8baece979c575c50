"""A client's or gateway's access to the queue: one method per script, and plain reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

import uuid_utils
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.contract.channel import NO_CHANNEL, Channel
from penstock.contract.errors import NotFoundError
from penstock.contract.job import pool_of
from penstock.contract.output import Chunk, Outcome, Result
from penstock.contract.pool import NodePressure, PoolPressure, PoolRecord
from penstock.contract.priority import NUM_LEVELS
from penstock.contract.tenant import NO_LIMIT
from penstock.queue import keys, results, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.history import RecentCalls
from penstock.queue.broker.jobs import (
    CLOCK_FIELDS,
    LEASE_MS,
    STATUS_FIELDS,
    large_result_bytes_of,
    outcome_of,
    pool_ms,
    readable,
    status_of,
    times_ms_of,
)
from penstock.queue.broker.jobs import JobStatus as JobStatus
from penstock.queue.broker.pools import ListedPool, LoggedOnce, PoolList, with_allowed_names
from penstock.queue.broker.scripts import PoolClocks, sweep
from penstock.queue.broker.submitting import Attached as Attached
from penstock.queue.broker.submitting import SharedCalls, Submissions, channel_conflict
from penstock.queue.broker.submitting import Submission as Submission
from penstock.queue.broker.submitting import Submitted as Submitted
from penstock.queue.protocol_version import PROTOCOL_VERSION, other_version
from penstock.queue.record_fields import is_wrong_type, unless_wrong_type, whole, without_wrong_types
from penstock.queue.results import Fetches, PackedResult
from penstock.queue.wire import WireError, decode_chunks
from penstock.runtime.event_loop import LoopYielder
from penstock.runtime.tracing.context import carried_by, start_enqueue_span

# Decoding of large logs and results in small steps, so that the event loop stays responsive.

_BYTES_PER_STEP = 64 << 10
"""Packed log-probabilities decoded in one step, which takes a few milliseconds; other chunks decode faster."""
_LARGE_BYTES = 16 << 10
MAX_PAGE_BYTES = 64 << 10
"""Packed log-probabilities in one page of a log; decoded, they take seven times as much memory."""
_MAX_BYTES_ON_LOOP = 256 << 10


async def decoded(entries: Sequence[bytes], yielder: LoopYielder, *, max_bytes: float = MAX_PAGE_BYTES) -> list[Chunk]:
    """Decode one page of a log. The result ends early once its log-probabilities exceed `max_bytes` packed bytes.

    `yielder` runs each step in its own round of the event loop.
    """
    chunks: list[Chunk] = []
    num_bytes = since_step = 0
    for entry in entries:
        if since_step > _BYTES_PER_STEP or len(entry) > _LARGE_BYTES:
            await yielder.wait()
            since_step = 0
        chunks += decode_chunks(entry)
        if not has_logprobs(chunks):
            continue
        num_bytes += len(entry)
        since_step += len(entry)
        if num_bytes > max_bytes:
            break
    return chunks


def has_logprobs(chunks: Sequence[Chunk]) -> bool:
    """Return whether the last of these chunks has log-probabilities."""
    return bool(chunks) and bool(chunks[-1].logprobs or chunks[-1].prompt_logprobs)


async def packed_result_of(data: bytes | None, job_id: str, outcome: Outcome, yielder: LoopYielder) -> PackedResult:
    """Index a result's parts without decoding them."""
    if data is not None and len(data) > _LARGE_BYTES:
        await yielder.wait()
    return PackedResult(data, job_id, outcome)


async def result_of(data: bytes | None, job_id: str, outcome: Outcome, times_ms: tuple[int, int, int, int]) -> Result:
    """Decode a result. A large one is decoded on a thread, so that the event loop can run in between."""
    if data is None:
        return Result(job_id, outcome, (), None, *times_ms)
    if len(data) <= _MAX_BYTES_ON_LOOP:
        return results.decode_result(data, job_id, outcome, times_ms)
    return await asyncio.to_thread(results.decode_result, data, job_id, outcome, times_ms)


_LOG = logging.getLogger(__package__)
_CANCELLED = ("cancelled", "cancelling")
"""States of a job whose cancellation took effect."""
LARGE_RESULT_BYTES = 65_536
"""A larger result expires log_ttl_ms after it was delivered. prelude.lua has the same value."""
MAX_RESULTS = 16
"""Results that one call reads. Redis holds those of all calls in memory until they are sent."""
RESULT_FIELDS = ("state", "tenant", "level", "code", "message", "param", "submitted", "taken", "first", "finished")
"""The fields of a job's record that its result needs."""


@dataclass(frozen=True, slots=True)
class ServedPool(PoolRecord):
    """A pool's announced record, and whether a node of it sent a heartbeat within its lease.

    This release cannot use a pool of another `protocol_version`, and does not ask whether such a pool has a live node.
    """

    is_alive: bool = True
    protocol_version: int = PROTOCOL_VERSION
    max_open_jobs: int = NO_LIMIT
    """Most jobs that wait or run in the pool. Jobs that exceed it are refused."""
    without_node_ms: int = 0
    """Milliseconds since its last node left, or since the pool was declared; 0 while it has a live node."""
    clock_ahead_ms: int = field(default=0, compare=False)
    """Milliseconds by which the pool's clock was ahead of this machine's when this was read."""

    def new_job_id(self) -> str:
        """Return an id for a new job. Its time is that of the pool, which refuses ids of another time."""
        made = str(uuid_utils.uuid7())
        if abs(self.clock_ahead_ms) >= 1000:
            time_hex = f"{time.time_ns() // 1_000_000 + self.clock_ahead_ms:012x}"
            made = f"{time_hex[:8]}-{time_hex[8:]}{made[13:]}"
        return f"{self.pool}.{made}"

    @property
    def hours_without_node(self) -> int:
        """Whole hours for which it has had no node."""
        return self.without_node_ms // 3_600_000

    def is_folded(self, num_open: int) -> bool:
        """Return whether lists of pools leave it out: it had no node for an hour, and has no open job."""
        return self.hours_without_node > 0 and not num_open


class ProducerBroker:
    """The producer's side of the queue. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None, *, recent: RecentCalls | None = None) -> None:
        """`recent` gets the cancellations, which a Redis that lost them gets again."""
        self.patience = patience
        self._recent = recent or RecentCalls(0)
        self._redis, self._yielder = redis, LoopYielder()
        self._list, self._logged = PoolList(redis), LoggedOnce(_LOG)
        self._clocks = PoolClocks()
        self._submissions = Submissions(redis, patience, self._clocks)
        self._acks = SharedCalls(self._ack)
        self._results = SharedCalls(self._read_results, max_items=MAX_RESULTS)

    async def close(self) -> None:
        """End the submissions, and close the connections of those that wait longer; the caller closes `redis`."""
        await self._submissions.close()
        await self._acks.close()
        await self._results.close()

    async def submit(self, submission: Submission, inbox: str = "") -> Submitted:
        """Enqueue a job. `inbox` is the process to push chunks to. The job carries the caller's trace context.

        Raises UnavailableError (no node announced the pool), TooLargeError, and RequestError (the id is too old or from
        the future). Raises ConflictError if the id or idempotency key belongs to another body or tenant, and
        BusyError at a limit of the pool or tenant, or if Redis is full.
        With a durability that this Redis cannot promise, it raises UnsupportedDurabilityError. It raises NotOnDiskError
        or NotReplicatedError if the job is queued and its disk or a replica did not confirm it in time.

        Jobs that are submitted at the same time share a call.
        """
        span = start_enqueue_span(submission.job.id, submission.job.pool)
        if span is None:
            return await self._submissions.submit(submission, inbox, ())
        with span:
            return await self._submissions.submit(submission, inbox, carried_by(span))

    @retried
    async def attach(self, job_id: str, tenant: str, *, inbox: str = "", channel: Channel | None = None) -> Attached:
        """Add a reader to a job, and a channel. Raises NotFoundError for an unknown id or a job of another tenant.

        Raises ConflictError if the open job has another channel.
        """
        field = channel.field if channel else NO_CHANNEL
        answer = await scripts.call(self._redis, "attach", pool_of(job_id), job_id, tenant, inbox, field)
        if answer[0] == b"CHANNEL_CONFLICT":
            raise channel_conflict(job_id)
        if answer[0] != b"OK":
            raise _no_job(job_id)
        return Attached(answer[1].decode(), int(answer[2]), bool(answer[3]))

    async def detach(self, job_id: str, inbox: str, *, stops: bool = False) -> None:
        """Remove a reader. A job without readers is canceled after a grace time, unless it needs no reader.

        `stops`: the reading process stops, and its callers may go on at another one. So the job waits for as long as
        after a kill of that process.
        """
        await scripts.call(self._redis, "detach", pool_of(job_id), job_id, inbox, int(stops))

    @retried
    async def successor_of(self, job_id: str) -> str | None:
        """Return the id of the job that took the place of one whose output was refused; None if none did."""
        with translated():
            found = await cast(Any, self._redis.hget(keys.job(job_id), "retried_as"))
        return None if found is None else f"{pool_of(job_id)}.{found.decode(errors='replace')}"

    @retried
    async def cancel(self, job_id: str, tenant: str) -> str:
        """Cancel a job, or the one that took its place.

        Returns `cancelled`, `cancelling` (it ends within a step), or its earlier terminal state.
        """
        state = await scripts.cancel(self._redis, job_id, tenant)
        if state == "NOT_FOUND":
            raise _no_job(job_id)
        if state == "failed":
            successor = await self.successor_of(job_id)
            return state if successor is None else await self.cancel(successor, tenant)
        if state in _CANCELLED:
            self._recent.note(partial(scripts.cancel, self._redis, job_id, tenant))
        return state

    async def ack(self, job_ids: Sequence[str], tenant: str) -> int:
        """Free the results of ended jobs of a tenant, because the caller has stored them.

        Jobs that are unknown, open, another tenant's or already acknowledged are left as they are, and so are those of
        stored responses. Returns the number of the others. Calls at the same time share one.
        """
        freed = await asyncio.gather(*(self._acks.add(pool_of(job_id), (tenant, job_id)) for job_id in job_ids))
        return sum(freed)

    @retried
    async def _ack(self, jobs: Sequence[tuple[str, str]]) -> list[int]:
        """Free the results of jobs of a pool, each with its tenant. Return 1 for each that this call has freed."""
        arguments = [one for job in jobs for one in job]
        return cast(list[int], await scripts.call(self._redis, "ack", pool_of(jobs[0][1]), *arguments))

    @retried
    async def status(self, job_id: str, tenant: str) -> JobStatus:
        """Return a job's state. Raises NotFoundError."""
        fields = await self._record(job_id, tenant)
        pool, level = pool_of(job_id), int(fields["level"])
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.hget(keys.config(pool), "ahead_ms")
                pipe.get(keys.metadata(job_id))
                pipe.llen(keys.log(job_id))
                pipe.zrank(keys.waiting(pool, level), job_id)
                for more_urgent in range(level):
                    pipe.zcard(keys.waiting(pool, more_urgent))
                time, *answers = await pipe.execute(raise_on_error=False)
        # A key of another type tells nothing, and hides no job.
        ahead_ms, metadata, length, older, *more_urgent_ones = (
            None if isinstance(answer, ResponseError) else answer for answer in answers
        )
        num_ahead = 0 if older is None else older + sum(number or 0 for number in more_urgent_ones)
        now_ms = pool_ms(time, ahead_ms)
        return status_of(job_id, fields, now_ms, length or 0, num_ahead, metadata=metadata)

    @retried
    async def log(self, job_id: str, start: int, count: int = 1000) -> list[Chunk]:
        """Return up to `count` chunks of a job's log from `start` on; empty after the log has expired."""
        with translated():
            entries = await cast(Any, self._redis.lrange(keys.log(job_id), start, start + count - 1))
        return await decoded(entries, self._yielder)

    async def result(self, job_id: str, tenant: str) -> Result | None:
        """Return a job's result, None while the job is open.

        This counts as delivery: a large result expires log_ttl_ms later. Raises NotFoundError for an unknown job or an
        expired result. Calls at the same time share one.
        """
        values, data = await self._results.add("", job_id)
        for reply in (values, data):
            if isinstance(reply, Exception):
                with translated():
                    raise reply
        fields = _fields_of(RESULT_FIELDS, values, job_id, tenant)
        await self._check_level(values[RESULT_FIELDS.index("level")], job_id)
        if (outcome := outcome_of(fields)) is None:
            return None
        await self._note_delivery(data, job_id, tenant, outcome)
        return await result_of(data, job_id, outcome, times_ms_of(fields))

    @retried
    async def _read_results(self, job_ids: Sequence[str]) -> list[tuple[Any, Any]]:
        """Return the RESULT_FIELDS and the packed result of each job, or the errors of reading them."""
        commands = [
            command
            for job_id in job_ids
            for command in (("HMGET", keys.job(job_id), *RESULT_FIELDS), ("GET", keys.result(job_id)))
        ]
        with translated():
            replies = await scripts.call_all(self._redis, commands)
            # A Redis that loads its data says so for each command, and is asked again.
            if away := next((one for one in replies if isinstance(one, Exception) and "LOADING" in str(one)), None):
                raise away
        return list(zip(replies[::2], replies[1::2], strict=True))

    @retried
    async def packed_result(self, job_id: str, tenant: str, fetches: Fetches | None = None) -> PackedResult | None:
        """Return a job's result as `result` does, with its parts decoded on access.

        If `fetches` leaves a large result in Redis, the returned one has only its size and the outcome.
        """
        fields = await self._record(job_id, tenant)
        if (outcome := outcome_of(fields)) is None:
            return None
        if fetches is not None and (num_bytes := large_result_bytes_of(fields)) and not fetches(num_bytes):
            return PackedResult(None, job_id, outcome, num_left_bytes=num_bytes)
        with translated():
            data = cast("bytes | None", await self._redis.get(keys.result(job_id)))
        await self._note_delivery(data, job_id, tenant, outcome)
        return await packed_result_of(data, job_id, outcome, self._yielder)

    async def _note_delivery(self, data: bytes | None, job_id: str, tenant: str, outcome: Outcome) -> None:
        """Mark the packed result of an ended job as delivered. Raises NotFoundError if it has expired."""
        if data is None and outcome.state == "succeeded":
            raise NotFoundError(f"the result of job {job_id} is no longer kept", code="result_expired")
        if data is not None and len(data) > LARGE_RESULT_BYTES:
            await scripts.call(self._redis, "shorten_result", pool_of(job_id), job_id, tenant)

    async def reader_heartbeat(self, pool: str, inbox: str) -> None:
        """Send the heartbeat of a reading process, and sweep, so that jobs progress while any process is alive."""
        beat = scripts.call(self._redis, "reader_heartbeat", pool, inbox)
        await asyncio.gather(beat, sweep(self._redis, pool, self._clocks))

    @retried
    async def pressure(self, pool: str) -> PoolPressure:
        """Return the input of admission: records of all live nodes, jobs and cost queued per level.

        A node that has been silent for a lease does not count, even if no sweep has removed it yet.
        """
        reads: list[tuple[tuple[scripts.Argument, ...], Any]] = [
            (("TIME",), None),
            (("HMGET", keys.config(pool), *CLOCK_FIELDS), [None] * len(CLOCK_FIELDS)),
            (("ZRANGE", keys.nodes(pool), 0, -1, "WITHSCORES"), []),
            (("HGETALL", keys.pressure(pool)), {}),
            (("HMGET", keys.backlog(pool), *map(str, range(NUM_LEVELS))), [None] * NUM_LEVELS),
            *((("ZCARD", keys.waiting(pool, level)), 0) for level in range(NUM_LEVELS)),
        ]
        with translated():
            answers = await scripts.call_all(self._redis, [command for command, _ in reads])
            time, clock, scores, records, backlog, *num_queued = without_wrong_types(
                answers, [default for _, default in reads]
            )
        alive_since_ms = self._alive_since_ms(pool, time, *clock)
        heartbeats = zip(scores[::2], map(float, scores[1::2]), strict=True)
        alive = [
            records[node] for node, heartbeat_ms in heartbeats if heartbeat_ms >= alive_since_ms and node in records
        ]
        return PoolPressure(tuple(self._pressures(pool, alive)), tuple(map(whole, backlog)), tuple(num_queued))

    def _alive_since_ms(self, pool: str, time: tuple[int, int], lease_ms: bytes | None, ahead_ms: bytes | None) -> int:
        return self._clocks.alive_since_ms(pool, pool_ms(time, ahead_ms), whole(lease_ms, LEASE_MS if lease_ms else 0))

    def _pressures(self, pool: str, records: Iterable[bytes]) -> Iterator[NodePressure]:
        """Decode pressure records. An unreadable one is logged and skipped, until its node writes it again."""
        for data in records:
            try:
                yield wire.decode_pressure(data)
            except WireError as error:
                self._logged.warn("unreadable pressure record", keys.pressure(pool), error)

    @retried
    async def pools(self) -> dict[str, ServedPool]:
        """Return every listed pool that has a record, by name, pools with a live node first."""
        with translated():
            clock, listed = await asyncio.gather(cast(Any, self._redis).time(), self._list.read())
            own_ms = time.time_ns() // 1_000_000
            records = await asyncio.gather(*(self._record_of(one) for one in listed.values()))
            found = [(one, record) for one, record in zip(listed.values(), records, strict=True) if record is not None]
            served = await asyncio.gather(*(self._served(one, *record, clock, own_ms) for one, record in found))
        self._list.known = {one.entry.pool: one for one, _ in found}
        by_name = {pool.pool: pool for pool in served}
        return dict(sorted(by_name.items(), key=lambda item: not item[1].is_alive))

    async def _record_of(self, listed: ListedPool) -> tuple[PoolRecord, int] | None:
        """Return a pool's record and version, None without one. An unreadable record is logged."""
        pool = listed.entry.pool
        try:
            data = await self._redis.get(keys.record(pool))
            return None if data is None else _decoded_record(pool, cast(bytes, data))
        except (WireError, ResponseError) as error:
            if isinstance(error, ResponseError) and not is_wrong_type(error):
                raise
            self._logged.warn("unreadable pool record", keys.record(pool), error)
            return None

    async def _served(
        self, listed: ListedPool, record: PoolRecord, version: int, time: tuple[int, int], own_ms: int
    ) -> ServedPool:
        """Return a pool. `time` is Redis's, and `own_ms` this machine's at that moment."""
        pool = record.pool
        if version != PROTOCOL_VERSION:
            return ServedPool(**_members(record), is_alive=False, protocol_version=version)
        redis = cast(Any, self._redis)
        (max_open_jobs, *clock), heartbeats, adapters = await asyncio.gather(
            unless_wrong_type([None] * 3, redis.hmget, keys.config(pool), ["max_open_jobs", *CLOCK_FIELDS]),
            unless_wrong_type(list[tuple[bytes, float]](), redis.zrevrange, keys.nodes(pool), 0, 0, withscores=True),
            unless_wrong_type(dict[bytes, bytes](), redis.hgetall, keys.adapters(pool)),
        )
        digests: dict[str, str] = {}
        for data in adapters.values():
            try:
                digests |= wire.decode_pool(data).adapters
            except WireError as error:
                self._logged.warn("unreadable pool record", keys.adapters(pool), error)
        is_alive = bool(heartbeats) and heartbeats[0][1] >= self._alive_since_ms(pool, time, *clock)
        # While all nodes are dead, the last announced adapters are kept, because the nodes may be back in a moment.
        announced = with_allowed_names(replace(record, adapters=digests) if is_alive else record, listed.entry)
        no_events = list[tuple[bytes, float]]()
        events = (
            no_events
            if is_alive
            else await unless_wrong_type(no_events, redis.zrevrange, keys.events(pool, "node_"), 0, 0, withscores=True)
        )
        now_ms, known = pool_ms(time, clock[1]), [at_ms for _, at_ms in (*heartbeats, *events)]
        last_ms = max(record.created_s * 1000, *(int(min(at_ms, now_ms)) for at_ms in known if at_ms >= 0), 0)
        return ServedPool(
            **_members(announced),
            is_alive=is_alive,
            max_open_jobs=whole(max_open_jobs, NO_LIMIT),
            without_node_ms=0 if is_alive else max(0, now_ms - last_ms),
            clock_ahead_ms=self._clocks.believed_ms(pool, now_ms, whole(clock[0], LEASE_MS)) - own_ms,
        )

    async def _record(self, job_id: str, tenant: str) -> dict[str, str]:
        with translated():
            try:
                values = await cast(Any, self._redis.hmget(keys.job(job_id), list(STATUS_FIELDS)))
            except ResponseError as error:
                if not is_wrong_type(error):
                    raise
                raise _no_job(job_id) from None  # What is no record names no tenant who may see it.
        fields = _fields_of(STATUS_FIELDS, values, job_id, tenant)
        await self._check_level(values[STATUS_FIELDS.index("level")], job_id)
        return fields

    async def _check_level(self, level: bytes | None, job_id: str) -> None:
        """Raise ProtocolVersionError for a record without this field in a pool of another version."""
        if level:
            return
        pool = pool_of(job_id)
        with translated():
            version = await cast(Any, self._redis.hget(keys.config(pool), "version"))
        if version not in (None, b"%d" % PROTOCOL_VERSION):
            raise other_version(pool, version.decode())


def _fields_of(names: Sequence[str], values: Sequence[bytes | None], job_id: str, tenant: str) -> dict[str, str]:
    """Return fields of a job's record as texts. Raises NotFoundError for no job or another tenant's."""
    fields = {name: (value or b"").decode(errors="replace") for name, value in zip(names, values, strict=True)}
    if fields["tenant"] != tenant:
        raise _no_job(job_id)
    return readable(fields)


def _members(record: PoolRecord) -> dict[str, Any]:
    """Return the members of a record, with the records in it as they are."""
    return {one.name: getattr(record, one.name) for one in fields(PoolRecord)}


def _decoded_record(pool: str, data: bytes) -> tuple[PoolRecord, int]:
    record, version = wire.decode_any_pool(data)
    if record.pool != pool:
        raise WireError(f"the record names pool {record.pool[:64]!r}")
    return record, version


def _no_job(job_id: str) -> NotFoundError:
    return NotFoundError(f"no job {job_id}", code="job_not_found")
