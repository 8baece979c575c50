"""The event loop of long-running processes, and what its tasks share: turns, gathered calls, threads, cancellation."""

from __future__ import annotations

import _thread
import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar, cast

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, on uvloop if it is installed: its messages take less CPU time."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


ITEMS_PER_ROUND = 256
"""Items of a short piece of work each, about a microsecond, that are handled in one round of the event loop."""


class LoopYielder:
    """Wakes one waiter per round of the event loop, in order, so that many ready pieces do not block it together."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_serving = False

    async def wait(self) -> None:
        """Wait until the caller may work for a few milliseconds."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.append(waiter)
        if not self._is_serving:
            self._is_serving = True
            loop.call_soon(self._serve)
        await waiter

    def _serve(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its caller may have been canceled
                waiter.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._serve)
        else:
            self._is_serving = False


async def in_rounds(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items that exist now, and let other tasks run after every ITEMS_PER_ROUND."""
    for number, item in enumerate(list(items), start=1):
        yield item
        if number % ITEMS_PER_ROUND == 0:
            await asyncio.sleep(0)


CALLS_AT_ONCE = 64
"""Calls or tasks that may start or end in one round of the event loop. More would hold it for several milliseconds."""


async def try_all(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Make all calls, a group at a time, and ignore their errors."""
    for start in range(0, len(calls), CALLS_AT_ONCE):
        await asyncio.gather(*(call() for call in calls[start : start + CALLS_AT_ONCE]), return_exceptions=True)


async def gathered(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all calls and return their answers in order. Raises the first error once all calls have ended."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast("list[T]", outcomes)


async def gather_all(*calls: Coroutine[Any, Any, None]) -> None:
    """Await all calls, then raise the first error."""
    if len(calls) == 1:
        return await calls[0]  # The common case. A task would delay a first token by 0.05 ms.
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
    return None


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


MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""The limit of `asyncio.to_thread`. Its own threads are not used, because a process waits for them at its end."""


class Threads:
    """A pool for blocking calls beside the event loop: at most `max_at_once` run, further calls wait.

    Its threads are daemons: they do not delay the end of the process if a call hangs in a library.
    """

    def __init__(self, max_at_once: int = MAX_THREADS) -> None:
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
