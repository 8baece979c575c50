"""What several jobs say, as one bounded flow; and what they have said, as one list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from penstock.contract.job import Chunk, Result
from penstock.producer.client import AsyncJob

MAX_BATCHES = 64
"""Behind this much the client's own bounded mailboxes fill, and past those the log is read."""

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


async def results_of(jobs: Sequence[AsyncJob]) -> list[Result]:
    """All results; the first job that does not end well raises its error at once."""
    waiting = [asyncio.create_task(job.result()) for job in jobs]
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


async def _cancel(tasks: Sequence[asyncio.Task[None]] | Sequence[asyncio.Task[Result]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
