"""What several jobs say, as one bounded flow; and what they have said, as one list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from penstock.contract.job import Chunk
from penstock.producer.client import AsyncJob
from penstock.queue.packed_result import PackedResult

MAX_BATCHES = 64
"""Behind this much the client's own bounded mailboxes fill, and past those the log is read."""
MAX_KEPT_BYTES = 1 << 20
"""Of results that wait until all jobs of a request have ended."""

Batch = list[Chunk]
"""The next chunks of one job, at least one."""


def batches_of(jobs: Sequence[AsyncJob]) -> AsyncGenerator[Batch, None]:
    """Batches in the order in which they come, a job's own in the order of its log, until all jobs have ended."""
    return jobs[0].batches() if len(jobs) == 1 else _merged(jobs)


async def _merged(jobs: Sequence[AsyncJob]) -> AsyncGenerator[Batch, None]:
    queue: asyncio.Queue[Batch | Exception] = asyncio.Queue(MAX_BATCHES)
    readers = [asyncio.create_task(_read(job, queue)) for job in jobs]
    num_open = len(jobs)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item[-1].outcome is not None
            yield item
    finally:
        await _cancel(readers)


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that ended well: its result where that is small, else only how large it is."""

    num_bytes: int
    result: PackedResult | None


async def ends_of(jobs: Sequence[AsyncJob]) -> list[Ended]:
    """How all jobs ended; the first one that does not end well raises its error at once.

    Together the results that are kept have at most MAX_KEPT_BYTES. The others are fetched when they are rendered.
    """
    num_kept = 0

    async def end_of(job: AsyncJob) -> Ended:
        nonlocal num_kept
        result = await job.packed_result()
        if num_kept + result.num_bytes > MAX_KEPT_BYTES:
            return Ended(result.num_bytes, None)
        num_kept += result.num_bytes
        return Ended(result.num_bytes, result)

    waiting = [asyncio.create_task(end_of(job)) for job in jobs]
    try:
        return await asyncio.gather(*waiting)
    finally:
        await _cancel(waiting)


async def _read(job: AsyncJob, queue: asyncio.Queue[Batch | Exception]) -> None:
    try:
        async with aclosing(job.batches()) as batches:
            async for batch in batches:
                await queue.put(batch)
    except Exception as error:
        # Of any kind: a reader that died silently would leave the caller waiting for ever.
        await queue.put(error)


async def _cancel(tasks: Sequence[asyncio.Task[None]] | Sequence[asyncio.Task[Ended]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
