"""Task cancellation that survives libraries which swallow CancelledError."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_RETRY_S = 0.1


async def cancel_until_done(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended.

    It cancels repeatedly, because redis-py (8.1) loses a cancellation that arrives while it connects.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_RETRY_S)


@contextmanager
def preserve_cancellation() -> Iterator[None]:
    """Raise CancelledError at the end of the block if the task was canceled inside, even if the block swallowed it.

    Until Python 3.12, `asyncio.wait_for`, through which redis-py sends, loses a cancellation that arrives together with
    the awaited result: https://github.com/python/cpython/issues/86296
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > num_before:
            raise asyncio.CancelledError
