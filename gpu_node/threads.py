"""Blocking calls on daemon threads, which do not delay the end of the process if a call hangs in a library."""

from __future__ import annotations

import _thread
import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

MAX_AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""The limit of `asyncio.to_thread`. Its own threads are not used, because a process waits for them at its end."""


class Threads:
    """A pool for blocking calls beside the event loop: at most `max_at_once` run, further calls wait."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._semaphore = asyncio.Semaphore(max_at_once)

    async def run(self, call: Callable[[], T]) -> T:
        """Return what the call returns, or raise what it raises. Cancellation does not stop a call that has begun."""
        async with self._semaphore:
            answer: Future[T] = Future()
            answer.set_running_or_notify_cancel()
            # `Thread.start` waits until the new thread runs: up to 80 ms of the event loop if all cores are busy.
            _thread.start_new_thread(_run, (call, answer))
            return await asyncio.wrap_future(answer)


def _run(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)
