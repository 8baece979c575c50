"""The positions of waiting jobs in their pool's queue, read for many jobs in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from penstock.queue.broker import scripts

MAX_POSITIONS = 128
"""Jobs whose positions one call reads."""
_TAKEN, _DELAYED = -1, -2


@dataclass(frozen=True, slots=True)
class JobWait:
    """The jobs ahead of a job that has no token yet.

    `num_ahead` are the queued jobs of more urgent classes and the older ones of its class; None if a node has the job,
    or if the job is delayed. `cost_ahead` is their predicted cost, in KV tokens.
    """

    num_ahead: int | None
    cost_ahead: float = 0.0
    is_taken: bool = False


class QueuePositions:
    """The reader of queue positions."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def of(self, pool: str, job_ids: Sequence[str]) -> list[JobWait | None]:
        """Return where up to MAX_POSITIONS jobs of a pool are; None for a job that has begun, has ended or is unknown.

        The cost of the jobs of its own class that are ahead of a job is estimated from the mean of that class.
        """
        answer = await scripts.call(self._redis, "positions", pool, scripts.packed(list(job_ids)))
        counts, costs, classes, ahead = answer
        return [_wait_of(counts, costs, priority, older) for priority, older in zip(classes, ahead, strict=True)]


def _wait_of(counts: Sequence[int], costs: Sequence[int], priority: int, older: int) -> JobWait | None:
    if older < 0:
        return JobWait(None, is_taken=older == _TAKEN) if older in (_TAKEN, _DELAYED) else None
    own_class = costs[priority] * older / max(1, counts[priority])
    return JobWait(sum(counts[:priority]) + older, sum(costs[:priority]) + own_class)
