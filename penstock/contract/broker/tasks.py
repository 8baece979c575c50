"""Ending tasks that speak to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.1


async def cancel_until_done(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for their end. Cancels again, because redis-py (8.1) loses a cancellation that arrives
    while it connects.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
