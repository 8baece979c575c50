"""Cancellation that is not lost inside a call to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def heeding_cancel() -> Iterator[None]:
    """Raises CancelledError when the task was cancelled inside, even where what runs inside has swallowed it.

    Until Python 3.12, `asyncio.wait_for` (which redis-py sends through) forgets a cancellation that comes together with
    the end of what it waits for: https://github.com/python/cpython/issues/86296
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > num_before:
            raise asyncio.CancelledError
