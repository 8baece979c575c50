"""A node's access to the queue: one method per script, and the reads that follow a take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, TypedDict, Unpack, cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from penstock.contract.errors import ConfigError, InvariantError
from penstock.contract.output import Chunk, Outcome, Usage
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.priority import PerLevel, Priority, class_of_level, is_background
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import translated
from penstock.queue.broker.jobs import LEASE_MS, pool_ms
from penstock.queue.broker.pools import keep_listed
from penstock.queue.broker.producer import decoded
from penstock.queue.broker.scripts import PoolClocks, sweep
from penstock.queue.job_cost import HOLD_MS
from penstock.queue.record_fields import is_text, unless_wrong_type, whole
from penstock.runtime.event_loop import LoopYielder

MAX_EMIT_JOBS = 512
MAX_EMIT_BYTES = 512 << 10
"""Limit of one emit call, so that no backlog blocks Redis or the event loop. A single larger chunk still goes out."""
MAX_FINISH_JOBS = 64
"""Jobs that one call of finish.lua ends."""
MAX_GIVE_BACK_JOBS = 128
MAX_PREEMPTIONS = 3
"""A job that was given back this often costs its maximum KV tokens from then on. give_back.lua has the same value."""
MAX_MESSAGE_CHARS = 1000
Why = Literal["drain", "handover", "pressure", "lacking", "lost", "failed"]
"""Why a node gives jobs back: it leaves, it will leave and another node can go on now, it lacks KV capacity or their
adapter, it lost a rank in their step, or an error ended their attempt."""
_SET = "redis.call('DEL', KEYS[1]); return redis.call('SET', KEYS[1], ARGV[1])"
_HSET = "redis.call('HDEL', KEYS[1], ''); return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"
"""Writes behind a free write. A full Redis refuses a plain one, but a full Redis needs new nodes most."""
_LOG = logging.getLogger(__package__)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Free capacity of a node per level, in KV tokens and sequence slots, and its total capacity.

    `tasks` is the number of tasks that it can take, which need neither.
    """

    kv_tokens: PerLevel
    slots: PerLevel
    kv_total: int
    slots_total: int
    tasks: int = 0
    tenants: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)
    """KV tokens, sequences and weight of each tenant whose jobs the node holds."""
    background_due: bool = False
    """Whether background work had less than its share of the node's time lately."""
    left_some: bool = False
    """Whether the last take left other nodes jobs that they may still take."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One job assigned to this node.

    `lease` is the fencing token that every write must carry. `num_chunks` is the number of chunks that earlier nodes
    logged. `cost` is in KV tokens. `request` is empty if it is too long for the answer; see `NodeBroker.requests`.
    `level` is the job's level. `urgency` is the level that it counts as: a more urgent one after a long wait, and
    `standard` for an interactive job of a tenant above its share. `preemptions` counts how often it was given back.
    `weight` is the tenant's scheduling weight. `num_sequences` is 0 for a task that needs no engine.
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
    num_sequences: int = 1
    level: int = int(Priority.STANDARD)
    waited_ms: int = field(default=0, compare=False)
    """Milliseconds since its submission."""
    taken_ms: int = field(default=0, compare=False)
    """When this lease began, in milliseconds of Redis's clock."""

    @property
    def priority(self) -> Priority:
        """The job's class."""
        return class_of_level(self.level)

    @property
    def is_background(self) -> bool:
        """Whether no caller waits for the job."""
        return is_background(self.level)


@dataclass(frozen=True, slots=True)
class TakeAnswer:
    """Answer of take: the assigned jobs, jobs still queued per level, when to ask again (0: no need), live nodes."""

    jobs: tuple[Taken, ...]
    depth: PerLevel
    again_in_ms: int
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Emission:
    """Encoded chunks of one job; `index` is the position of the first chunk in the log.

    `progress` is an encoded message about the job's prefill, or empty. It is published but not stored.
    """

    job_id: str
    lease: str
    index: int
    chunks: tuple[bytes, ...]
    progress: bytes = b""


@dataclass(frozen=True, slots=True)
class GivenBackJob:
    """A job to give back. `cost`: KV tokens that it will probably hold; `max_kv_tokens`: the most that it may hold.

    `num_preemptions`: how often this node's engine preempted its sequences.
    """

    job_id: str
    lease: str
    cost: int
    max_kv_tokens: int
    num_preemptions: int = 0
    code: str = ""
    """The code of the error that ended its attempt, if one did."""


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Answer of heartbeat's check: held jobs to end as canceled or expired, and held jobs that this node has lost."""

    cancelled: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    fenced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Takeover:
    """Number of earlier seat holders that are still in the pool, and ms until the last of them counts as dead."""

    num_left: int
    wait_ms: int


class UsedTokens(TypedDict, total=False):
    """Resources that a job used, as far as its node knows them."""

    kv_token_ms: float | None
    """KV tokens × milliseconds that it held; its tenant is charged that. None: the predicted charge stays."""
    usage: Usage | None
    """Tokens counted to its tenant. None: only the output tokens in the log are counted."""
    log_bytes: int | None
    """Bytes of all its chunks. None: the script measures the log."""
    num_preemptions: int
    """How often this node's engine preempted its sequences."""


@dataclass(frozen=True, slots=True)
class Successor:
    """The job that takes the place of one whose output was refused, and its packed request."""

    job_id: str
    request: bytes


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job: its last chunks, how it ended, and its packed result."""

    last: Emission
    outcome: Outcome
    result: bytes = b""
    used: UsedTokens = field(default_factory=UsedTokens)
    successor: Successor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its chunks and its result."""
        return len(self.result) + sum(map(len, self.last.chunks))


async def config_of_pool(redis: Redis, pool: str) -> dict[str, str]:
    """Return the config with which the live nodes of a pool run; empty if none lives. Raises UnavailableError."""
    with translated():
        found = await cast(Any, redis).hgetall(keys.config(pool))
        config = {name.decode(): value.decode() for name, value in found.items() if is_text(name) and is_text(value)}
        if not config:
            return {}
        now_ms = pool_ms(await redis.time(), found.get(b"ahead_ms"))
        oldest_ms = now_ms - whole(config.get("lease_ms"), LEASE_MS)
        return config if await unless_wrong_type(0, redis.zcount, keys.nodes(pool), oldest_ms, "+inf") else {}


class LeaseLostError(Exception):
    """The pool has declared this node dead; its jobs belong to other nodes now."""


class NodeBroker:
    """The node's side of one pool's queue. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, pool: str, node_id: str, revision: str) -> None:
        self._redis = redis
        self._yielder = LoopYielder()
        self._clocks = PoolClocks()
        self._pool = pool
        self._node_id = node_id
        self._revision = revision
        self._joined: tuple[dict[str, int | str], PoolRecord] | None = None
        """With what it has joined. A heartbeat that meets a damaged config joins with that again."""
        self._may_list = True
        """False for a user of Redis that is confined to this pool."""

    async def join(self, config: dict[str, int | str], record: PoolRecord) -> None:
        """Join the pool and announce it. Raises ConfigError if live nodes use another configuration."""
        self._joined = config, record
        pairs = [item for name, value in config.items() for item in (name, value)]
        answer = await self._call("join", self._revision, *pairs)
        if answer[0] != b"OK":
            field, theirs = answer[1].decode(), answer[2].decode()
            message = f"pool {self._pool} runs with {field}={theirs}, this node with {config[field]}"
            raise ConfigError(message, param=field)
        await self.announce(record)

    async def announce(self, record: PoolRecord) -> None:
        """Publish the pool's record to clients, and the adapters of this node. Repeating it mends what is damaged.

        A node whose rules confine it to its pool cannot list it: `penstock pools allow` does.
        """
        redis, packed = cast(Any, self._redis), wire.encode_record(record)
        with translated():
            await redis.eval(_SET, 1, keys.record(self._pool), packed)
            if record.adapters:
                await redis.eval(_HSET, 1, keys.adapters(self._pool), self._node_id, packed)
            else:
                await redis.hdel(keys.adapters(self._pool), self._node_id)
            if self._may_list:
                await self._list()

    async def _list(self) -> None:
        try:
            await keep_listed(self._redis, self._pool)
        except ResponseError as error:
            # A script that was refused a key raises a plain ResponseError.
            if not isinstance(error, NoPermissionError) and "access" not in str(error):
                raise
            self._may_list = False
            _LOG.warning("this user may not list its pool", extra={"pool": self._pool})

    async def heartbeat(
        self, pressure: NodePressure, *, free: int, answered_call: int, held: Sequence[str] | None
    ) -> HeartbeatAnswer:
        """Send a heartbeat. With `held`, also compare the held jobs with the queue's records.

        `free` is in KV tokens, and negative while the node drains. `answered_call` is the number of the last take whose
        answer arrived. Raises LeaseLostError.
        """
        record, check = wire.encode_record(pressure), int(held is not None)
        kv_tokens = pressure.kv_blocks_total * pressure.block_size
        pace = f"{pressure.drain_cost_per_s:g} {pressure.max_num_seqs} {kv_tokens} {self._revision}"
        told = self._revision, free, pace if pressure.takes_jobs else "", record, answered_call, check
        answer = await self._call("heartbeat", *told, *(held or ()))
        if answer[0] == b"SWEPT":
            raise LeaseLostError
        scripts.log_ends(answer[5])
        if answer[4] and self._joined is not None:
            _LOG.error("the pool's config is damaged; this node writes its own again", extra={"pool": self._pool})
            await self.join(*self._joined)
        return HeartbeatAnswer(*(tuple(i.decode() for i in ids) for ids in answer[1:4]))

    async def declare_dead(self, seats: Sequence[str], *, has_joined: bool) -> Takeover:
        """Declare the earlier holders of these seats dead.

        With `has_joined`, record this node as their present holder.
        """
        name = self._node_id if has_joined else ""
        num_left, wait_ms = await scripts.call(self._redis, "declare_dead", self._pool, name, *seats)
        return Takeover(num_left, int(wait_ms))

    async def leave(self) -> int:
        """Leave the pool. Returns the number of jobs still held, which a sweep will requeue."""
        return cast(int, await self._call("leave"))

    async def take(self, call: int, nonce: str, capacity: Capacity, *, hold_ms: float = HOLD_MS) -> TakeAnswer:
        """Take queued jobs that fit. Repeating the last `call` gets the same answer. Raises LeaseLostError.

        `hold_ms` is the expected time for which this node holds a KV token of cost. A tenant is charged
        cost × hold_ms ÷ weight.
        """
        asked = {
            "call": call,
            "nonce": nonce,
            "revision": self._revision,
            "hold_ms": hold_ms,
            "kv_tokens": capacity.kv_tokens,
            "slots": capacity.slots,
            "kv_total": capacity.kv_total,
            "slots_total": capacity.slots_total,
            "task_slots": capacity.tasks,
        }
        if capacity.tenants:
            asked["held"] = capacity.tenants
        if capacity.background_due:
            asked["background_due"] = True
        if capacity.left_some:
            asked["left_some"] = True
        answer = await self._call("take", scripts.packed(asked))
        if answer[0] == b"UNKNOWN_NODE":
            raise LeaseLostError
        if answer[0] != b"OK":
            raise InvariantError(f"take {call} answered {answer[0]!r}")
        # Short answers, such as a repeated one, have no ends.
        scripts.log_ends(answer[5] if len(answer) > 5 else ())
        jobs = tuple(map(_taken, answer[1]))
        return TakeAnswer(jobs, tuple(answer[2]), int(answer[3]), int(answer[4]))

    async def requests(self, job_ids: Sequence[str]) -> list[bytes | None]:
        """Return the packed requests of taken jobs, None for a job that has ended meanwhile."""
        if not job_ids:
            return []
        with translated():
            return cast(list[bytes | None], await self._redis.mget([keys.request(i) for i in job_ids]))

    async def log(self, job_id: str, count: int, page: int = 500) -> list[Chunk]:
        """Return the first `count` chunks of a taken job, read in pages so that no call blocks Redis for long."""
        chunks: list[Chunk] = []
        for start in range(0, count, page):
            with translated():
                entries = await cast(Any, self._redis.lrange(keys.log(job_id), start, min(start + page, count) - 1))
            chunks += await decoded(entries, self._yielder, max_bytes=inf)
        return chunks

    async def emit(self, emissions: Sequence[Emission]) -> list[str]:
        """Append and publish chunks, of at most MAX_EMIT_JOBS jobs.

        Returns one answer per job: OK, FENCED, CANCEL, EXPIRED, UNREAD, `NEED n`, GONE or `ERR …`; see emit.lua.
        """
        return [a.decode() for a in await self._call("emit", _packed_rows(emissions))]

    def start_emit(self, emissions: Sequence[Emission], on_answers: Callable[[list[str] | None], None]) -> bool:
        """Start an emit call, at less cost than `emit`. Return False without an open connection.

        `on_answers` gets the answers, or None if the call failed: call `emit` then. It must not raise.
        """

        def receive(reply: Any) -> None:
            on_answers(None if isinstance(reply, Exception) else [a.decode() for a in reply])

        return scripts.start(self._redis, "emit", self._pool, self._node_id, _packed_rows(emissions), on_reply=receive)

    async def finish(self, last: Emission, outcome: Outcome, result: bytes, **used: Unpack[UsedTokens]) -> str:
        """End a job with its last chunks and its packed result. Repeating the call is harmless.

        Returns OK, FENCED, `NEED n` or GONE; see finish.lua. Raises InvariantError if the job's keys are damaged.
        """
        (answer,) = await self.finish_many([JobEnd(last, outcome, result, used)])
        if answer.startswith("ERR "):
            raise InvariantError(f"finish: {answer.removeprefix('ERR ')}")
        return answer

    async def finish_many(self, ends: Sequence[JobEnd]) -> list[str]:
        """End up to MAX_FINISH_JOBS jobs. Repeating the call is harmless.

        Returns one answer per job, as `finish` does, or `ERR …` for a job whose keys are damaged.
        """
        rows = scripts.packed(list(map(_fields_of, ends)))
        return [a.decode() for a in await self._call("finish", rows, *(end.result for end in ends))]

    async def lacks_ends(self, ends: Sequence[JobEnd]) -> list[bool]:
        """Return for each end of this node's jobs whether Redis has lost it, so that it must be repeated.

        A job that ended, that another lease holds, that waits after a lease ended, or that is unknown lacks none.
        """
        commands = [("HMGET", keys.job(end.last.job_id), "state", "node", "lease", "taken") for end in ends]
        with translated():
            answers = await scripts.call_all(self._redis, commands)
            if failed := next((one for one in answers if isinstance(one, Exception)), None):
                raise failed
        mine = [(self._node_id.encode(), end.last.lease.encode()) for end in ends]
        return [
            (state == b"running" and (node, lease) == own) or (state == b"queued" and not taken)
            for (state, node, lease, taken), own in zip(answers, mine, strict=True)
        ]

    async def give_back(self, jobs: Sequence[GivenBackJob], why: Why = "drain") -> list[str]:
        """Queue jobs again; they keep their submission time. Returns one answer per job: OK, FENCED, GONE or KEEP.

        KEEP: the job stays with this node, because no other node has capacity for it, or all lack its adapter.
        """
        answers: list[str] = []
        for start in range(0, len(jobs), MAX_GIVE_BACK_JOBS):
            part = jobs[start : start + MAX_GIVE_BACK_JOBS]
            arguments = [
                item
                for job in part
                for item in (
                    *(job.job_id, job.lease, job.cost, job.max_kv_tokens, job.num_preemptions),
                    *((job.code,) if why == "failed" else ()),
                )
            ]
            found, ended = await self._call("give_back", why, *arguments)
            scripts.log_ends(ended)
            answers += [a.decode() for a in found]
        return answers

    async def progress(self, job_ids: Sequence[str]) -> list[int | None]:
        """Return for each job how many chunks its log has; None for one that has ended or is unknown."""
        commands = [one for i in job_ids for one in (("HGET", keys.job(i), "state"), ("LLEN", keys.log(i)))]
        with translated():
            answers = await scripts.call_all(self._redis, commands)
            if failed := next((one for one in answers if isinstance(one, Exception)), None):
                raise failed
        is_open = [state in (b"queued", b"running") for state in answers[::2]]
        return [length if opened else None for opened, length in zip(is_open, answers[1::2], strict=True)]

    async def sweep(self) -> float | None:
        """Sweep the pool for dead nodes and due jobs; the script limits how often it runs.

        Return the seconds until the lease of the longest silent node ends, None if they are unknown.
        """
        return await sweep(self._redis, self._pool, self._clocks)

    async def _call(self, name: str, *arguments: scripts.Argument) -> Any:
        return await scripts.call(self._redis, name, self._pool, self._node_id, *arguments)


def _fields_of(end: JobEnd) -> dict[str, Any]:
    """Return a job's end as finish.lua takes it, without what has its default there."""
    last, outcome, used = end.last, end.outcome, end.used
    usage = used.get("usage")
    reported = {
        "kv_token_ms": used.get("kv_token_ms"),
        "prompt": usage and usage.prompt_tokens,
        "completion": usage and usage.completion_tokens,
        "cached": usage and usage.cached_tokens,
        "reasoning": (usage and usage.reasoning_tokens) or None,
        "log_bytes": used.get("log_bytes"),
    }
    others = {
        "code": outcome.code,
        "message": outcome.message[:MAX_MESSAGE_CHARS],
        "param": outcome.param,
        "preemptions": used.get("num_preemptions"),
        "chunks": last.chunks,
        "successor": end.successor and (end.successor.job_id, end.successor.request),
    }
    return {
        "id": last.job_id,
        "lease": last.lease,
        "index": last.index,
        "state": outcome.state,
        **{name: value for name, value in reported.items() if value is not None},
        **{name: value for name, value in others.items() if value},
    }


def _packed_rows(emissions: Sequence[Emission]) -> bytes:
    return scripts.packed([(e.job_id, e.lease, e.index, e.chunks, e.progress) for e in emissions])


def _taken(row: list[Any]) -> Taken:
    job_id, lease, losses, num_chunks, cost, deadline_in_ms, request, tenant, urgency, preemptions, weight, *last = row
    numbers = (losses, num_chunks, cost, deadline_in_ms)
    return Taken(
        job_id.decode(), lease.decode(), *numbers, request, tenant.decode(), urgency, preemptions, float(weight), *last
    )
