"""Cooperative scheduling of work that takes milliseconds: one piece per round of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")
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
