"""Jobs as clients see them: their records, their lists, their places in the queue, and the records of responses."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast, get_args

from redis.asyncio import Redis

from penstock.contract.channel import Channel, channel_of_field
from penstock.contract.errors import NotFoundError, UnavailableError
from penstock.contract.job import MAX_TAGS, MEMORY, Durability, JobDef, JobKey, is_job_id, lowered_max_tokens, pool_of
from penstock.contract.output import (
    SUCCEEDED,
    TERMINAL_STATES,
    JobLedger,
    LeaseEnd,
    Outcome,
    PastLease,
    PausedKind,
    QueuePosition,
    Usage,
    shown_state,
)
from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES, Priority, class_of_level, is_background
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.durable_calls import confirmed_writes
from penstock.queue.broker.history import RecentCalls
from penstock.queue.job_cost import Ahead
from penstock.queue.record_fields import MAX_WHOLE, all_whole, whole

STATUS_FIELDS = (
    *("state", "tenant", "level", "submitted", "taken", "first", "finished", "node", "chunks", "preemptions"),
    *("losses", "code", "message", "param", "stored", "used", "retaken", "past_leases", "num_past_leases"),
    *("engine_preemptions", "limits", "cancel", "retry_of", "accepted", "tag1", "tag2", "tag3", "tag4"),
    *("webhooks", "channel", "model", "words", "attempts", "retried_as", "retry", "key"),
)
"""The fields of a job's hash that `status_of` needs."""


LEASE_MS = 15_000
"""The default of a node's settings. It stands in for a damaged one of a pool, as in the scripts."""
_STATES = frozenset((*TERMINAL_STATES, "queued", "running"))


def readable(fields: dict[str, str]) -> dict[str, str]:
    """Return the fields of a job's record as the scripts mend them, so that a damaged one can still be shown."""
    if fields["state"] not in _STATES:
        fields["state"] = "queued"
    if not 0 <= whole(fields["level"], -1) < NUM_LEVELS:
        fields["level"] = str(int(Priority.STANDARD))
    return fields


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of a job. Times are Redis ms, 0 for a stage not reached yet."""

    job_id: str
    state: str
    priority: Priority
    is_background: bool
    num_chunks: int
    outcome: Outcome | None
    submitted_ms: int
    taken_ms: int
    first_ms: int
    finished_ms: int
    preemptions: int
    losses: int
    num_waiting_ahead: int
    """The queued jobs of more urgent levels and the older ones of its level, while it is queued."""
    ledger: JobLedger
    tenant: str = "default"
    large_result_bytes: int = 0
    """Size of the result if it is large, else 0."""
    max_tokens: int | None = None
    """The limit to which the context lowered `max_tokens`, if it did. The queue learns the tokens of the prompt at the
    job's end; until then this is what the context leaves at most."""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, str] | None = None
    custom_id: str | None = None
    """The caller's name of the job."""
    accepted_ms: int = 0
    retry_of: str | None = None
    """The id of the job whose request this one repeats."""
    webhooks: tuple[str, ...] = ()
    own_channel: Channel | None = None
    """The channel of Redis on which the queue also publishes the job's chunks."""
    queue_position: QueuePosition | None = None
    """The estimated position of a queued job, if a client's `status` has read it. None if the job is delayed."""
    model: str = ""
    """The name of the model that the job was submitted for; empty for a job of an earlier release."""
    attempt: int = 1
    """The number of its present or last attempt; those of the jobs that it repeats count too."""
    max_attempts: int | None = None
    """How often it may be tried, if its submission says so."""
    retried_as: str | None = None
    """The id of the job that took its place, because its output was refused."""
    concurrency_key: str | None = None
    """The key whose limits it shares with other jobs."""
    first_words: str = ""
    """The first words of the prompt, of a chat those of the user's last message; empty for token ids."""

    @property
    def channel(self) -> str | None:
        """The channel's whole name, or None."""
        return None if self.own_channel is None else keys.own_channel(self.job_id, self.tenant, self.own_channel.name)


def status_of(
    job_id: str,
    fields: Mapping[str, str],
    now_ms: int,
    num_chunks: int = 0,
    num_ahead: int = 0,
    *,
    metadata: bytes | None = None,
) -> JobStatus:
    """Return a job's state from STATUS_FIELDS of its record.

    `now_ms`: Redis's time. `num_chunks`: the length of its log, while the record does not say it. `num_ahead`: the jobs
    queued before it. `metadata`: as JSON, with the custom_id. A damaged number counts as 0, and other damaged parts as
    absent.
    """
    ledger, level = ledger_of(fields), int(fields["level"])
    begins_ms = ledger.queued_ms
    notes = _notes_of(metadata)
    custom_id = notes.pop(wire.CUSTOM_ID, None)
    state = shown_state(ledger.state, is_cancelled=fields["cancel"] == "1", begins_ms=begins_ms, now_ms=now_ms)
    return JobStatus(
        *(job_id, state, class_of_level(level), is_background(level), whole(fields["chunks"], num_chunks)),
        outcome_of(fields),
        *times_ms_of(fields),
        *(ledger.preemptions, ledger.losses, num_ahead),
        ledger,
        tenant=fields["tenant"],
        large_result_bytes=large_result_bytes_of(fields),
        max_tokens=_lowered_limit(fields["limits"], ledger.usage),
        tags=tuple(filter(None, (fields[f"tag{number}"] for number in range(1, MAX_TAGS + 1)))),
        metadata=notes or None,
        custom_id=custom_id,
        accepted_ms=whole(fields["accepted"], ledger.queued_ms),
        retry_of=f"{pool_of(job_id)}.{fields['retry_of']}" if fields["retry_of"] else None,
        webhooks=tuple(fields["webhooks"].split()),
        own_channel=channel_of_field(fields["channel"]),
        model=fields["model"],
        concurrency_key=fields["key"] or None,
        attempt=max(1, whole(fields["attempts"])),
        max_attempts=whole(fields["retry"].partition(" ")[0]) or None,
        retried_as=f"{pool_of(job_id)}.{fields['retried_as']}" if fields["retried_as"] else None,
        first_words=fields["words"],
    )


def _notes_of(metadata: bytes | None) -> dict[str, str]:
    try:
        notes = json.loads(metadata or b"{}")
    except ValueError:
        return {}
    is_right = isinstance(notes, dict) and all(isinstance(value, str) for value in notes.values())
    return notes if is_right else {}


def _lowered_limit(limits: str, usage: Usage | None) -> int | None:
    """Return what the context left of a job's `max_tokens`, or None if it left all. A prompt has a token at least."""
    max_tokens, max_total_tokens = (whole(text) for text in (*limits.split(), "", "")[:2])
    if max_tokens <= 0 or max_total_tokens <= 0:
        return None
    return lowered_max_tokens(max_tokens, max_total_tokens, 1 if usage is None else usage.prompt_tokens)


def large_result_bytes_of(fields: Mapping[str, str]) -> int:
    """Return the size of a job's result if it is large, else 0."""
    stored = fields["stored"].split()
    return whole(stored[1]) if len(stored) > 1 else 0


def ledger_of(fields: Mapping[str, str]) -> JobLedger:
    """Return a job's ledger from STATUS_FIELDS of its record."""
    usage, kv_token_ms = _used(fields["used"])
    return JobLedger(
        fields["state"],
        *times_ms_of(fields),
        node_id=fields["node"],
        retaken_ms=whole(fields["retaken"]),
        past_leases=tuple(_past_leases(fields["past_leases"])),
        num_past_leases=whole(fields["num_past_leases"]),
        preemptions=whole(fields["preemptions"]),
        engine_preemptions=whole(fields["engine_preemptions"]),
        losses=whole(fields["losses"]),
        usage=usage,
        kv_token_ms=kv_token_ms,
    )


CLOCK_FIELDS = ("lease_ms", "ahead_ms")
"""Fields of P:config that tell, with Redis's time, which heartbeats are recent."""


def pool_ms(time: tuple[int, int], ahead_ms: bytes | None) -> int:
    """Return a pool's time, from Redis's answer to TIME and from `ahead_ms` of P:config."""
    return time[0] * 1000 + time[1] // 1000 + whole(ahead_ms, least=-MAX_WHOLE)


def outcome_of(fields: Mapping[str, str]) -> Outcome | None:
    """Return how a job ended, or None for an open job."""
    state = fields["state"]
    if state not in TERMINAL_STATES:
        return None
    if state == "succeeded":
        return SUCCEEDED
    return Outcome(cast(Any, state), fields["code"], fields["message"], fields["param"])


def times_ms_of(fields: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return when a job was submitted, first taken, got its first token, and finished; 0 for a stage not reached."""
    submitted, taken, first, finished = all_whole([fields[f] for f in ("submitted", "taken", "first", "finished")])
    return submitted, taken, first, finished


async def past_leases_of(redis: Redis, job_id: str) -> tuple[PastLease, ...]:
    """Read which leases of a job have ended before the job did; the newest 8."""
    with translated():
        text = await cast(Any, redis).hget(keys.job(job_id), "past_leases")
    return tuple(_past_leases((text or b"").decode()))


_LEASE_ENDS = frozenset(get_args(LeaseEnd))


def _past_leases(text: str) -> Iterator[PastLease]:
    """Parse `<node>@<taken>-<ended>:<why>`, separated by spaces; <why> may be `failed/<code>`."""
    for entry in text.split():
        lease, _, why = entry.rpartition(":")
        why, _, code = why.partition("/")
        node_id, _, times = lease.rpartition("@")
        taken_ms, _, ended_ms = times.partition("-")
        if node_id and why in _LEASE_ENDS:
            yield PastLease(node_id, whole(taken_ms), whole(ended_ms), cast(LeaseEnd, why), code)


def _used(text: str) -> tuple[Usage | None, int | None]:
    """Parse `<prompt> <completion> <cached> <kv_token_ms> <reasoning>`, or nothing for an open job."""
    parts = text.split(" ")
    if not parts[0]:
        return None, None
    prompt, completion, cached, kv_token_ms, reasoning = (*all_whole(parts), 0, 0, 0, 0)[:5]
    return Usage(prompt, completion, cached, reasoning), kv_token_ms if len(parts) > 3 and parts[3] else None


# The positions of waiting jobs in their pool's queue, read for many jobs in one call.

MAX_LOOKED_UP = 1024
"""Jobs that one round of pipelined reads looks for."""
MAX_POSITIONS = 128
"""Jobs whose positions one call reads."""
_TAKEN, _DELAYED = -1, -2


@dataclass(frozen=True, slots=True)
class JobWait:
    """The jobs ahead of a job that has no token yet.

    `ahead` counts the queued jobs of more urgent levels and the older ones of its level; None if a node has the job, or
    if the job is delayed. Under `fair`, its cost is that of the jobs that start before it by their tenants' shares.
    """

    ahead: Ahead | None
    is_background: bool = False
    is_taken: bool = False
    paused: PausedKind | None = None
    """What is paused, so that no node takes the job."""


class QueuePositions:
    """The reader of queue positions."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = redis

    @retried
    async def of(self, pool: str, job_ids: Sequence[str]) -> list[JobWait | None]:
        """Return where up to MAX_POSITIONS jobs of a pool are; None for a job that has begun, has ended or is unknown.

        The cost of the jobs of its own level that are ahead of a job is estimated from the mean of that level.
        """
        answer = await scripts.call(self._redis, "positions", pool, scripts.packed(list(job_ids)))
        counts, costs, *of_jobs = answer
        return [_wait_of(counts, costs, *of_job) for of_job in zip(*of_jobs, strict=True)]


def _wait_of(
    counts: Sequence[int], costs: Sequence[int], level: int, older: int, fair_cost: int, paused: bytes
) -> JobWait | None:
    if older < 0:
        return JobWait(None, is_taken=older == _TAKEN) if older in (_TAKEN, _DELAYED) else None
    own_level = fair_cost if fair_cost >= 0 else costs[level] * older / max(1, counts[level])
    ahead = [*costs[:level], own_level]
    by_kind = sum(ahead[:NUM_PRIORITIES]), sum(ahead[NUM_PRIORITIES:])
    kind = cast(PausedKind, paused.decode()) if paused else None
    return JobWait(Ahead(sum(counts[:level]) + older, *by_kind), is_background(level), paused=kind)


# The records of stored responses. `submit` writes a record together with its job; `ResponseBroker` reads and deletes
# it.

SEAL_KEY_BYTES = 32


class StoredBytes(NamedTuple):
    """How many bytes are stored of a response."""

    record: int
    result: int
    """The size of its job's result if it is large, else 0."""


class ResponseBroker:
    """The stored responses of all pools. Raises UnavailableError when Redis is unreachable."""

    def __init__(
        self,
        redis: Redis,
        patience: Patience | None = None,
        durability: Durability = MEMORY,
        *,
        recent: RecentCalls | None = None,
    ) -> None:
        """`durability`: what a deletion waits for that names nothing else. `recent` gets the deletions, which a Redis
        that lost them gets again.
        """
        self.patience = patience
        self._redis = redis
        self._durability = durability
        self._recent = recent or RecentCalls(0)

    @retried
    async def num_bytes(self, job_id: str, tenant: str) -> StoredBytes:
        """Return how much `read` and the job's result would bring. Raises NotFoundError as `read` does."""
        with translated():
            values = await cast(Any, self._redis.hmget(keys.job(job_id), ["tenant", "response_bytes", "stored"]))
        owner, record, stored = ((value or b"").decode(errors="replace") for value in values)
        if owner != tenant or not record:
            raise _no_response(job_id)
        return StoredBytes(whole(record), large_result_bytes_of({"stored": stored}))

    @retried
    async def read(self, job_id: str, tenant: str) -> bytes:
        """Return the record of a stored response. Raises NotFoundError, also for the response of another tenant."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hget(keys.job(job_id), "tenant")
                pipe.get(keys.response(job_id))
                owner, record = await pipe.execute()
        if record is None or owner is None or owner.decode() != tenant:
            raise _no_response(job_id)
        return cast(bytes, record)

    @retried
    async def delete(self, job_id: str, tenant: str, durability: Durability | None = None) -> None:
        """Delete a stored response with its job's log and result. An open job is canceled.

        With another durability than `memory`, the call waits until the disk or a replica has the deletion. Then a
        repeated call waits again, and one with `memory` raises NotFoundError, as for an unknown response. Raises
        UnsupportedDurabilityError, and NotOnDiskError or NotReplicatedError if the response is deleted and that was not
        confirmed in time.
        """
        pool, level = pool_of(job_id), durability or self._durability
        arguments = (job_id, tenant, int(level != MEMORY))
        if level == MEMORY:
            answer, ended = await scripts.call(self._redis, "delete_response", pool, *arguments)
        else:
            with translated():
                async with confirmed_writes(self._redis, level, "the response is deleted") as connection:
                    command = scripts.command("delete_response", pool, arguments, whole=True)
                    answer, ended = await connection.call(*command)
        scripts.log_ends(ended)
        if answer != b"OK":
            raise _no_response(job_id)
        self._recent.note(partial(scripts.call, self._redis, "delete_response", pool_of(job_id), job_id, tenant))

    @retried
    async def seal_key(self) -> bytes:
        """Return the secret of all gateways for the seals of summaries. The first call of all stores a random one."""
        redis = cast(Any, self._redis)
        with translated():
            found = await redis.get(keys.SEAL_KEY)
            if found is None:
                await redis.set(keys.SEAL_KEY, secrets.token_bytes(SEAL_KEY_BYTES), nx=True)
                found = await redis.get(keys.SEAL_KEY)
        if found is None:
            raise UnavailableError("the secret for the seals of summaries was deleted just now", code="no_seal_key")
        return cast(bytes, found)


def _no_response(job_id: str) -> NotFoundError:
    return NotFoundError(f"no response is stored of job {job_id}", code="response_not_found")


# What the queue knows of earlier submissions, by job id or idempotency key.


class KnownJobs:
    """Looks for jobs that were submitted before. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = redis

    @retried
    async def has(self, job: JobDef) -> bool:
        """Return whether a job of this id or with this idempotency key was submitted before to its pool."""
        names = [keys.job(job.id)]
        if job.idempotency_key:
            names.append(keys.idempotency(job.pool, job.tenant, keys.key_hash(job.idempotency_key)))
        with translated():
            return bool(await self._redis.exists(*names))

    @retried
    async def named(self, key: JobKey, pool: str) -> str | None:
        """Return the id of a pool's job with this idempotency key; None without one."""
        with translated():
            found = await self._redis.get(keys.idempotency(pool, key.tenant, keys.key_hash(key.key)))
        return found.decode() if isinstance(found, bytes) and is_job_id(found.decode(errors="replace")) else None

    async def unknown(self, job_ids: Sequence[str]) -> list[str]:
        """Return those of the jobs that Redis does not know. Raises UnavailableError."""
        found = list[int]()
        for start in range(0, len(job_ids), MAX_LOOKED_UP):
            commands = [("EXISTS", keys.job(job_id)) for job_id in job_ids[start : start + MAX_LOOKED_UP]]
            with translated():
                answers = await scripts.call_all(self._redis, commands)
                if failed := next((one for one in answers if isinstance(one, Exception)), None):
                    raise failed
            found += answers
        return [job_id for job_id, is_known in zip(job_ids, found, strict=True) if not is_known]

    @retried
    async def pool_of(self, key: JobKey, pools: Sequence[str]) -> str:
        """Return which of the pools has a job of this key; of several, the first one; of none, an empty text.

        The reads are pipelined.
        """
        names = [keys.idempotency(pool, key.tenant, keys.key_hash(key.key)) for pool in pools]
        with translated():
            found = await asyncio.gather(*(self._redis.exists(name) for name in names))
        return next((pool for pool, has_key in zip(pools, found, strict=True) if has_key), "")
