"""Cancellation that is not lost inside a call to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


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
