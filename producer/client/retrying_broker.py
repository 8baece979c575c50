"""Broker calls for many streams: retried while Redis is away, with a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.contract.errors import UnavailableError
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.broker.retry import pauses

MAX_CALLS = 64
"""Concurrent calls: after an outage, all streams call at once."""

T = TypeVar("T")


class RetryingBroker:
    """Retry the calls of a `ProducerBroker` while Redis is away, and bound their number.

    `outage_s` is how long a call is retried. The client sets `is_open` while it is connected.
    """

    def __init__(self, broker: ProducerBroker, outage_s: float) -> None:
        self._broker = broker
        self._outage_s = outage_s
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self.is_open = False

    async def call(self, request: Callable[[ProducerBroker], Awaitable[T]]) -> T:
        """Send an idempotent request to the broker and return its answer.

        Raises UnavailableError if Redis stays away for `outage_s`, or if the client is closed.
        """
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + self._outage_s
        patience = pauses()
        while True:
            self.require_open()
            await self._take_slot(give_up_s)
            try:
                return await request(self._broker)
            except UnavailableError:
                pause_s = next(patience)
                if clock() + pause_s > give_up_s:
                    raise
            finally:
                self._slots.release()
            await asyncio.sleep(pause_s)

    async def _take_slot(self, give_up_s: float) -> None:
        if not self._slots.locked():
            await self._slots.acquire()  # a slot is free, so this does not wait
            return
        try:
            async with asyncio.timeout_at(give_up_s):
                await self._slots.acquire()
        except TimeoutError:
            raise UnavailableError(f"Redis is away: {MAX_CALLS} calls wait for it", code="redis_away") from None

    def require_open(self) -> None:
        """Raise UnavailableError unless the client is connected."""
        if not self.is_open:
            raise UnavailableError("the client is not connected: use `with` or connect()", code="client_closed")
