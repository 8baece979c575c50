"""The comment that a silent stream sends while its job waits in the queue."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from penstock.contract.waiting import QueuePosition
from penstock.producer.client import AsyncJob

MAX_LOOKUP_S = 1.0
"""Seconds that a comment waits for the position. Positions of all streams are read together, a few times a second."""


async def waiting_comment(job: AsyncJob, plain: bytes) -> bytes:
    """Return `plain`, a comment of one line, with the job's position if the job is in the queue."""
    update = None
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_LOOKUP_S), aclosing(job.waiting()) as updates:
            update = await anext(updates, None)
    if not isinstance(update, QueuePosition) or not update.position:
        return plain
    words = f", position {update.position}"
    if update.estimated_wait_ms is not None:
        words += f", about {-(-update.estimated_wait_ms // 1000)} s"
    return plain.replace(b"\n", words.encode() + b"\n", 1)
