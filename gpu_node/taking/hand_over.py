"""The running jobs of a node that drains, which move to other nodes a few at a time while the rest go on here.

Each stream then pauses for its own recomputation, and not for that of all others, as it would if the node gave back
everything at the end of its drain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from math import inf

from penstock.contract.errors import DamagedDataError, UnavailableError
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.taking.load_shedder import LoadShedder
from penstock.queue.broker.node import NodeBroker

log = logging.getLogger(__package__)

MAX_MOVING = 2
"""Jobs that were handed over and have no new token yet. While one is computed again, the other one is taken."""
LOOK_S = 0.02
"""Interval at which the logs of these jobs are looked at."""
ENDS_SOON_S = 1.0
"""A job that will probably end within this time ends here: elsewhere its computation again would take as long."""
NO_ROOM_S = 0.5
"""Seconds after which nodes without room are asked again."""


class HandOver:
    """Hands over the jobs that will not end soon: those that callers wait for first, and of these the longest.

    So those that would not end within the drain leave first. A job moves only if another node has capacity for it now.
    One with an adapter stays, because not every node may have that. What is still here at the end of the drain is given
    back then.
    """

    def __init__(self, broker: NodeBroker, held_jobs: HeldJobs, load_shedder: LoadShedder) -> None:
        self._broker = broker
        self._held_jobs = held_jobs
        self._load_shedder = load_shedder
        # Keyed by id: job id.
        self._moving: dict[str, int] = {}
        """The chunks that each moving job had in its log when it was handed over."""
        # Keyed by id: job id.
        self._refused: set[str] = set()
        """The jobs that no other node had room for lately."""

    async def run(self, ends_s: float, is_over: asyncio.Event) -> None:
        """Hand jobs over until the drain is over, which is at `ends_s` of the monotonic clock at the latest."""
        while not is_over.is_set() and time.monotonic() < ends_s:
            try:
                await self._note_progress()
                is_crowded = not await self._move()
            except (UnavailableError, DamagedDataError) as error:
                log.warning("running jobs cannot be handed over", extra={"reason": error.reason})
                is_crowded = True
            if is_crowded:
                self._refused.clear()
            await asyncio.sleep(NO_ROOM_S if is_crowded else LOOK_S)

    async def _note_progress(self) -> None:
        """Forget the moving jobs that have a new token or have ended."""
        if self._moving:
            lengths = await self._broker.progress(list(self._moving))
            before = self._moving.items()
            still = {job_id: n for (job_id, n), length in zip(before, lengths, strict=True) if length == n}
            self._moving = still

    async def _move(self) -> bool:
        """Hand over the next jobs. Return whether there was room for one, or nothing to hand over."""
        if len(self._moving) >= MAX_MOVING:
            return True
        chosen = self._longest()[: MAX_MOVING - len(self._moving)]
        if not chosen:
            return not self._refused
        kept = await self._load_shedder.give_back(chosen, "handover")
        self._refused.update(job.job_id for job in kept)
        moved = [job.job_id for job in chosen if job not in kept]
        # Read after the move: what this node had sent by then counts as before.
        lengths = await self._broker.progress(moved) if moved else []
        self._moving |= {job_id: n for job_id, n in zip(moved, lengths, strict=True) if n is not None}
        return True

    def _longest(self) -> list[HeldJob]:
        """Return the jobs to hand over, in order."""
        held = [job for job in self._held_jobs if job.is_in_engine and job.outcome is None]
        token_s = _token_s(held, time.monotonic())
        needed_s = {
            job.job_id: token_s * self._held_jobs.tokens_left(job)
            for job in held
            if not (job.is_task or job.adapter or job.job_id in self._refused)
        }
        chosen = [job for job in held if needed_s.get(job.job_id, 0.0) > ENDS_SOON_S]
        return sorted(chosen, key=lambda job: (job.taken.is_background, -needed_s[job.job_id]))


def _token_s(jobs: Sequence[HeldJob], now_s: float) -> float:
    """Return the mean seconds between two tokens of a choice here; infinite while no job shows it."""
    shown = [(job.times.first_output_s, job.num_new_tokens / job.params.n) for job in jobs]
    times = [(now_s - began_s) / count for began_s, count in shown if began_s is not None and count > 1]
    return sum(times) / len(times) if times else inf
