"""What a reader has not read yet: queues of chunks from the client's inbox, and updates about a waiting job.

Updates are positions in the queue, and progress of the prompt on the node. The positions of a process's watched jobs
are read together. The number of reads has a limit, so with many watched jobs each of them gets its position less often.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from penstock.contract.job import pool_of
from penstock.contract.output import NO_WAIT, TERMINAL_STATES, Chunk, PrefillProgress, QueuePosition, WaitUpdate
from penstock.contract.pool import NodePressure
from penstock.producer.client.pools import Admissions
from penstock.queue.broker.connection import Patience, ignoring_retried_errors
from penstock.queue.broker.jobs import MAX_POSITIONS, JobWait, QueuePositions
from penstock.queue.broker.producer import Attached
from penstock.queue.job_cost import expected_wait
from penstock.runtime.event_loop import cancel_until_done

_LOG = logging.getLogger(__package__)
# Updates about a waiting job.

POSITIONS_INTERVAL_S = 0.25
"""Seconds between two reads of positions. A read covers up to MAX_POSITIONS jobs."""
REPEAT_S = 5.0
"""Seconds after which a position that stays the same is delivered again, if its estimated wait has changed."""


class WaitWatcher:
    """The updates about a waiting job that its reader has not read yet: the newest position and the newest progress."""

    def __init__(self) -> None:
        self._fresh: dict[type[WaitUpdate], WaitUpdate] = {}
        self._position: QueuePosition | None = None
        self._noted_s = 0.0
        self._is_in_prefill = self._has_ended = False
        self._changed = asyncio.Event()

    def note_position(self, position: QueuePosition, now_s: float) -> None:
        """Note the job's position at this loop time."""
        is_old_news = self._is_in_prefill and position.position == 0
        known = self._position
        if is_old_news or position == known:
            return
        is_news = known is None or (position.position, position.paused) != (known.position, known.paused)
        if is_news or now_s - self._noted_s >= REPEAT_S:
            # A job in the queue has no progress: a node may have given it back.
            self._is_in_prefill = False
            self._position, self._noted_s = position, now_s
            self._note(position)

    def note_prefill(self, progress: PrefillProgress) -> None:
        """Note how far the job's prompt is computed."""
        self._is_in_prefill = True
        self._fresh.pop(QueuePosition, None)
        self._note(progress)

    def end(self) -> None:
        """Note that the job waits no longer."""
        self._has_ended = True
        self._changed.set()

    async def updates(self) -> AsyncGenerator[WaitUpdate, None]:
        """Yield the newest updates until the job waits no longer. A slow reader misses the ones between."""
        while True:
            while self._fresh:
                yield self._fresh.pop(next(iter(self._fresh)))
            if self._has_ended:
                return
            self._changed.clear()
            await self._changed.wait()

    def _note(self, update: WaitUpdate) -> None:
        self._fresh[type(update)] = update
        self._changed.set()


class QueueWatch:
    """Reads the positions of watched jobs and passes them to the watchers. Without watchers it reads nothing."""

    def __init__(self, patience: Patience, positions: QueuePositions, admissions: Admissions) -> None:
        self._patience = patience
        self._positions = positions
        self._admissions = admissions
        self._watched: dict[WaitWatcher, str] = {}
        """Watcher → the id of its job. The watcher whose position was read last is the last one."""
        self._task: asyncio.Task[None] | None = None

    def add(self, job_id: str, watcher: WaitWatcher) -> None:
        """Start watching a job's position, from the next read on. Raises UnavailableError if the client is closed."""
        self._patience.require_open()
        self._watched[watcher] = job_id
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="penstock queue watch")

    def remove(self, watcher: WaitWatcher) -> None:
        """Stop updating a watcher."""
        self._watched.pop(watcher, None)

    async def close(self) -> None:
        """End the reads and all watchers."""
        if self._task is not None:
            await cancel_until_done((self._task,))
        self._end_watchers()

    async def position_of(self, job_id: str) -> QueuePosition | None:
        """Return a job's position now; None for a job that is delayed, has begun or has ended."""
        ((_, position),) = await self._read(pool_of(job_id), [job_id])
        return position

    async def _run(self) -> None:
        try:
            while self._watched:
                await asyncio.sleep(POSITIONS_INTERVAL_S)
                with ignoring_retried_errors(_LOG):
                    await self._read_next()
        finally:
            self._end_watchers()

    def _end_watchers(self) -> None:
        for watcher in self._watched:
            watcher.end()
        self._watched.clear()

    async def _read_next(self) -> None:
        by_pool: defaultdict[str, list[tuple[WaitWatcher, str]]] = defaultdict(list)
        for watcher in list(islice(self._watched, MAX_POSITIONS)):
            job_id = self._watched[watcher] = self._watched.pop(watcher)
            by_pool[pool_of(job_id)].append((watcher, job_id))
        for pool, watched in by_pool.items():
            found = await self._read(pool, [job_id for _, job_id in watched])
            now_s = asyncio.get_running_loop().time()
            for (watcher, _), (wait, position) in zip(watched, found, strict=True):
                if wait is None:
                    watcher.end()
                    self.remove(watcher)
                elif position is not None:
                    watcher.note_position(position, now_s)

    async def _read(self, pool: str, job_ids: Sequence[str]) -> list[tuple[JobWait | None, QueuePosition | None]]:
        waits = await self._positions.of(pool, job_ids)
        nodes = (await self._admissions.of(pool).recent()).nodes
        return [(wait, _position_of(wait, nodes)) for wait in waits]


def _position_of(wait: JobWait | None, nodes: Sequence[NodePressure]) -> QueuePosition | None:
    if wait is None or (wait.ahead is None and not wait.is_taken):
        return None
    if wait.ahead is None:
        return QueuePosition(0, NO_WAIT)
    if wait.paused is not None:
        return QueuePosition(wait.ahead.num_jobs + 1, paused=wait.paused)
    return QueuePosition(wait.ahead.num_jobs + 1, expected_wait(nodes, wait.ahead, is_background=wait.is_background))


# Queues of chunks.

POLL_S = 0.2
"""How often a reader polls if the job already pushes to the maximum number of processes."""


MAX_QUEUED_LOGPROBS = 1 << 13
"""Log-probabilities queued for one reader. Each takes about 130 bytes, and one prompt chunk has thousands.

The garbage collector visits all of them in one pass, which holds the event loop.
"""

MAX_QUEUED_BYTES = 64 << 20
"""Bytes that the chunks of all readers of one client may take, as estimated. After that, each reader keeps a few."""
MIN_QUEUED_CHUNKS = 16
"""Chunks that one reader keeps then; of those with log-probabilities, only the newest."""
_CHUNK_BYTES = 700
_LOGPROB_BYTES = 130


class QueuedBytes:
    """The bytes that all unread chunks of one client take, as estimated."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


Deliver = Callable[[Chunk], bool]
"""Delivers a chunk at once, while its reader waits; returns False if the reader must get the chunk itself."""


class Mailbox:
    """The chunks that have arrived for one reader and are unread: bounded, with the newest kept.

    All mailboxes of a client share a bound of bytes, too.

    A chunk dropped from a full mailbox appears as a gap to the reader, which then reads it from the log.
    """

    __slots__ = (
        *("_chunks", "_deliver", "_loop", "_max_chunks", "_num_logprobs", "_num_taken_bytes", "_queued", "_waiter"),
        *("nudged", "seen_waiting_s"),
    )

    def __init__(self, max_chunks: int, queued: QueuedBytes) -> None:
        self._max_chunks = max_chunks
        self._queued = queued
        self._chunks = deque[Chunk]()
        self._num_logprobs = self._num_taken_bytes = 0
        self._loop = asyncio.get_running_loop()
        # A bare future: asyncio.Event costs three times as much, and one box has one reader.
        self._waiter: asyncio.Future[None] | None = None
        self._deliver: Deliver | None = None
        self.nudged = False
        """Whether the reader must compare its state with the broker's."""
        self.seen_waiting_s: float | None = None
        """Loop time when the inbox first saw the reader's current wait."""

    @property
    def is_waited_for(self) -> bool:
        """Whether the reader is waiting."""
        return self._waiter is not None

    def put(self, chunk: Chunk) -> None:
        """Queue a chunk for the reader, or deliver it at once."""
        waiter = self._waiter
        if self._deliver is not None and waiter is not None and not waiter.done():
            self.seen_waiting_s = None
            try:
                if self._deliver(chunk):
                    return
            except Exception as error:
                # The error of one reader must not end the inbox.
                waiter.set_exception(error)
                return
        self._chunks.append(chunk)
        self._queued.total += _CHUNK_BYTES
        if chunk.logprobs or chunk.prompt_logprobs:
            self._num_logprobs += (added := _num_logprobs(chunk))
            self._queued.total += _LOGPROB_BYTES * added
        if len(self._chunks) > self._max_chunks:
            self._drop_oldest()
        if self._num_logprobs > MAX_QUEUED_LOGPROBS or self._queued.total > MAX_QUEUED_BYTES:
            self._shrink()
        if self._waiter is not None:
            self._wake()

    def __del__(self) -> None:
        self.take_all()
        self._release_taken()

    def _release_taken(self) -> None:
        self._queued.total -= self._num_taken_bytes
        self._num_taken_bytes = 0

    def _shrink(self) -> None:
        """Drop the oldest chunks until the rest is within the bounds. The newest one always stays."""
        while len(self._chunks) > 1 and (
            self._num_logprobs > MAX_QUEUED_LOGPROBS
            or (self._queued.total > MAX_QUEUED_BYTES and (self._num_logprobs or len(self._chunks) > MIN_QUEUED_CHUNKS))
        ):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        num_logprobs = _num_logprobs(self._chunks.popleft())
        self._num_logprobs -= num_logprobs
        self._queued.total -= _CHUNK_BYTES + _LOGPROB_BYTES * num_logprobs

    def nudge(self) -> None:
        """Make the reader compare its state with the broker's."""
        self.nudged = True
        self._wake()

    def take_nudge(self) -> bool:
        """Return whether the reader was nudged since the last call."""
        nudged, self.nudged = self.nudged, False
        return nudged

    def take_all(self) -> list[Chunk]:
        """Remove and return all queued chunks, the oldest first. They count as queued until the next call or wait."""
        taken = list(self._chunks)
        self._chunks.clear()
        self._release_taken()
        self._num_taken_bytes = _CHUNK_BYTES * len(taken) + _LOGPROB_BYTES * self._num_logprobs
        self._num_logprobs = 0
        return taken

    async def wait(self, timeout_s: float | None = None, deliver: Deliver | None = None) -> None:
        """Wait for a nudge, or for a chunk that `deliver` does not take.

        When `timeout_s` has passed, the mailbox nudges its reader. An exception of `deliver` is raised here.
        """
        if self._chunks or self.nudged:
            return
        self._release_taken()
        waiter = self._waiter = self._loop.create_future()
        self._deliver = deliver
        try:
            if timeout_s is None:
                await waiter
            else:
                await self._wait_for(waiter, timeout_s)
        finally:
            self._waiter = self._deliver = self.seen_waiting_s = None

    async def _wait_for(self, waiter: asyncio.Future[None], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            self.nudged = True

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class MessageOrigin(NamedTuple):
    """What a message came from. Chunks with another mark may be missing from the log that is there now."""

    run_id: str
    """That of the server; empty if it does not tell."""
    subscription: int
    """Which of the inbox's subscriptions brought it."""
    history: int
    """How many new histories of the server the process had noticed before."""


class HeldMailbox(Mailbox):
    """A mailbox of a reader that waits until chunks are confirmed. Its chunks all have one mark, the newest one."""

    __slots__ = ("_mark_of", "mark")

    def __init__(self, max_chunks: int, queued: QueuedBytes, mark_of: Callable[[], MessageOrigin]) -> None:
        """`mark_of` returns the mark of the message that is being delivered."""
        super().__init__(max_chunks, queued)
        self._mark_of = mark_of
        self.mark = mark_of()

    def put(self, chunk: Chunk) -> None:
        """Queue a chunk. It replaces the chunks with another mark, and its reader then reads the log."""
        if (mark := self._mark_of()) != self.mark:
            self.take_all()
            self.mark = mark
            self.nudge()
        super().put(chunk)


def _num_logprobs(chunk: Chunk) -> int:
    # All tokens have the same number, except a prompt's first token, which has none.
    return sum(len(of) * len(of[-1].token_ids) for of in (chunk.logprobs, chunk.prompt_logprobs) if of)


@dataclass(slots=True)
class SeenEnd:
    """Whether a job is known to have ended. It may outlive the feed, and keeps nothing else alive."""

    is_seen: bool = False


class Feed:
    """The mailboxes of one job in this process. The inbox holds a feed weakly; its readers keep it alive."""

    __slots__ = ("__weakref__", "boxes", "end", "job_id", "poll_s", "watchers")

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.boxes: tuple[Mailbox, ...] = ()
        self.watchers: tuple[WaitWatcher, ...] = ()
        """Watchers of the job's wait, until its first chunk."""
        self.end = SeenEnd()
        self.poll_s: float | None = None
        """How often readers poll, in seconds; None if the job pushes to this process."""

    @property
    def ended(self) -> bool:
        """Whether the job is known to have ended."""
        return self.end.is_seen

    @ended.setter
    def ended(self, is_seen: bool) -> None:
        self.end.is_seen = is_seen

    def note(self, attached: Attached) -> None:
        """Record the broker's answer, and wake the readers to which no further chunk will be pushed."""
        has_ended = attached.state in TERMINAL_STATES and not self.ended
        if has_ended or (not attached.pushed and self.poll_s is None):
            for box in self.boxes:
                box.nudge()
        self.ended = self.ended or has_ended
        self.poll_s = None if attached.pushed else POLL_S

    def put(self, chunk: Chunk) -> None:
        """Queue a chunk for every reader of the job."""
        if chunk.outcome is not None:
            self.ended = True
        for watcher in self.watchers:
            watcher.end()
        for box in self.boxes:
            box.put(chunk)

    def note_prefill(self, progress: PrefillProgress) -> None:
        """Tell the watchers how far the job's prompt is computed."""
        for watcher in self.watchers:
            watcher.note_prefill(progress)
