"""A pool's queue for tests: real scripts on a real Redis. Time advances by rewriting stored times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from uuid_utils import uuid7

from penstock.contract.job import JobDef, Priority
from penstock.contract.output import Chunk, Outcome
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.priority import NUM_LEVELS, PerLevel, level_of
from penstock.contract.tasks import KINDS
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.node import Capacity, Emission, GivenBackJob, NodeBroker, TakeAnswer, Taken, Why
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.queue.wire import encode_chunk

POOL = "m"
P = keys.prefix(POOL)
TENANT = "default"
LEASE_MS = 12_000
"""Long enough for a busy machine: within a quarter of it tests do what must not take long."""
SLOT_MS = 5000
"""Tokens used are counted in slots of time of this length; waiting.lua has the same value."""
CONFIG: dict[str, Any] = {
    "lease_ms": LEASE_MS,
    "abandon_after_ms": 30_000,
    "reattach_grace_ms": 5_000,
    "log_ttl_ms": 120_000,
    "result_ttl_ms": 86_400_000,
    "idem_ttl_ms": 43_200_000,
    "max_open_jobs": 100_000,
    "max_queued_cost": 10**9,
    "max_wait_ms": 60_000,
    "max_losses": 3,
    "progress_chunks": 64,
    "avoid_ms": 2_000,
    "policy": "priority",
    "aging_ms": 10**9,
    "bypass_ms": 0,
}
RECORD = PoolRecord(POOL, "acme/model", max_model_len=2048, adapters={"sql": "0" * 32}, kinds=KINDS)


def new_id(pool: str = POOL) -> str:
    return f"{pool}.{uuid7()}"


def id_minted_at(unix_s: float) -> str:
    minted = f"{int(unix_s * 1000):012x}"
    return f"{POOL}.{minted[:8]}-{minted[8:]}{str(uuid7())[13:]}"


def new_job(job_id: str | None = None, /, **fields: Any) -> JobDef:
    """Return a job. Unless a test says otherwise, it is foreground work that goes on without a reader."""
    fields = fields if fields.keys() & {"prompt_token_ids", "messages"} else {"prompt": "hello", **fields}
    kind = {} if "background" in fields else {"background": False, "needs_reader": False}
    return JobDef(id=job_id or new_id(), **{**kind, **fields})


def _of_levels(given: int | PerLevel) -> PerLevel:
    """Return one number per level. Background work has as much as the last class of foreground work."""
    return (given,) * NUM_LEVELS if isinstance(given, int) else (*given, *given[-1:] * (NUM_LEVELS - len(given)))


def chunks_of(job_id: str, start: int, count: int) -> tuple[bytes, ...]:
    return tuple(encode_chunk(Chunk(job_id, i, 0, i, (100 + i,), f"t{i} ")) for i in range(start, start + count))


def ids_of(answer: TakeAnswer) -> list[str]:
    """Return the ids of the jobs that a node was given."""
    return [job.job_id for job in answer.jobs]


class FakeNode:
    """A node without an engine: it counts its calls and emits what the test passes."""

    def __init__(self, redis: Redis, name: str, revision: str) -> None:
        self.name = name
        self.revision = revision
        self.broker = NodeBroker(redis, POOL, name, revision)
        self.call = 0

    async def join(self, **config: int | str) -> None:
        await self.broker.join({**CONFIG, **config}, RECORD)

    async def take(
        self,
        tokens: int | PerLevel = 10**6,
        slots: int | PerLevel = 256,
        *,
        kv_total: int = 10**6,
        slots_total: int = 256,
        hold_ms: float = 1.0,
        tasks: int = 0,
        tenants: Mapping[str, tuple[int, int, float]] | None = None,
        background_due: bool = False,
        left_some: bool = False,
    ) -> TakeAnswer:
        self.call += 1
        return await self.take_again(
            tokens,
            slots,
            kv_total=kv_total,
            slots_total=slots_total,
            hold_ms=hold_ms,
            tasks=tasks,
            tenants=tenants,
            background_due=background_due,
            left_some=left_some,
        )

    async def take_again(
        self,
        tokens: int | PerLevel = 10**6,
        slots: int | PerLevel = 256,
        *,
        kv_total: int = 10**6,
        slots_total: int = 256,
        hold_ms: float = 1.0,
        tasks: int = 0,
        tenants: Mapping[str, tuple[int, int, float]] | None = None,
        background_due: bool = False,
        left_some: bool = False,
    ) -> TakeAnswer:
        """Repeat the last call, as after a lost reply."""
        room, places = _of_levels(tokens), _of_levels(slots)
        whole = Capacity(room, places, kv_total, slots_total, tasks, tenants or {}, background_due, left_some)
        return await self.broker.take(self.call, f"nonce-{self.name}", whole, hold_ms=hold_ms)

    async def take_one(self) -> Taken:
        answer = await self.take(tasks=1)
        assert len(answer.jobs) == 1
        return answer.jobs[0]

    async def emit(self, taken: Taken, start: int, count: int = 1) -> str:
        chunks = chunks_of(taken.job_id, start, count)
        return (await self.broker.emit([Emission(taken.job_id, taken.lease, start, chunks)]))[0]

    async def finish(
        self,
        taken: Taken,
        start: int,
        count: int = 0,
        *,
        outcome: Outcome | None = None,
        kv_token_ms: float | None = None,
    ) -> str:
        last = Emission(taken.job_id, taken.lease, start, chunks_of(taken.job_id, start, count))
        return await self.broker.finish(last, outcome or Outcome("succeeded"), b"result", kv_token_ms=kv_token_ms)

    async def give_back(self, taken: Taken, cost: int | None = None, most: int = 0, *, why: Why = "drain") -> str:
        returned = GivenBackJob(taken.job_id, taken.lease, taken.cost if cost is None else cost, most)
        return (await self.broker.give_back([returned], why))[0]

    async def heartbeat(
        self, held: Sequence[str] | None = None, *, answered: int | None = None, free: int = 1000, **record: Any
    ) -> Any:
        answered_call = self.call if answered is None else answered
        pressure = NodePressure(self.name, **{"revision": self.revision, "max_num_seqs": 256, **record})
        return await self.broker.heartbeat(pressure, free=free, answered_call=answered_call, held=held)


@dataclass
class Inbox:
    """A subscription and the messages that it received."""

    redis: Redis
    pubsub: PubSub
    channel: str

    async def messages(self) -> list[bytes]:
        """Return all messages so far. They end at a marker that this method publishes, so it needs no timeout."""
        await self.redis.publish(self.channel, b"marker")
        found: list[bytes] = []
        while True:
            message = await self.pubsub.get_message(ignore_subscribe_messages=True, timeout=60)
            assert message is not None
            if message["data"] == b"marker":
                return found
            found.append(message["data"])


class Queue:
    """One pool: a producer, nodes by name, and its keys."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.producer = ProducerBroker(redis)

    async def node(self, name: str = "n1", revision: str = "r1", **config: int | str) -> FakeNode:
        """Return a node that has joined."""
        node = FakeNode(self.redis, name, revision)
        await node.join(**config)
        return node

    async def submit(
        self, job: JobDef | None = None, *, cost: int = 100, inbox: str = "", weight: float = 1.0, **fields: Any
    ) -> str:
        job = job or new_job(**fields)
        return (await self.producer.submit(Submission(job, cost, terms=Terms(weight=weight)), inbox=inbox)).job_id

    async def submit_many(self, count: int, **fields: Any) -> list[str]:
        """Submit jobs whose order is defined even within one millisecond."""
        ids = []
        for number in range(count):
            job_id = await self.submit(**fields)
            level = level_of(fields.get("priority", Priority.STANDARD), fields.get("background", False))
            await self.redis.zadd(keys.waiting(POOL, level), {job_id: 1000 + number})
            ids.append(job_id)
        return ids

    async def running(self, node: FakeNode, **fields: Any) -> Taken:
        """Return a job that `node` has taken."""
        job_id = await self.submit(**fields)
        taken = await node.take_one()
        assert taken.job_id == job_id
        return taken

    async def state(self, job_id: str) -> str:
        return (await self.record(job_id)).get("state", "")

    async def record(self, job_id: str) -> dict[str, str]:
        fields = await cast(Any, self.redis.hgetall(keys.job(job_id)))
        return {name.decode(): value.decode() for name, value in fields.items()}

    async def log(self, job_id: str) -> list[bytes]:
        return cast(list[bytes], await cast(Any, self.redis.lrange(keys.log(job_id), 0, -1)))

    async def change(self, job_id: str, **fields: str | int) -> None:
        await cast(Any, self.redis.hset(keys.job(job_id), mapping=cast(Any, fields)))

    async def delay(self, job_id: str, until_ms: int) -> None:
        """Let a delayed job wait until this time instead."""
        record = await self.record(job_id)
        lane = f"{record['level']}:{record['tenant']}"
        await self.change(job_id, submitted=until_ms)
        await self.redis.zadd(f"{P}:delayed:{lane}", {job_id: until_ms}, xx=True)
        await self.redis.zadd(f"{P}:delayed", {lane: until_ms}, lt=True)

    async def keys(self, pattern: str = "*") -> set[str]:
        """Return the names of the pool's keys that match, without their prefix."""
        found: Any = await self.redis.keys(f"{P.replace('{', '[{]').replace('}', '[}]')}:{pattern}")
        return {key.decode().removeprefix(f"{P}:") for key in found}

    async def ids(self, name: str) -> set[str]:
        """Return the members of a set or sorted set of the pool."""
        key = f"{P}:{name}"
        kind = await self.redis.type(key)
        zset = kind == b"zset"
        members = await cast(Any, self.redis.zrange(key, 0, -1) if zset else self.redis.smembers(key))
        return {member.decode() for member in members}

    async def now_ms(self) -> int:
        seconds, micros = await self.redis.time()
        return int(seconds * 1000 + micros // 1000)

    async def pass_time(self, tenant: str, ms: int) -> None:
        """Move a tenant's rates, used tokens and waits into the past; used tokens move by whole slots of 5 s."""
        redis: Any = self.redis
        for name, value in (await redis.hgetall(f"{P}:rate:{tenant}")).items():
            if name in (b"jobs", b"tokens"):
                await redis.hset(f"{P}:rate:{tenant}", name, float(value) - ms)
        used = f"{P}:used:{tenant}"
        if slots := await redis.hgetall(used):
            await redis.delete(used)
            await redis.hset(used, mapping={int(slot) - ms // SLOT_MS: tokens for slot, tokens in slots.items()})
        if await redis.zscore(f"{P}:awaiting", tenant) is not None:
            await self.age("awaiting", tenant, ms)

    async def age(self, name: str, member: str, by_ms: int) -> None:
        """Move a score of the pool into the past."""
        await self.redis.zincrby(f"{P}:{name}", -by_ms, member)

    async def sweep(self, *, since_last_ms: int | None = LEASE_MS // 4) -> list[Any]:
        """Return the sweep script's answer. `since_last_ms`: time since the last sweep, None for never."""
        if await self.redis.exists(keys.config(POOL)):
            await self.note_sweep(since_last_ms)
            await self.wait_for_who_knows()
        return await self.run_sweep()

    async def wait_for_who_knows(self) -> None:
        """Let a sweep have waited for a process that knows the pool's time."""
        asked_ms = await self.now_ms() - LEASE_MS // 2
        await cast(Any, self.redis.hset(keys.config(POOL), "asked_ms", str(asked_ms)))

    async def note_sweep(self, ms_ago: int | None = 0) -> None:
        """Have the pool's last sweep be so long ago, None for never."""
        if ms_ago is None:
            await cast(Any, self.redis.hdel(keys.config(POOL), "swept_ms"))
        else:
            ahead = await cast(Any, self.redis.hget(keys.config(POOL), "ahead_ms")) or b""
            ahead_ms = int(ahead) if ahead.isdigit() else 0
            swept_ms = await self.now_ms() + ahead_ms - ms_ago
            await cast(Any, self.redis.hset(keys.config(POOL), "swept_ms", str(swept_ms)))

    async def run_sweep(self, *, seen_ms: int = 0) -> list[Any]:
        kind, _, *found = await scripts.call(self.redis, "sweep", POOL, seen_ms)
        return ["OK", len(found[0]), int(found[1]), len(found[2])] if kind == b"OK" else [kind.decode()]

    async def kill(self, node: FakeNode) -> None:
        """Make a node's last heartbeat older than a lease, and sweep."""
        await self.age("nodes", node.name, LEASE_MS + 1)
        await self.sweep()

    async def listen(self, channel: str) -> Inbox:
        pubsub = self.redis.pubsub()
        await pubsub.subscribe(channel)
        assert await pubsub.get_message(timeout=60) is not None
        return Inbox(self.redis, pubsub, channel)
