"""Dead letters: jobs that failed because several nodes died running them. They keep their requests for 7 days."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.contract.errors import NotFoundError
from penstock.contract.job import pool_of
from penstock.contract.priority import Priority, class_of_level, is_background
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.pools import LoggedOnce
from penstock.queue.wire import Request

_FIELDS = ("tenant", "level", "weight", "cost", "submitted", "finished", "chunks", "preemptions", "loss_nodes")

_PURGED_AT_ONCE = 100

_LOG = logging.getLogger(__package__)


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that was lost while it ran the job, and when a sweep detected that, in Redis ms."""

    node_id: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The record of a dead letter, without its request.

    `losses` lists the losses since the job last made progress. Times are Redis ms.
    """

    job_id: str
    tenant: str
    priority: Priority
    is_background: bool
    weight: float
    cost: int
    submitted_ms: int
    died_ms: int
    num_chunks: int
    preemptions: int
    losses: tuple[Loss, ...]


class DeadLetters:
    """The dead letters of all pools. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis, self._logged = cast(Any, redis), LoggedOnce(_LOG)

    @retried
    async def newest(self, pool: str, limit: int = 100) -> list[DeadLetter]:
        """Return a pool's dead letters, newest first."""
        with translated():
            job_ids = await self._redis.zrevrange(keys.dead_letters(pool), 0, limit - 1)
            found = await asyncio.gather(*(self._read(job_id.decode()) for job_id in job_ids))
        return [letter for letter in found if letter is not None]

    @retried
    async def get(self, job_id: str) -> DeadLetter:
        """Return one dead letter. Raises NotFoundError."""
        with translated():
            died_ms = await self._redis.zscore(keys.dead_letters(pool_of(job_id)), job_id)
            letter = await self._read(job_id) if died_ms is not None else None
        if letter is None:
            raise _no_letter(job_id)
        return letter

    @retried
    async def request(self, job_id: str) -> Request:
        """Return the job's request. Raises NotFoundError."""
        with translated():
            data = await self._redis.get(keys.request(job_id))
        if data is None:
            raise _no_letter(job_id)
        return wire.decode_request(data)

    @retried
    async def purge(self, job_ids: Sequence[str]) -> int:
        """Delete dead letters and their requests. Returns how many were dead letters."""
        return sum([await scripts.call(self._redis, "purge", pool_of(job_id), job_id) for job_id in job_ids])

    @retried
    async def purge_all(self, pool: str) -> int:
        """Delete all dead letters of a pool, also those whose jobs' records are gone. Returns how many there were."""
        num_purged = 0
        while True:
            with translated():
                job_ids = await self._redis.zrange(keys.dead_letters(pool), 0, _PURGED_AT_ONCE - 1)
            if not job_ids:
                return num_purged
            num_purged += await scripts.call(self._redis, "purge", pool, *job_ids)

    async def _read(self, job_id: str) -> DeadLetter | None:
        try:
            values = await self._redis.hmget(keys.job(job_id), _FIELDS)
            return None if values[0] is None else _letter(job_id, values)
        except (ValueError, ResponseError) as error:
            if isinstance(error, ResponseError) and not str(error).startswith("WRONGTYPE"):
                raise
            self._logged.warn("unreadable job record", keys.job(job_id), error)
            return None


def _letter(job_id: str, values: Sequence[bytes | None]) -> DeadLetter:
    """Parse the fields of a dead letter. Raises ValueError."""
    tenant, level, weight, cost, submitted, finished, chunks, preemptions, losses = (
        (value or b"").decode() for value in values
    )
    numbers = (int(submitted), int(finished), int(chunks), int(preemptions))
    # `node@ms node@ms`. An older version wrote the nodes alone; their time is 0.
    parts = (loss.partition("@") for loss in losses.split())
    lost = tuple(Loss(node_id, int(at_ms or 0)) for node_id, _, at_ms in parts)
    kind = (class_of_level(int(level)), is_background(int(level)))
    return DeadLetter(job_id, tenant, *kind, float(weight or 1), int(cost), *numbers, lost)


def _no_letter(job_id: str) -> NotFoundError:
    return NotFoundError(f"no dead letter {job_id[:100]}", code="job_not_found", param="job_id")
