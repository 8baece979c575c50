"""A node without an engine: takes jobs through the real broker and emits tokens that tests know in advance.

It steps by itself, or when the test calls it. A chunk is published, or only logged (its message is lost), or
published twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import Any, Self, cast

from redis.asyncio import Redis

from penstock.contract.output import Choice, Chunk, FinishReason, Outcome, TerminalState, Usage
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.priority import NUM_LEVELS
from penstock.gpu_node.settings import NodeSettings
from penstock.queue import keys, results, wire
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import Capacity, Emission, LeaseLostError, NodeBroker, Taken
from penstock.queue.wire import encode_chunk

POOL = "fake"
MODEL = "acme/fake"
DEFAULT_TOKENS = 16
PROMPT_TOKENS = 5
HEARTBEAT_S = 0.3
KV_TOKENS = 1 << 24
SEQUENCES = 1 << 16


class Say(Enum):
    """How a chunk reaches its readers."""

    PUBLISHED = "published"
    LOGGED = "logged"
    TWICE = "twice"


def fake_token(job_id: str, choice: int, position: int) -> int:
    """Return token `position` of a choice."""
    return int.from_bytes(hashlib.blake2b(f"{job_id}:{choice}:{position}".encode(), digest_size=2).digest())


def fake_tokens(job_id: str, num_tokens: int, choice: int = 0) -> list[int]:
    """Return the first tokens of a choice."""
    return [fake_token(job_id, choice, position) for position in range(num_tokens)]


def fake_text(tokens: Sequence[int]) -> str:
    """Return the text of tokens: at least three characters each."""
    return "".join(f"{token:02x} " for token in tokens)


@dataclass
class FakeJob:
    """A taken job and what it has emitted so far."""

    node: FakeNode
    taken: Taken
    request: wire.Request
    chunks: list[Chunk] = field(default_factory=list)
    said: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False

    @property
    def id(self) -> str:
        """The job's id."""
        return self.taken.job_id

    @property
    def num_tokens(self) -> int:
        """The number of tokens that each choice will have."""
        return self.request.params.max_tokens or DEFAULT_TOKENS

    def is_complete(self) -> bool:
        """Whether all tokens of every choice were emitted."""
        return all(self.said.get(c, 0) >= self.num_tokens for c in range(self.request.params.n))

    def next_chunks(self) -> list[Chunk]:
        """Return the chunks with the next token of every choice."""
        return [self._next_chunk(choice) for choice in range(self.request.params.n)]

    def _next_chunk(self, choice: int) -> Chunk:
        position = self.said.get(choice, 0)
        self.said[choice] = position + 1
        token = fake_token(self.id, choice, position)
        is_last = self.said[choice] == self.num_tokens
        finish: FinishReason | None = "length" if is_last else None
        usage = self.usage() if is_last and choice == self.request.params.n - 1 else None
        chunk = Chunk(self.id, len(self.chunks), choice, position, (token,), fake_text([token]), finish, usage)
        if not self.chunks:
            chunk = replace(chunk, num_prompt_tokens=PROMPT_TOKENS)
        self.chunks.append(chunk)
        return chunk

    def usage(self) -> Usage:
        """The usage so far."""
        return Usage(PROMPT_TOKENS, sum(self.said.values()))

    def emission(self, chunks: Sequence[Chunk]) -> Emission:
        """Return the chunks as the broker takes them."""
        first = chunks[0].index if chunks else len(self.chunks)
        return Emission(self.id, self.taken.lease, first, tuple(map(encode_chunk, chunks)))

    async def say(self, num_steps: int = 1, how: Say = Say.PUBLISHED) -> None:
        """Emit that many more tokens of each choice."""
        for _ in range(num_steps):
            await self.node.emit([self.emission(self.next_chunks())], how)

    async def finish(self, state: TerminalState = "succeeded", code: str = "", *, keep: int | None = None) -> None:
        """End the job. `keep`: the result counts only this many chunks."""
        chunks = self.chunks[:keep]
        choices = []
        for number in range(self.request.params.n):
            tokens = tuple(t for c in chunks if c.choice == number for t in c.token_ids)
            choices.append(Choice(number, fake_text(tokens), tokens, "length" if state == "succeeded" else None))
        cuts = [(c.choice, len(c.token_ids), len(c.text)) for c in chunks]
        result = results.encode_result(tuple(choices), self.usage(), cuts)
        message = f"the job {state}" if code else ""
        await self.node.broker.finish(self.emission(()), Outcome(state, code, message), result)
        self.node.jobs.pop(self.id, None)


def _show_end(steps: asyncio.Task[None]) -> None:
    """Show why a node steps no longer. A test that waits for its jobs fails much later."""
    if not steps.cancelled() and (error := steps.exception()) is not None:
        traceback.print_exception(error)


class FakeNode:
    """A node of pool `fake`. `auto`: it takes jobs and steps by itself, one step every `step_s`."""

    def __init__(
        self, url: str, *, auto: bool = True, step_s: float = 0.0, pool: str = POOL, model: str = MODEL, **config: int
    ) -> None:
        self.redis: Redis = connect(url)
        self.node_id = f"fake-{secrets.token_hex(8)}"
        self.broker = NodeBroker(self.redis, pool, self.node_id, "r1")
        self.record = PoolRecord(pool, model, aliases=("faker",) if model == MODEL else (), max_model_len=4096)
        self.step_s = step_s
        self.how = Say.PUBLISHED
        self.pressure = NodePressure(self.node_id, kv_tokens_available=KV_TOKENS)
        self.jobs: dict[str, FakeJob] = {}
        self.slots = SEQUENCES
        """How many jobs one take may return."""
        self._auto = auto
        self._config: dict[str, Any] = NodeSettings(model=MODEL, redis_url="redis://").pool_config | config
        self._num_takes = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.join()
        self._tasks = [asyncio.create_task(self._beat_forever())]
        if self._auto:
            self._tasks.append(asyncio.create_task(self._step_forever()))
            self._tasks[-1].add_done_callback(_show_end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        # Until Python 3.12 a cancellation may be lost inside redis-py.
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=0.1)
        await self.redis.aclose()

    async def join(self) -> None:
        """Join the pool."""
        await self.broker.join(self._config, self.record)
        await self.heartbeat()

    async def heartbeat(self) -> None:
        """Send a heartbeat."""
        await self.broker.heartbeat(self.pressure, free=KV_TOKENS, answered_call=0, held=None)

    async def take(self, num_jobs: int = 1) -> list[FakeJob]:
        """Wait until the node has taken that many more jobs. Return them."""
        fresh: list[FakeJob] = []
        while len(fresh) < num_jobs:
            fresh += await self._take_now()
            await asyncio.sleep(0.005)
        return fresh

    async def emit(self, emissions: Sequence[Emission], how: Say) -> list[str]:
        """Append to the log. Publish zero, one or two times, as `how` names it."""
        if how is Say.LOGGED:
            for emission in emissions:
                await cast(Any, self.redis.rpush(keys.log(emission.job_id), *emission.chunks))
            return ["OK"] * len(emissions)
        answers = await self.broker.emit(emissions)
        return await self.broker.emit(emissions) if how is Say.TWICE else answers

    async def _take_now(self) -> list[FakeJob]:
        self._num_takes += 1
        room = Capacity((KV_TOKENS,) * NUM_LEVELS, (self.slots,) * NUM_LEVELS, KV_TOKENS, SEQUENCES)
        taken = (await self.broker.take(self._num_takes, secrets.token_hex(16), room)).jobs
        packed = await self.broker.requests([t.job_id for t in taken])
        fresh = [FakeJob(self, t, wire.decode_request(data)) for t, data in zip(taken, packed, strict=True) if data]
        self.jobs.update((job.id, job) for job in fresh)
        return fresh

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with suppress(Exception):  # a test may have stopped Redis
                try:
                    await self.heartbeat()
                except LeaseLostError:
                    if self._auto:
                        await self.join()

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(self.step_s or 0.001)
            try:
                await self._take_now()
                await self._step()
            except LeaseLostError:
                # Redis lost its data. The next heartbeat joins again.
                self.jobs.clear()

    async def _step(self) -> None:
        running = list(self.jobs.values())
        stepped = [job.emission(job.next_chunks()) for job in running]
        if not stepped:
            return
        for job, answer in zip(running, await self.emit(stepped, self.how), strict=True):
            if answer in ("CANCEL", "UNREAD"):
                await job.finish("cancelled", "cancelled" if answer == "CANCEL" else "unread")
            elif answer in ("FENCED", "GONE"):
                del self.jobs[job.id]
            elif job.is_complete():
                await job.finish()
