"""What a node asks of the queue: one method per script, and the reads that follow a take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypedDict, Unpack, cast

from redis.asyncio import Redis

from penstock.contract.errors import ConfigError, InvariantError
from penstock.contract.job import Chunk, Outcome, Priority, Usage
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import translated
from penstock.queue.broker.decoding import decoded
from penstock.queue.broker.sweep import sweep
from penstock.queue.policy import HOLD_MS
from penstock.queue.wire import NodePressure, PoolRecord
from penstock.runtime.cooperative import CooperativeTurns

MAX_EMIT_JOBS = 512
MAX_GIVE_BACK_JOBS = 128
MAX_PREEMPTIONS = 3
"""Of give_back.lua: a job that was given back so often counts as all that it may hold."""
MAX_MESSAGE_CHARS = 1000
Why = Literal["drain", "pressure", "lacking"]
"""Jobs are given back because the node leaves, has no room, or lacks their adapter."""
_ANNOUNCE = "redis.call('HDEL', KEYS[1], ''); return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"
"""A plain HSET would be refused by a full Redis, which needs nodes most."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a node can take, per class: KV tokens and sequences; and its whole size."""

    kv_tokens: tuple[int, int, int]
    slots: tuple[int, int, int]
    kv_total: int
    slots_total: int


@dataclass(frozen=True, slots=True)
class Taken:
    """One job given to this node; `lease` goes into every write, `num_chunks` is what an earlier node logged.

    `request` is empty where it is too long to come along; see `NodeBroker.requests`. `urgency` is the class that the
    job counts as: its own, or a more urgent one when it had to wait long. `preemptions`: how often it was given back.
    `weight` is its tenant's share beside others.
    """

    job_id: str
    lease: str
    losses: int
    num_chunks: int
    cost: int
    deadline_in_ms: int
    request: bytes = b""
    tenant: str = ""
    urgency: int = int(Priority.STANDARD)
    preemptions: int = 0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TakeAnswer:
    """Jobs taken, jobs still queued per class, and when to ask again (0: no need)."""

    jobs: tuple[Taken, ...]
    depth: tuple[int, int, int]
    again_in_ms: int


@dataclass(frozen=True, slots=True)
class Emission:
    """Chunks of one job, encoded; `index` is the first one's place in the log."""

    job_id: str
    lease: str
    index: int
    chunks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class GivenBackJob:
    """A job to be given back: KV tokens that it will probably hold, and that it may hold at most."""

    job_id: str
    lease: str
    cost: int
    most: int


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """What the held-ids check found: jobs to end as cancelled or expired, and jobs that are no longer ours."""

    cancelled: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    fenced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Takeover:
    """Predecessors on this host that are still in the pool, and when the last of them can be declared dead."""

    num_left: int
    wait_ms: int


class UsedTokens(TypedDict, total=False):
    """What a job used, as far as its node knows."""

    kv_ms: float | None
    """The KV tokens it held times the milliseconds it held them: what its tenant pays; None: as was predicted."""
    usage: Usage | None
    """Counted to its tenant; None: the tokens of its log, and no prompt."""
    log_bytes: int | None
    """Of all its chunks; None: the script reads the log."""


class LeaseLostError(Exception):
    """The pool believes this node dead: all it holds belongs to others now."""


class NodeBroker:
    """The node's side of one pool's queue. Raises UnavailableError when Redis is away."""

    def __init__(self, redis: Redis, pool: str, node_id: str, revision: str) -> None:
        self._redis = redis
        self._turns = CooperativeTurns()
        self._pool = pool
        self._node_id = node_id
        self._revision = revision

    async def join(self, schema: dict[str, int | str], record: PoolRecord) -> None:
        """Enters the pool and announces it; raises ConfigError when live nodes run with another schema."""
        pairs = [item for name, value in schema.items() for item in (name, value)]
        answer = await self._call("join", self._revision, *pairs)
        if answer[0] != b"OK":
            field, theirs = answer[1].decode(), answer[2].decode()
            message = f"pool {self._pool} runs with {field}={theirs}, this node with {schema[field]}"
            raise ConfigError(message, param=field)
        await self.announce(record)

    async def announce(self, record: PoolRecord) -> None:
        """Tells clients what the pool serves, and which adapters this node has of it."""
        redis, told = cast(Any, self._redis), wire.encode_record(record)
        with translated():
            await redis.eval(_ANNOUNCE, 1, keys.POOLS, self._pool, told)
            if record.adapters:
                await redis.eval(_ANNOUNCE, 1, keys.adapters(self._pool), self._node_id, told)
            else:
                await redis.hdel(keys.adapters(self._pool), self._node_id)

    async def beat(
        self, pressure: NodePressure, *, free: int, answered_call: int, held: Sequence[str] | None
    ) -> BeatAnswer:
        """Says that this node lives; with `held`, compares what it holds. Raises SweptError."""
        record, check = wire.encode_record(pressure), int(held is not None)
        answer = await self._call("beat", self._revision, free, record, answered_call, check, *(held or ()))
        if answer[0] == b"SWEPT":
            raise LeaseLostError
        return BeatAnswer(*(tuple(i.decode() for i in ids) for ids in answer[1:]))

    async def succeed(self, seats: Sequence[str], *, has_joined: bool) -> Takeover:
        """Declares the nodes dead that held these seats of the host before.

        With `has_joined`, this node holds them from now on.
        """
        name = self._node_id if has_joined else ""
        num_left, wait_ms = await scripts.call(self._redis, "succeed", self._pool, name, *seats)
        return Takeover(num_left, int(wait_ms))

    async def leave(self) -> int:
        """Goes; answers how many jobs are left to sweep."""
        return cast(int, await self._call("leave"))

    async def take(self, call: int, nonce: str, room: Capacity, *, hold_ms: float = HOLD_MS) -> TakeAnswer:
        """Takes what fits; the same `call` again gets the same answer. Raises SweptError.

        `hold_ms` is how long this node probably holds a KV token of cost: a tenant is charged cost × hold_ms.
        """
        sizes = (*room.kv_tokens, *room.slots, room.kv_total, room.slots_total)
        answer = await self._call("take", call, nonce, *sizes, self._revision, hold_ms)
        if answer[0] == b"UNKNOWN_NODE":
            raise LeaseLostError
        if answer[0] != b"OK":
            raise InvariantError(f"take {call} answered {answer[0]!r}")
        jobs = tuple(map(_taken, answer[1]))
        depth = answer[2]
        return TakeAnswer(jobs, (depth[0], depth[1], depth[2]), int(answer[3]))

    async def requests(self, job_ids: Sequence[str]) -> list[bytes | None]:
        """The packed requests of taken jobs, None where one has ended meanwhile."""
        if not job_ids:
            return []
        with translated():
            return cast(list[bytes | None], await self._redis.mget([keys.request(i) for i in job_ids]))

    async def log(self, job_id: str, count: int, page: int = 500) -> list[Chunk]:
        """The first `count` chunks of a taken job, read in pages so that no call blocks Redis for long."""
        chunks: list[Chunk] = []
        for start in range(0, count, page):
            with translated():
                entries = await cast(Any, self._redis.lrange(keys.log(job_id), start, min(start + page, count) - 1))
            chunks += await decoded(entries, self._turns, max_bytes=inf)
        return chunks

    async def emit(self, emissions: Sequence[Emission]) -> list[str]:
        """Appends and publishes; one answer per job: OK, FENCED, CANCEL, EXPIRED, UNHEARD, `NEED n`, GONE, `ERR …`."""
        answers: list[str] = []
        for start in range(0, len(emissions), MAX_EMIT_JOBS):
            rows = [(e.job_id, e.lease, e.index, e.chunks) for e in emissions[start : start + MAX_EMIT_JOBS]]
            answers += [a.decode() for a in await self._call("emit", scripts.packed(rows))]
        return answers

    async def finish(self, last: Emission, outcome: Outcome, result: bytes, **used: Unpack[UsedTokens]) -> str:
        """Ends a job with its last chunks; answers OK, FENCED, `NEED n` or GONE; repeating it is harmless."""
        kv_ms, usage, log_bytes = used.get("kv_ms"), used.get("usage"), used.get("log_bytes")
        tokens = ("", "", "") if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        size = "" if log_bytes is None else log_bytes
        end = (outcome.state, outcome.code, outcome.message[:MAX_MESSAGE_CHARS], outcome.param)
        place = (last.job_id, last.lease, last.index)
        answer = await self._call(
            "finish",
            *(*place, *end, "" if kv_ms is None else kv_ms, result),
            *(*tokens, size, len(last.chunks), *last.chunks),
        )
        return cast(bytes, answer).decode()

    async def give_back(self, jobs: Sequence[GivenBackJob], why: Why = "drain") -> list[str]:
        """Queues jobs again, with their age; one answer per job: OK, FENCED, GONE or NOBODY.

        NOBODY: the job stays, because no other node has room for it, or all lack its adapter.
        """
        answers: list[str] = []
        for start in range(0, len(jobs), MAX_GIVE_BACK_JOBS):
            part = jobs[start : start + MAX_GIVE_BACK_JOBS]
            arguments = [item for job in part for item in (job.job_id, job.lease, job.cost, job.most)]
            answers += [a.decode() for a in await self._call("give_back", why, *arguments)]
        return answers

    async def sweep(self) -> None:
        """Finds dead nodes and due jobs; the script itself limits how often."""
        await sweep(self._redis, self._pool)

    async def _call(self, name: str, *arguments: scripts.Argument) -> Any:
        return await scripts.call(self._redis, name, self._pool, self._node_id, *arguments)


def _taken(row: list[Any]) -> Taken:
    job_id, lease, losses, num_chunks, cost, deadline_in_ms, request, tenant, urgency, preemptions, weight = row
    numbers = (losses, num_chunks, cost, deadline_in_ms)
    return Taken(
        job_id.decode(), lease.decode(), *numbers, request, tenant.decode(), urgency, preemptions, float(weight)
    )
