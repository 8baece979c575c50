"""What takes long, on threads that end with the process: nobody waits there for a call that hangs in a library."""

from __future__ import annotations

import _thread
import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

MAX_AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""As `asyncio.to_thread` has it, whose own threads a process waits for before it ends."""


class Threads:
    """Runs calls beside the event loop, some at once; the others wait."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._room = asyncio.Semaphore(max_at_once)

    async def run(self, call: Callable[[], T]) -> T:
        """What a call gives, or raises. One that nobody waits for any more goes on unheard."""
        async with self._room:
            answer: Future[T] = Future()
            answer.set_running_or_notify_cancel()
            # `Thread.start` waits until the new thread runs: up to 80 ms of the event loop where all cores are busy.
            _thread.start_new_thread(_run, (call, answer))
            return await asyncio.wrap_future(answer)


def _run(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)
