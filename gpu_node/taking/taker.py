"""From Redis to this node: take the jobs that fit."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from penstock.contract.errors import DamagedDataError, UnavailableError
from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES, PerLevel
from penstock.gpu_node.engine.worker import EngineLike
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.publishing.outbox import Outbox
from penstock.gpu_node.taking.preparation import JobPreparation
from penstock.queue.broker.connection import pauses
from penstock.queue.broker.node import Capacity, NodeBroker, TakeAnswer
from penstock.queue.broker.shared_connection import SharedConnection

log = logging.getLogger(__package__)


_PING_S = 15.0
"""Interval at which a silent subscription is checked with PING."""


class Bell:
    """An event: there may be jobs to take, because the doorbell rang or a job ended while others wait.

    `depth`: jobs that waited when the queue was last read.
    """

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        self.depth = 0
        self.is_heard = True
        """Whether the doorbell channel is subscribed. Otherwise new jobs are found later, by polling."""

    def ring(self) -> None:
        """Wake the taker: there may be a new job."""
        self._rung.set()

    def capacity_freed(self) -> None:
        """Wake the taker if jobs wait: a job has freed capacity."""
        if self.depth:
            self._rung.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until it rings, at most `timeout_s` seconds, since pub/sub may lose a message."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        self._rung.clear()


LONGEST_DEAF_S = 0.5
"""The longest pause between two attempts to subscribe: a node without its doorbell is shown as unhealthy."""


async def listen(redis: Redis, channel: str, bell: Bell, on_message: Callable[[str], None]) -> None:
    """Listen to the doorbell channel until canceled. An empty message means a new job; `on_message` gets all others."""

    def receive(_: bytes, message: bytes) -> None:
        if message:
            on_message(message.decode(errors="replace"))
        else:
            bell.ring()

    patience = pauses()
    while True:
        try:
            line = await SharedConnection.open(redis, receive)
            try:
                await line.call("SUBSCRIBE", channel)
                patience = pauses()
                bell.is_heard = True
                # A message may have been published before the subscription began.
                bell.ring()
                while not line.lost.done():
                    await asyncio.wait((line.lost,), timeout=_PING_S)
                    await line.call("PING")
            finally:
                bell.is_heard = False
                line.close()
        except (RedisError, OSError) as error:
            log.warning("the doorbell is cut off", extra={"reason": str(error)})
        await asyncio.sleep(min(next(patience), LONGEST_DEAF_S))


MAX_BACKGROUND_TAKEN = 32
"""Limit of take.lua with background work. A call that returned as many may have left more in the queue."""
MAX_TASKS = 32
"""Tasks, such as tokenization, that a node holds at once. A request has up to 16 MiB, so this bounds their memory."""
ASK_AGAIN_S = 0.05
"""Seconds after which a node that may not take asks again whether it may."""
MAX_LEFT_MS = 50
"""LEFT_MS of take.lua. A take that leaves jobs asks again within this time."""
BETWEEN_TAKES_S = 0.005
"""Least seconds between two takes while the node has jobs. A new job can only join its batch between two steps, and
most steps take longer than this, so jobs that arrive shortly after one another share a call."""
IDLE_TAKE_S = 1.0
"""Interval at which the queue is polled anyway, since pub/sub may lose a doorbell message."""


BYTES_PER_TOKEN = 4
"""Bytes of a request that count as one token where jobs are compared whose prompts are not tokenized yet."""


class JobTaker:
    """The loop that takes jobs from the queue, as many as the node's engine has capacity for."""

    def __init__(
        self,
        broker: NodeBroker,
        held_jobs: HeldJobs,
        bell: Bell,
        outbox: Outbox,
        preparation: JobPreparation,
        engine: EngineLike,
        *,
        capacity: tuple[int, int],
        may_take: Callable[[], bool],
    ) -> None:
        """`capacity`: KV tokens and sequences of the whole node.

        `may_take`: false while Redis may lack ends of jobs, which it then shows as queued.
        """
        self._broker = broker
        self._held_jobs = held_jobs
        self._kv_tokens, self._max_num_seqs = capacity
        self._outbox = outbox
        self._preparation = preparation
        self._engine = engine
        self._bell = bell
        self._may_take = may_take
        self._queued_kinds = False, False
        self._queued_since_s = time.monotonic()
        self._left_until_s = 0.0
        """Until when the jobs that the last take left are those of other nodes."""
        self._call = 0
        self._nonce = ""
        self.answered_call = 0
        """Number of the last take call that was answered. Jobs of later calls are not known here yet."""

    @property
    def kv_tokens_available(self) -> int:
        """KV tokens that no taken job uses or is expected to use."""
        return self._capacity().kv_tokens[-1]

    @property
    def sequences_available(self) -> int:
        """Sequences that no taken job uses."""
        return self._capacity().slots[-1]

    @property
    def hears_doorbell(self) -> bool:
        """Whether the doorbell channel is subscribed."""
        return self._bell.is_heard

    @property
    def queued_kinds(self) -> tuple[bool, bool]:
        """Whether foreground and background jobs were waiting when the queue was last read."""
        return self._queued_kinds

    @property
    def queued_since_s(self) -> float:
        """Since when the queue had the present kinds whenever it was read, by the monotonic clock."""
        return self._queued_since_s

    @property
    def num_tokenizer_failures(self) -> int:
        """Prompts that the tokenizer failed at, not counting those that it refused as invalid."""
        return self._preparation.num_tokenizer_failures

    async def run(self) -> None:
        """Take jobs until canceled. Raises LeaseLostError if the pool declared this node dead."""
        patience = pauses()
        wait_s = 0.0
        try:
            while True:
                await self._bell.wait(wait_s)
                if not self._may_take():
                    wait_s = ASK_AGAIN_S
                    continue
                try:
                    wait_s = await self._take()
                    patience = pauses()
                    self._held_jobs.round_done("take")
                    if len(self._held_jobs):
                        await asyncio.sleep(min(wait_s, BETWEEN_TAKES_S))
                except UnavailableError as error:
                    self._held_jobs.redis_failed("take", error)
                    wait_s = next(patience)
                except DamagedDataError as error:
                    self._held_jobs.round_failed("take", error)
                    wait_s = next(patience)
        finally:
            await self._preparation.close()

    async def _take(self) -> float:
        """Take jobs once, and return how many seconds to wait before the next call.

        A call without an answer is repeated with the same number and nonce, so that Redis gives the same jobs again.
        """
        if self._call == self.answered_call:
            self._call += 1
            self._nonce = secrets.token_hex(16)
        answer = await self._broker.take(self._call, self._nonce, self._capacity(), hold_ms=self._held_jobs.hold_ms)
        jobs = self._hold(answer)
        self._bell.depth = sum(answer.depth)
        kinds = any(answer.depth[:NUM_PRIORITIES]), any(answer.depth[NUM_PRIORITIES:])
        if kinds != self._queued_kinds:
            self._queued_kinds, self._queued_since_s = kinds, time.monotonic()
            self._held_jobs.note_queue(kinds, self._queued_since_s)
        self._engine.note_queued_background(self._queued_kinds[1])
        self._held_jobs.counts.queue_share = sum(answer.depth) / max(1, answer.num_nodes)
        for job in sorted(jobs, key=_to_compute_again):
            self._preparation.begin(job)
        if any(answer.depth) and 0 < answer.again_in_ms <= MAX_LEFT_MS:
            self._left_until_s = time.monotonic() + answer.again_in_ms / 1000
        if len(jobs) >= MAX_BACKGROUND_TAKEN:
            return 0.0
        return min(IDLE_TAKE_S, answer.again_in_ms / 1000) if answer.again_in_ms else IDLE_TAKE_S

    def _capacity(self) -> Capacity:
        """The free capacity for each level. A level may also use what less urgent jobs hold, by preempting them."""
        tokens, sequences = self._held_jobs.expected_usage()
        slots = _left_of(self._max_num_seqs, sequences)
        if (of_windows := self._engine.window_tokens) is not None and of_windows[0] < self._max_num_seqs * of_windows[
            1
        ]:
            # Where the windows of all sequences do not fit, they bound the number of sequences.
            whole, each = of_windows
            left = _left_of(whole, self._held_jobs.expected_window_tokens(each))
            slots = tuple(min(pair) for pair in zip(slots, (one // each for one in left), strict=True))
        return Capacity(
            _left_of(self._kv_tokens, tokens),
            slots,
            self._kv_tokens,
            self._max_num_seqs,
            max(0, MAX_TASKS - self._held_jobs.num_tasks),
            self._held_jobs.usage_by_tenant(),
            self._engine.background_due,
            time.monotonic() < self._left_until_s,
        )

    async def close(self) -> None:
        """Learn which jobs an interrupted take call has assigned to this node, so that they can be given back."""
        if self._call != self.answered_call:
            nothing = Capacity((0,) * NUM_LEVELS, (0,) * NUM_LEVELS, self._kv_tokens, self._max_num_seqs)
            self._hold(await self._broker.take(self._call, self._nonce, nothing))

    def _hold(self, answer: TakeAnswer) -> list[HeldJob]:
        now_s = time.monotonic()
        jobs = [HeldJob(taken, now_s) for taken in answer.jobs]
        for job in jobs:
            if job.taken.deadline_in_ms:
                job.expires_s = now_s + job.taken.deadline_in_ms / 1000
            if (older := self._held_jobs.get(job.job_id)) is not None:
                self._outbox.drop(older)
            self._held_jobs.add(job)
            if not job.is_task:
                is_background = job.taken.is_background
                self._held_jobs.counts.jobs.taken(job.taken.priority, job.times, is_background=is_background)
        counts = self._held_jobs.counts
        counts.taken += len(jobs)
        counts.taken_over += sum(bool(job.taken.num_chunks or job.taken.losses) for job in jobs)
        self.answered_call = self._call
        return jobs


def _to_compute_again(job: HeldJob) -> tuple[int, bool, int]:
    """Sort jobs that go on before new ones of their urgency, the shortest first: most of them then wait for little."""
    taken = job.taken
    size = len(taken.request) // BYTES_PER_TOKEN + taken.num_chunks if taken.num_chunks else 0
    return taken.urgency, not taken.num_chunks, size


def _left_of(whole: int, used: PerLevel) -> PerLevel:
    return tuple(max(0, whole - one) for one in used)
