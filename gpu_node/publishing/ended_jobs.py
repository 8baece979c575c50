"""The ends of jobs that Redis has stored lately, which are repeated if Redis loses them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.gpu_node.jobs.times import NodeCounts
from penstock.queue.broker.node import MAX_EMIT_BYTES, MAX_FINISH_JOBS, JobEnd, NodeBroker

log = logging.getLogger(__package__)


class _Kept(NamedTuple):
    at_s: float
    end: JobEnd


class EndedJobs:
    """Ends of the last `keep_s` seconds that Redis has acknowledged, repeated if a fail-over or a restore lost them.

    They have the jobs' whole logs, at most `max_bytes` of them.
    """

    def __init__(self, broker: NodeBroker, counts: NodeCounts, *, keep_s: float, max_bytes: int) -> None:
        self._broker = broker
        self._counts = counts
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._kept: deque[_Kept] = deque()
        self.num_bytes = 0
        """Bytes of the logs and results that are kept."""

    def keep(self, end: JobEnd) -> None:
        """Keep an end that Redis has acknowledged; `end` has the job's whole log.

        A log that is too long for one call is not kept. If Redis loses the end, that job runs again from its log.
        """
        now_s = time.monotonic()
        if end.num_bytes - len(end.result) <= MAX_EMIT_BYTES:
            self._kept.append(_Kept(now_s, end))
            self.num_bytes += end.num_bytes
        self._drop_old(now_s)

    async def repeat(self) -> None:
        """Repeat the ends that Redis has lost. Raises UnavailableError; a repeated call is harmless.

        Those are the ends of jobs that still run here, as Redis says, and of jobs that no node has taken, as it says.
        A job that it does not know at all is left to the client that submitted it.
        """
        self._drop_old(time.monotonic())
        ends, num_lost, num_repeated = [kept.end for kept in self._kept], 0, 0
        for start in range(0, len(ends), MAX_FINISH_JOBS):
            part = ends[start : start + MAX_FINISH_JOBS]
            is_lost = await self._broker.lacks_ends(part)
            lost = [end for end, lacks in zip(part, is_lost, strict=True) if lacks]
            num_lost += len(lost)
            for call in _calls_of(lost):
                answers = await self._broker.finish_many(call)
                num_repeated += answers.count("OK")
        self._counts.repeated_ends += num_repeated
        if num_lost:
            facts = {"num_kept": len(ends), "num_lost": num_lost, "num_repeated": num_repeated}
            log.warning("redis had lost ends of jobs; they are repeated", extra=facts)

    def _drop_old(self, now_s: float) -> None:
        while self._kept and (self.num_bytes > self._max_bytes or now_s - self._kept[0].at_s > self._keep_s):
            self.num_bytes -= self._kept.popleft().end.num_bytes


def _calls_of(ends: Sequence[JobEnd]) -> list[list[JobEnd]]:
    """Split ends into calls, by bytes."""
    calls: list[list[JobEnd]] = []
    num_bytes = 0
    for end in ends:
        if not calls or num_bytes + end.num_bytes > MAX_EMIT_BYTES:
            calls.append([])
            num_bytes = 0
        calls[-1].append(end)
        num_bytes += end.num_bytes
    return calls
