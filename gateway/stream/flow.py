"""The chunks of an order's jobs as one bounded flow, and their results as one list."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from penstock.contract.job import Chunk, Result
from penstock.producer.client import AsyncJob

MAX_ITEMS = 256
"""Behind this much the client's own bounded mailbox fills, and past that the log is read."""

Item = tuple[int, Chunk | Exception]
"""The job's place in the order, and its next chunk or what ended the reading of it."""


class Flow:
    """Items in the order in which they came, a job's own in the order of its log."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Item] = asyncio.Queue(MAX_ITEMS)

    async def take(self, timeout_s: float) -> list[Item]:
        """All that is there, waiting for the first; nothing after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                items = [await self._queue.get()]
        except TimeoutError:
            return []
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items

    async def read(self, index: int, job: AsyncJob) -> None:
        """Passes on one job's chunks until it ended."""
        try:
            async with aclosing(job.batches()) as batches:
                async for batch in batches:
                    for chunk in batch:
                        await self._queue.put((index, chunk))
        except Exception as error:
            # Of any kind: a reader that died silently would leave the caller waiting for ever.
            await self._queue.put((index, error))


@contextlib.asynccontextmanager
async def flow_of(jobs: Sequence[AsyncJob]) -> AsyncIterator[Flow]:
    """Reads all jobs at once for as long as the block lasts."""
    flow = Flow()
    readers = [asyncio.create_task(flow.read(index, job)) for index, job in enumerate(jobs)]
    try:
        yield flow
    finally:
        await _cancel(readers)


async def results_of(jobs: Sequence[AsyncJob]) -> list[Result]:
    """All results; the first job that does not end well raises its error at once."""
    waiting = [asyncio.create_task(job.result()) for job in jobs]
    try:
        return await asyncio.gather(*waiting)
    finally:
        await _cancel(waiting)


async def _cancel(tasks: Sequence[asyncio.Task[None]] | Sequence[asyncio.Task[Result]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
