"""Calls that many callers share: what is asked for at the same time goes to Redis together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeVar

from penstock.contract.errors import InvariantError, UnavailableError
from penstock.runtime.cancellation import cancel_until_done

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MAX_ITEMS = 128
"""Items of one call."""
MAX_BYTES = 512 << 10
"""Bytes of the items of one call, so that it blocks Redis only shortly. A single larger item still goes out."""
MAX_CALLS = 4
"""Calls of one key that may be in flight. Further items wait, and then share a call."""


class SharedCalls(Generic[Item, Answer]):
    """Items that wait for the next call, by a key: only items of the same key go together.

    An item alone leaves in the same round of the event loop, so no caller waits for others.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        size_of: Callable[[Item], int] = lambda _: 0,
        *,
        max_items: int = MAX_ITEMS,
    ) -> None:
        """`call` returns an answer for each item. `size_of` returns the bytes of an item."""
        self._max_items = max_items
        self._call = call
        self._size_of = size_of
        self._waiting: dict[Hashable, list[tuple[Item, asyncio.Future[Answer]]]] = {}
        self._num_calls = Counter[Hashable]()
        self._tasks = set[asyncio.Task[None]]()

    async def add(self, key: Hashable, item: Item) -> Answer:
        """Return the answer to an item. Raises the error of its call."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Answer] = loop.create_future()
        if (waiting := self._waiting.get(key)) is not None:
            waiting.append((item, done))
        else:
            self._waiting[key] = [(item, done)]
            loop.call_soon(self._send, key)
        return await done

    async def close(self) -> None:
        """Cancel all calls. Their callers get UnavailableError."""
        await cancel_until_done(list(self._tasks))

    def _send(self, key: Hashable) -> None:
        while self._num_calls[key] < MAX_CALLS and (batch := self._next_batch(key)):
            self._num_calls[key] += 1
            task = asyncio.create_task(self._run(batch), name="penstock shared call")
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_end, key, batch))
        if not self._num_calls[key]:
            del self._num_calls[key]

    def _next_batch(self, key: Hashable) -> list[tuple[Item, asyncio.Future[Answer]]]:
        """Take the items of the next call from those that wait, except those whose callers are gone."""
        waiting = [one for one in self._waiting.pop(key, ()) if not one[1].done()]
        num_bytes = 0
        for at, (item, _) in enumerate(waiting):
            num_bytes += self._size_of(item)
            if at == self._max_items or (at and num_bytes > MAX_BYTES):
                self._waiting[key] = waiting[at:]
                return waiting[:at]
        return waiting

    async def _run(self, batch: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        answers = await self._call([item for item, _ in batch])
        for (_, done), answer in zip(batch, answers, strict=True):
            if not done.done():
                done.set_result(answer)

    def _on_end(
        self, key: Hashable, batch: Sequence[tuple[Item, asyncio.Future[Answer]]], task: asyncio.Task[None]
    ) -> None:
        self._tasks.discard(task)
        self._num_calls[key] -= 1
        error: BaseException | None
        if task.cancelled():
            error = UnavailableError("the client was closed", code="client_closed")
        else:
            error = task.exception()
        for _, done in batch:
            if not done.done():
                done.set_exception(error or InvariantError("a shared call left an item without an answer"))
        self._send(key)
