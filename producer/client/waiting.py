"""Positions of waiting jobs in the queue, and progress of their prompts on the nodes.

The positions of all watched jobs of a process are read together. The number of reads has a limit, so with many watched
jobs each of them gets its position less often.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from itertools import islice

from penstock.contract.job import pool_of
from penstock.contract.output import NO_WAIT, PrefillProgress, QueuePosition, WaitUpdate
from penstock.contract.pool import NodePressure
from penstock.producer.client.pools import Admissions
from penstock.queue.broker.connection import Patience, ignoring_retried_errors
from penstock.queue.broker.jobs import MAX_POSITIONS, JobWait, QueuePositions
from penstock.queue.job_cost import expected_wait
from penstock.runtime.event_loop import cancel_until_done

_LOG = logging.getLogger(__package__)
INTERVAL_S = 0.25
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
        if known is None or position.position != known.position or now_s - self._noted_s >= REPEAT_S:
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
                await asyncio.sleep(INTERVAL_S)
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
    return QueuePosition(wait.ahead.num_jobs + 1, expected_wait(nodes, wait.ahead, is_background=wait.is_background))
