"""The running jobs of a node that drains and would not end here, which move to other nodes one by one.

The rest go on here. Each stream then pauses for its own recomputation, and not for that of all others, as it would if
the node gave back everything at the end of its drain.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract.errors import DamagedDataError, UnavailableError
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.taking.load_shedder import LoadShedder
from penstock.queue.broker.node import NodeBroker

log = logging.getLogger(__package__)

MAX_MOVING = 8
"""Limit of the jobs that were handed over and have no new token yet. It is one, unless the drain is too short."""
LOOK_S = 0.02
"""Interval at which the logs of these jobs are looked at."""
ENDS_SOON_S = 1.0
"""A job that will probably end within this time ends here: elsewhere its computation again would take as long."""
FIRST_MOVE_S = 0.5
"""Seconds that a move is expected to take before one is over."""
RECENT_S = 0.5
"""Time over which the pace of a token is measured: with each job that leaves, the others become faster."""
NEWEST_MOVE = 0.25
"""Weight of the last move in the mean of their times."""
NO_ROOM_S = 0.5
"""Seconds after which nodes without room are asked again."""


class _Move(NamedTuple):
    """A job without a new token since it was handed over: the chunks that its log had then, and when that was."""

    num_chunks: int
    began_s: float


class HandOver:
    """Hands over the jobs that will not end within the drain: those that callers wait for first, the longest first.

    The next job leaves when the last one has a new token elsewhere, because the computation of one would delay the
    other. More leave at a time if one by one would take longer than the drain. A job that would end here stays, as long
    as there is time to hand over all jobs that are here.

    A job moves only if another node has capacity for it now. One with an adapter stays, because not every node may have
    that. What is still here at the end of the drain is given back then.
    """

    def __init__(self, broker: NodeBroker, held_jobs: HeldJobs, load_shedder: LoadShedder) -> None:
        self._broker = broker
        self._held_jobs = held_jobs
        self._load_shedder = load_shedder
        # Keyed by id: job id.
        self._moving: dict[str, _Move] = {}
        # Keyed by id: job id.
        self._refused: set[str] = set()
        """The jobs that no other node had room for lately."""
        self._mean_move_s = FIRST_MOVE_S
        self._token_counts: deque[tuple[float, dict[str, int]]] = deque()
        """Moments of the last RECENT_S, and the tokens that each job here had then."""

    async def run(self, ends_s: float, is_over: asyncio.Event) -> None:
        """Hand jobs over until the drain is over, which is at `ends_s` of the monotonic clock at the latest."""
        while not is_over.is_set() and time.monotonic() < ends_s:
            try:
                await self._note_progress()
                is_crowded = not await self._move(ends_s)
            except (UnavailableError, DamagedDataError) as error:
                log.warning("running jobs cannot be handed over", extra={"reason": error.reason})
                is_crowded = True
            if is_crowded:
                self._refused.clear()
            await asyncio.sleep(NO_ROOM_S if is_crowded else LOOK_S)

    async def _note_progress(self) -> None:
        """Forget the moving jobs that have a new token or have ended."""
        if not self._moving:
            return
        lengths = await self._broker.progress(list(self._moving))
        now_s = time.monotonic()
        for (job_id, move), length in zip(list(self._moving.items()), lengths, strict=True):
            if length != move.num_chunks:
                del self._moving[job_id]
                self._mean_move_s += NEWEST_MOVE * (now_s - move.began_s - self._mean_move_s)

    async def _move(self, ends_s: float) -> bool:
        """Hand over the next jobs. Return whether there was room for one, or nothing to hand over."""
        now_s = time.monotonic()
        chosen = self._next(now_s, ends_s - now_s)
        if not chosen:
            return bool(self._moving) or not self._refused
        kept = await self._load_shedder.give_back(chosen, "handover")
        self._refused.update(job.job_id for job in kept)
        moved = [job.job_id for job in chosen if job not in kept]
        # Read after the move: what this node had sent by then counts as before.
        lengths = await self._broker.progress(moved) if moved else []
        self._moving |= {job_id: _Move(n, now_s) for job_id, n in zip(moved, lengths, strict=True) if n is not None}
        return True

    def _next(self, now_s: float, left_s: float) -> list[HeldJob]:
        """Return the jobs to hand over now, in order. `left_s`: seconds until the end of the drain."""
        held = [job for job in self._held_jobs if job.is_in_engine and job.outcome is None]
        token_s = self._recent_token_s(held, now_s) or _token_s(held, now_s)
        needed_s = {
            job.job_id: token_s * self._held_jobs.tokens_left(job)
            for job in held
            if not (job.is_task or job.adapter or job.job_id in self._refused)
        }
        # A move that is not over after this time shows that moves take longer.
        move_s = max([self._mean_move_s, *(now_s - move.began_s for move in self._moving.values())])
        longest_s = max(ENDS_SOON_S, left_s - move_s * len(held))
        leaving = [job for job in held if needed_s.get(job.job_id, 0.0) > longest_s]
        num_at_once = min(MAX_MOVING, max(1, math.ceil(move_s * len(leaving) / max(left_s, LOOK_S))))
        leaving.sort(key=lambda job: (job.taken.is_background, -needed_s[job.job_id]))
        return leaving[: max(0, num_at_once - len(self._moving))]

    def _recent_token_s(self, jobs: Sequence[HeldJob], now_s: float) -> float | None:
        """Return the mean seconds between two tokens of a choice lately; None before it is known."""
        counts = {job.job_id: job.num_new_tokens for job in jobs}
        self._token_counts.append((now_s, counts))
        while len(self._token_counts) > 1 and self._token_counts[1][0] <= now_s - RECENT_S:
            self._token_counts.popleft()
        began_s, before = self._token_counts[0]
        stayed = [job for job in jobs if job.job_id in before]
        num_tokens = sum((counts[job.job_id] - before[job.job_id]) / job.params.n for job in stayed)
        return (now_s - began_s) * len(stayed) / num_tokens if num_tokens and now_s - began_s >= RECENT_S else None


def _token_s(jobs: Sequence[HeldJob], now_s: float) -> float:
    """Return the mean seconds between two tokens of a choice here; infinite while no job shows it."""
    shown = [(job.times.first_output_s, job.num_new_tokens / job.params.n) for job in jobs]
    times = [(now_s - began_s) / count for began_s, count in shown if began_s is not None and count > 1]
    return sum(times) / len(times) if times else math.inf
