"""The load of fail-overs: streams, a backlog, and an operator. Compares what callers were told with what Redis has."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from faults.tools.history import Recorder
from faults.tools.road import POOL
from faults.tools.work import PROMPT, Work, new_work
from redis.asyncio import Redis

from penstock.contract.durability import REPLICATED
from penstock.contract.errors import NotConfirmedError, StreamDivergedError, UnavailableError
from penstock.contract.job import ResponseRecord
from penstock.contract.output import TERMINAL_STATES, Chunk
from penstock.contract.tenant import ApiKey, Terms
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import translated, with_retries
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.tenants.key_store import KeyStore
from penstock.queue.wire import decode_chunks
from penstock.runtime.event_loop import cancel_until_done

STREAM_TOKENS, SHORT_TOKENS = 200, 8
PATIENCE_S = 600.0
PAUSE_S = 0.05
"""Between two steps of an operator."""
SPARE = 1.15
"""Some jobs of the backlog end before the primary is lost."""
AT_ONCE = 1000
"""Submissions."""
READ_AT_ONCE = 64
NUM_KEYS, NUM_RESPONSES = 40, 200
_RECORD = ResponseRecord(b"record", 7_200_000)
_READ = """
local found = {}
for i, names in ipairs(cmsgpack.unpack(ARGV[1])) do
  local state, cancel, finished = unpack(redis.call('HMGET', names[1], 'state', 'cancel', 'finished'))
  found[i] = {state, cancel, redis.call('LLEN', names[2]), redis.call('EXISTS', names[3]), finished}
end
return found
"""

_READ_LOGS = """
local found = {}
for i, names in ipairs(cmsgpack.unpack(ARGV[1])) do
  found[i] = {redis.call('HGET', names[1], 'state'), redis.call('LRANGE', names[2], 0, -1)}
end
return found
"""


async def new_key(store: KeyStore) -> tuple[str, ApiKey]:
    """Make an API key, and wait for busy Sentinels."""
    return await with_retries(lambda: store.add("acme", ("infer",), Terms()), PATIENCE_S)


@dataclass
class Told:
    """What callers were told, and what they saw."""

    works: dict[str, Work] = field(default_factory=dict)
    """Accepted jobs."""
    cancelled: set[str] = field(default_factory=set)
    cancelling: set[str] = field(default_factory=set)
    """Jobs that ran when they were canceled: they may have succeeded before."""
    deleted: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    replicated: set[str] = field(default_factory=set)
    """Jobs of which a replica has told that it has them."""
    pauses: list[float] = field(default_factory=list)
    """The longest pause of each stream, in seconds."""
    unconfirmed: int = 0
    """Times that a stream ended because no replica confirmed its tokens."""
    unchecked: set[str] = field(default_factory=set)
    """Streams whose tokens no reference knows, because the engine gives other ones at each take."""
    num_diverged: int = 0
    """Streams that ended because the job's tokens were no longer those that they had shown."""
    at_ms: dict[str, float] = field(default_factory=dict)
    """When the last call about a job or a key was acknowledged, Unix time."""

    def note(self, names: set[str], name: str) -> None:
        """Add a job or a key to one of the sets."""
        names.add(name)
        self.at_ms[name] = 1000 * time.time()

    def now(self) -> Told:
        """Return what was told until now."""
        return replace(
            self,
            works=dict(self.works),
            cancelled=set(self.cancelled),
            deleted=set(self.deleted),
            revoked=set(self.revoked),
            replicated=set(self.replicated),
            at_ms=dict(self.at_ms),
        )


@dataclass
class Seen:
    """What a server has at one moment."""

    states: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    finished_ms: dict[str, float] = field(default_factory=dict)
    flagged: set[str] = field(default_factory=set)
    responses: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)

    @classmethod
    async def read(cls, redis: Redis, job_ids: Iterable[str]) -> Seen:
        """Look at these jobs and at all keys."""
        seen, job_ids = cls(), list(job_ids)
        names = [(keys.job(job_id), keys.log(job_id), keys.response(job_id)) for job_id in job_ids]
        # One call, so that it ends before Sentinel promotes a replica and closes the connections to it.
        with translated():
            answers = await cast(Any, redis.eval(_READ, 0, scripts.packed(names)))
        for job_id, (state, cancel, length, has_response, finished) in zip(job_ids, answers, strict=True):
            seen.states[job_id] = (state or b"").decode()
            seen.lengths[job_id] = int(length)
            seen.finished_ms[job_id] = float(finished or 0)
            seen.flagged |= {job_id} if cancel == b"1" else set()
            seen.responses |= {job_id} if has_response else set()
        seen.revoked = {key_id for key_id, key in (await KeyStore(redis).all()).items() if key.is_revoked}
        return seen

    @classmethod
    async def read_soon(cls, redis: Redis, job_ids: Iterable[str]) -> Seen:
        """Look at a server that has been promoted, which closes its connections."""
        return await with_retries(lambda: cls.read(redis, job_ids), PATIENCE_S)

    @property
    def num_queued(self) -> int:
        """How many jobs wait."""
        return sum(state == "queued" for state in self.states.values())

    def has_ended(self, job_id: str) -> bool:
        """Whether a job has ended here."""
        return self.states[job_id] in TERMINAL_STATES


class Load:
    """Streams one after the other, a backlog, and an operator who cancels, deletes and revokes, until told to stop."""

    def __init__(
        self, client: AsyncClient, store: KeyStore, args: argparse.Namespace, history: Recorder | None = None
    ) -> None:
        """`history` gets what the readers of streams see."""
        self._history = history
        self._client = client
        self._store = store
        self._args = args
        self.told = Told()
        self._ended = set[str]()
        self._responses: list[Work] = []
        self._key_ids: list[str] = []
        self._candidates: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()

    @property
    def tokens_need_replica(self) -> bool:
        """Whether the streams wait until a replica has their tokens."""
        return bool(self._args.token_durability == REPLICATED)

    @property
    def watched(self) -> list[str]:
        """The jobs that the next fail-over may change: all that had not ended before the last one was repaired."""
        return [job_id for job_id in self.told.works if job_id not in self._ended]

    async def begin(self) -> None:
        """Start the streams and the operator."""
        self._tasks = [asyncio.create_task(self._read_streams()) for _ in range(self._args.streams)]
        beside = self._operate(), self._go_on_submitting(), self._submit_replicated()
        self._tasks += map(asyncio.create_task, beside)

    async def fill(self, redis: Redis) -> None:
        """Fill the queue up to the backlog, and give the operator keys and responses."""
        seen = await Seen.read(redis, self.watched)
        num_missing = round(SPARE * self._args.backlog) - seen.num_queued
        for number in range(0, num_missing, AT_ONCE):
            made = await asyncio.gather(*(self._submit() for _ in range(min(AT_ONCE, num_missing - number))))
            self._candidates += [work.id for work in made]
        while len(self._key_ids) < NUM_KEYS:
            self._key_ids.append((await new_key(self._store))[1].key_id)
        lacking = range(NUM_RESPONSES - len(self._responses))
        self._responses += await asyncio.gather(*(self._submit(response=_RECORD) for _ in lacking))

    def forget_ended(self, seen: Seen) -> None:
        """Watch jobs that have ended no more, except those with responses."""
        stored = {work.id for work in self._responses} | self.told.deleted
        self._ended |= {job_id for job_id in seen.states if seen.has_ended(job_id)} - stored

    async def end(self) -> None:
        """Let all streams end, and wait until all jobs have."""
        self._stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """End what `end` would wait for."""
        await cancel_until_done(self._tasks)

    async def _submit(self, **options: Any) -> Work:
        work = new_work(POOL, SHORT_TOKENS, temperature=0.0, needs_reader=False, **options)
        await self._client.submit_unread(PROMPT, **work.options)
        self._accepted(work)
        return work

    def _accepted(self, work: Work) -> None:
        self.told.works[work.id] = work
        self.told.at_ms[work.id] = 1000 * time.time()

    async def _go_on_submitting(self) -> None:
        while not self._stop.is_set():
            await self._submit()
            await asyncio.sleep(PAUSE_S)

    async def _submit_replicated(self) -> None:
        while not self._stop.is_set():
            with suppress(NotConfirmedError, UnavailableError):  # then the caller was told nothing of a replica
                self.told.replicated.add((await self._submit(durability="replicated")).id)
            await asyncio.sleep(PAUSE_S)

    async def _read_streams(self) -> None:
        while not self._stop.is_set():
            await self._read_stream()

    async def _read_stream(self) -> None:
        work = new_work(POOL, STREAM_TOKENS, temperature=1.0, background=False)
        level, history = self._args.token_durability, self._history
        job = await self._client.submit(PROMPT, token_durability=level, **work.options)
        self._accepted(work)
        if self._args.differs:
            self.told.unchecked.add(work.id)
        if history is not None:
            history.note("submit", job=job.id, durability="memory")
        last_s, pause_s = time.monotonic(), 0.0
        try:
            async for chunk in self._chunks_of(job):
                now_s = time.monotonic()
                pause_s, last_s = max(pause_s, now_s - last_s), now_s
                work.see_chunk(chunk)
                if history is not None and chunk.token_ids:
                    shown = {"choice": chunk.choice, "position": chunk.position, "tokens": chunk.token_ids}
                    history.note("chunk", job=job.id, reader="stream", durability=level, **shown)
        except StreamDivergedError:
            if not self._args.differs:
                raise
            self.told.num_diverged += 1
            self.told.cancelling.add(work.id)  # The queue cancels it, because its reader has left.
            return
        if history is not None:
            history.note("end", job=job.id, reader="stream", state=work.end)
        self.told.pauses.append(pause_s)

    async def _chunks_of(self, job: AsyncJob) -> AsyncIterator[Chunk]:
        """Yield the chunks of a job. While no replica confirms them, ask again."""
        last = -1
        while True:
            try:
                async for chunk in job.chunks():
                    last = chunk.index
                    yield chunk
                return
            except NotConfirmedError:
                self.told.unconfirmed += 1
            while True:
                with suppress(NotConfirmedError):  # no replica is connected yet
                    job = await self._client.attach(job.id, after=last, token_durability=self._args.token_durability)
                    break
                await asyncio.sleep(PAUSE_S)

    async def _operate(self) -> None:
        """Cancel jobs, delete responses and revoke keys. The client reads the keys as a gateway does."""
        num_steps = 0
        while not self._stop.is_set():
            await asyncio.sleep(PAUSE_S)
            await self._client.api_keys()
            if self._candidates:
                job_id = self._candidates.pop()
                state = await self._client.cancel(job_id)
                if state == "cancelled":
                    self.told.note(self.told.cancelled, job_id)
                elif state == "cancelling":
                    self.told.cancelling.add(job_id)
            if self._responses:
                work = self._responses.pop()
                await self._client.servers.of_job(work.id).responses.delete(work.id, "default")
                self.told.note(self.told.deleted, work.id)
            num_steps += 1
            if self._key_ids and num_steps % 4 == 0:
                key_id = self._key_ids.pop()
                with suppress(UnavailableError):  # then the operator was told nothing
                    await self._store.revoke(key_id)
                    self.told.note(self.told.revoked, key_id)


async def note_kept(redis: Redis, history: Recorder, job_ids: Iterable[str]) -> None:
    """Note what a server has of some streams that were open, before any process repairs it."""
    names = [(keys.job(job_id), keys.log(job_id)) for job_id in job_ids]
    with translated():
        answers = await cast(Any, redis.eval(_READ_LOGS, 0, scripts.packed(names)))
    for job_id, (state, entries) in zip(job_ids, answers, strict=True):
        tokens: dict[int, list[int]] = {}
        for chunk in (chunk for entry in entries for chunk in decode_chunks(entry)):
            tokens.setdefault(chunk.choice, []).extend(chunk.token_ids)
        ended = (state or b"").decode() in TERMINAL_STATES
        history.note("kept", job=job_id, known=bool(state), tokens=tokens, ended=ended)


def lost(told: Told, before: Seen, after: Seen) -> dict[str, set[str]]:
    """Return what the primary had and the replica lacks, of each kind of operation."""
    jobs = set(before.states)
    return {
        "submit": {one for one in jobs if before.states[one] and not after.states[one]},
        "token": {one for one in jobs if not before.has_ended(one) and after.lengths[one] < before.lengths[one]},
        "finish": {one for one in jobs if before.has_ended(one) and not after.has_ended(one)},
        "cancel": {one for one in told.cancelled & jobs if not after.has_ended(one) and one not in after.flagged},
        "response deleted": told.deleted & after.responses,
        "key revoked": told.revoked - after.revoked,
    }


def oldest_s(gone: dict[str, set[str]], told: Told, before: Seen, lost_at_ms: float) -> float:
    """Return the age of the oldest operation that was lost, of tokens excepted, when it was lost; 0 if none was."""
    times = [before.finished_ms[one] for one in gone["finish"] if before.finished_ms[one]]
    calls = ("submit", "cancel", "response deleted", "key revoked")
    times += [told.at_ms[one] for kind in calls for one in gone[kind] if one in told.at_ms]
    return max(0.0, lost_at_ms - min(times, default=lost_at_ms)) / 1000


def is_repaired(gone: dict[str, set[str]], known: Seen, now: Seen) -> bool:
    """Whether all is back that was lost, but for revoked keys. `known`: what the replica had."""
    ends = {one for one in gone["finish"] if known.states[one]}
    return (
        all(now.has_ended(one) for one in ends)
        and all(now.states[one] for one in gone["submit"])
        and all(now.has_ended(one) or one in now.flagged for one in gone["cancel"])
        and not gone["response deleted"] & now.responses
    )


async def computed_again(redis: Redis, job_ids: set[str], after: Seen, kill_ms: float) -> set[str]:
    """Return the jobs that had ended, and that a node has taken and computed again since the kill."""
    again = set[str]()
    for job_id in job_ids:
        if not after.states[job_id]:
            continue  # Unknown to the new primary: its client submits it again, and it runs again.
        found = await cast(Any, redis.hmget(keys.job(job_id), ["taken", "retaken", "finished"]))
        taken, retaken, finished = (float(value or 0) for value in found)
        if kill_ms < max(taken, retaken) < finished:
            again.add(job_id)
    return again


async def wrong_ends(redis: Redis, told: Told) -> list[str]:
    """Wait until all accepted jobs have ended, and return what is wrong with each."""
    broker, wrong, left = ProducerBroker(redis), list[str](), list(told.works)
    states = dict[str, str]()
    async with asyncio.timeout(PATIENCE_S):
        while left:
            seen = await Seen.read_soon(redis, left)
            states |= seen.states
            left = [one for one in left if not seen.has_ended(one) and seen.states[one]]
            await asyncio.sleep(0.5 if left else 0.0)

    async def check(job_id: str) -> None:
        work, state = told.works[job_id], states[job_id]
        may_be = {"succeeded"} | ({"cancelled"} if job_id in told.cancelling | told.deleted else set())
        if job_id in told.cancelled:
            may_be = {"cancelled"}
        if state not in may_be:
            wrong.append(f"{job_id} is {state or 'unknown'}, not {may_be}")
        elif state == "succeeded" and job_id not in told.deleted | told.unchecked:
            result = await broker.result(job_id, "default")
            expected = work.expected()
            if result is None or [one.token_ids for one in result.choices] != [one.token_ids for one in expected]:
                wrong.append(f"{job_id} has other tokens")

    job_ids = list(told.works)
    for number in range(0, len(job_ids), READ_AT_ONCE):
        await asyncio.gather(*map(check, job_ids[number : number + READ_AT_ONCE]))
    return wrong


async def nodes_lost(redis: Redis) -> list[str]:
    """Return the events of nodes that were declared dead."""
    found = await cast(Any, redis).zrange(keys.events(POOL, "node_"), 0, -1)
    return [event.decode() for event in found if b"node_lost" in event]
