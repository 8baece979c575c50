"""Calls to the broker on behalf of many streams: repeated while Redis is away, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.contract.broker.producer import ProducerBroker
from penstock.producer.client.retry import patiently

MAX_CALLS = 64
"""Calls under way at once, each on a connection of its own; after an outage all streams call at once."""

T = TypeVar("T")


class Courier:
    """Patience and restraint around a `ProducerBroker`."""

    def __init__(self, broker: ProducerBroker, outage_s: float) -> None:
        self._broker = broker
        self._outage_s = outage_s
        self._slots = asyncio.Semaphore(MAX_CALLS)

    async def ask(self, call: Callable[[ProducerBroker], Awaitable[T]]) -> T:
        """The answer of an idempotent call; raises UnavailableError when Redis stays away."""

        async def attempt() -> T:
            async with self._slots:
                return await call(self._broker)

        return await patiently(attempt, self._outage_s)
